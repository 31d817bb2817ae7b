"""Batches: other sizes, dtypes, keys and structures; strings and numbers beside the tensors, read or not."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tests.trust.case import STEPS, Made, Net, cases_of, labelled, mse, pairs, train
from torch import nn

case, more = cases_of("data")

NAMES = ("train-00", "train-01", "extra-00", "train-02", "extra-01", "train-03")


def dictionaries(**more: Any) -> list[dict[str, Any]]:
    """x and y by name; `more` are functions of the step's number."""
    return [{"x": x, "y": y, **{name: f(i) for name, f in more.items()}} for i, (x, y) in enumerate(pairs())]


def by_name(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def of_sizes(*sizes: int) -> list[Any]:
    return [(x[:n], y[:n]) for (x, y), n in zip(pairs(16), sizes)]


# ---- sizes and dtypes ----


@case
def last_batch_is_smaller() -> Made:
    return train(batches=of_sizes(16, 16, 16, 16, 16, 5))


@case
def last_batch_of_one() -> Made:
    return train(batches=of_sizes(8, 8, 8, 8, 8, 1))


@more
def first_batch_of_one() -> Made:
    return train(batches=of_sizes(1, 8, 8, 3, 8, 1))


@case
def every_batch_of_another_size() -> Made:
    return train(batches=of_sizes(8, 5, 7, 3, 9, 4))


@more
def sizes_with_batch_norm() -> Made:
    return train(
        model=nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), batches=of_sizes(8, 8, 6, 6, 4, 7)
    )


@more
def size_read_as_a_number() -> Made:
    return train(lambda m, b: mse(m, b) * (b[0].shape[0] / 16) ** 0.5, batches=of_sizes(8, 6, 12, 4, 16, 2))


@more
def branch_by_size() -> Made:
    loss = lambda m, b: mse(m, b) if len(b[0]) > 5 else (m(b[0]) - b[1]).abs().mean()  # noqa: E731
    return train(loss, batches=of_sizes(8, 8, 4, 8, 3, 9))


@more
def empty_batch() -> Made:
    loss = lambda m, b: (m(b[0]) - b[1]).square().sum() / max(1, len(b[0]))  # noqa: E731
    return train(loss, batches=of_sizes(8, 8, 0, 8, 0, 8))


@case
def other_dtypes() -> Made:
    dtypes = (torch.float32, torch.float64, torch.float32, torch.float16, torch.float32, torch.float64)
    batches = [(x.to(d), y.to(d)) for (x, y), d in zip(pairs(), dtypes)]
    return train(lambda m, b: F.mse_loss(m(b[0].float()), b[1].float()), batches=batches)


@more
def dtype_promotes() -> Made:
    batches = [(x, y.double() if i > 2 else y) for i, (x, y) in enumerate(pairs())]
    return train(lambda m, b: (m(b[0]) - b[1]).square().mean().float(), batches=batches)


@case
def labels_of_another_kind() -> Made:
    """Class numbers at first, then probabilities: the same call means two losses."""
    batches = [(x, y if i < 3 else F.one_hot(y, 3).float()) for i, (x, y) in enumerate(labelled())]
    return train(lambda m, b: F.cross_entropy(m(b[0]), b[1]), batches=batches)


@more
def other_strides() -> Made:
    batches = [(x if i % 2 else x.T.contiguous().T, y) for i, (x, y) in enumerate(pairs())]
    return train(batches=batches)


@more
def expanded_tensors() -> Made:
    batches = [(x[:1].expand(8, 6), y[:1].expand(8, 3)) if i > 2 else (x, y) for i, (x, y) in enumerate(pairs())]
    return train(batches=batches)


@more
def one_tensor_twice() -> Made:
    batches = [(x, x if i > 2 else x.flip(0)) for i, (x, _) in enumerate(pairs())]
    return train(lambda m, b: m(b[0]).square().mean() + m(b[1]).abs().mean(), batches=batches)


@case
def same_batch_object_refilled() -> Made:
    x, y = (part.clone() for part in pairs()[0])
    source = pairs()

    def change(i: int) -> None:
        x.copy_(source[i][0])
        y.copy_(source[i][1])

    return train(batches=[(x, y)] * STEPS, change=change)


@case
def batch_that_requires_gradients() -> Made:
    batches = [(x.requires_grad_(), y) for x, y in pairs()]

    def loss(m: Any, b: Any) -> torch.Tensor:
        return mse(m, b) + torch.autograd.grad(m(b[0]).sum(), b[0], create_graph=True)[0].square().mean()

    return train(loss, batches=batches)


@case
def sparse_adjacency() -> Made:
    edges = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]])
    batches = [
        (torch.sparse_coo_tensor(edges, torch.full((5,), 1.0 / (i + 1)), (8, 8)), x, y)
        for i, (x, y) in enumerate(pairs())
    ]
    return train(lambda m, b: F.mse_loss(torch.sparse.mm(b[0], m(b[1])), b[2]), batches=batches)


# ---- structures ----


@more
def dictionary_batch() -> Made:
    return train(by_name, batches=dictionaries())


@more
def list_batch() -> Made:
    return train(batches=[list(batch) for batch in pairs()])


@more
def single_tensor() -> Made:
    return train(lambda m, b: m(b).square().mean(), batches=[x for x, _ in pairs()])


@case
def namedtuple_batch() -> Made:
    class Rows(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor

    return train(lambda m, b: F.mse_loss(m(b.x), b.y), batches=[Rows(*batch) for batch in pairs()])


@case
def dataclass_batch() -> Made:
    @dataclasses.dataclass
    class Rows:
        x: torch.Tensor
        y: torch.Tensor
        scale: float = 1.0

    batches = [Rows(x, y, 1.0 if i < 3 else 0.1) for i, (x, y) in enumerate(pairs())]
    return train(lambda m, b: F.mse_loss(m(b.x), b.y) * b.scale, batches=batches)


@case
def object_batch() -> Made:
    class Graph:
        def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
            self.x, self.y, self.num_nodes = x, y, len(x)

    loss = lambda m, b: F.mse_loss(m(b.x), b.y) * b.num_nodes / 8  # noqa: E731
    return train(loss, batches=[Graph(*batch) for batch in of_sizes(8, 8, 6, 8, 4, 8)])


@more
def namespace_batch() -> Made:
    batches = [types.SimpleNamespace(x=x, y=y, name=NAMES[i]) for i, (x, y) in enumerate(pairs())]
    return train(lambda m, b: F.mse_loss(m(b.x), b.y), batches=batches)


@case
def dictionary_subclass_batch() -> Made:
    class Encoding(dict):
        def __getattr__(self, name: str) -> Any:
            return self[name]

    return train(lambda m, b: F.mse_loss(m(b.x), b["y"]), batches=[Encoding(batch) for batch in dictionaries()])


@more
def user_dictionary_batch() -> Made:
    return train(by_name, batches=[collections.UserDict(batch) for batch in dictionaries()])


@more
def nested_batch() -> Made:
    batches = [{"inputs": {"x": x, "more": [y, (x, None)]}} for x, y in pairs()]
    return train(lambda m, b: F.mse_loss(m(b["inputs"]["x"]), b["inputs"]["more"][0]), batches=batches)


@more
def list_of_tensors_that_grows() -> Made:
    batches = [([x[:2], x[2:4], x[4:]][: 1 + i % 3], y) for i, (x, y) in enumerate(pairs())]
    return train(
        lambda m, b: sum(m(part).square().mean() for part in b[0]) + m.b.bias.sum() * b[1].mean(), batches=batches
    )


@more
def numpy_batch() -> Made:
    batches = [(x.numpy(), y.numpy()) for x, y in pairs()]
    return train(lambda m, b: F.mse_loss(m(torch.from_numpy(b[0])), torch.from_numpy(b[1])), batches=batches)


# ---- keys ----


@case
def key_added_and_read() -> Made:
    batches = dictionaries()
    for batch in batches[3:]:
        batch["mask"] = torch.tensor([1.0, 0.0, 1.0])
    loss = lambda m, b: ((m(b["x"]) - b["y"]) ** 2 * b.get("mask", torch.ones(3))).mean()  # noqa: E731
    return train(loss, batches=batches)


@case
def key_added_and_not_read() -> Made:
    batches = dictionaries()
    batches[3]["spare"] = torch.ones(2)
    batches[4]["note"] = "unread"
    return train(by_name, batches=batches)


@case
def key_missing_raises() -> Made:
    """As in eager: the loop's `except KeyError` catches it, and training goes on."""
    batches = dictionaries()
    del batches[3]["y"]
    return train(by_name, batches=batches, raises={3: KeyError})


@more
def keys_in_another_order() -> Made:
    batches = [dict(reversed(batch.items())) if i % 2 else batch for i, batch in enumerate(dictionaries())]
    return train(by_name, batches=batches)


@case
def none_or_tensor() -> Made:
    batches = [(x, y, None if i % 2 else x[:, :1].abs()) for i, (x, y) in enumerate(pairs())]
    loss = lambda m, b: mse(m, b) if b[2] is None else ((m(b[0]) - b[1]) ** 2 * b[2]).mean()  # noqa: E731
    return train(loss, batches=batches)


# ---- strings and numbers ----


@case
def strings_not_read() -> Made:
    return train(by_name, batches=dictionaries(name=lambda i: NAMES[i]))


@case
def strings_read() -> Made:
    loss = lambda m, b: by_name(m, b) * (0.1 if b["name"].startswith("extra") else 1.0)  # noqa: E731
    return train(loss, batches=dictionaries(name=lambda i: NAMES[i]))


@more
def list_of_strings_not_read() -> Made:
    return train(by_name, batches=dictionaries(texts=lambda i: [f"text {i}-{row}" for row in range(8)]))


@case
def integers_not_read() -> Made:
    return train(by_name, batches=dictionaries(index=lambda i: i, ids=lambda i: [i, i + 1, i * i]))


@case
def integers_read() -> Made:
    loss = lambda m, b: by_name(m, b) / (1 + b["epoch"])  # noqa: E731
    return train(loss, batches=dictionaries(epoch=lambda i: i))


@more
def integer_as_a_length() -> Made:
    loss = lambda m, b: F.mse_loss(m(b["x"][: b["length"]]), b["y"][: b["length"]])  # noqa: E731
    return train(loss, batches=dictionaries(length=lambda i: 3 + i % 4))


@case
def floats_read() -> Made:
    return train(lambda m, b: by_name(m, b) * b["weight"], batches=dictionaries(weight=lambda i: 1.0 / (1 + i)))


@more
def booleans_read() -> Made:
    loss = lambda m, b: by_name(m, b) if b["square"] else (m(b["x"]) - b["y"]).abs().mean()  # noqa: E731
    return train(loss, batches=dictionaries(square=lambda i: i % 2 == 0))


@more
def numpy_numbers_read() -> Made:
    loss = lambda m, b: by_name(m, b) * float(b["weight"])  # noqa: E731
    return train(loss, batches=dictionaries(weight=lambda i: np.float32(1.0 / (1 + i))))


@case
def metadata_objects_not_read() -> Made:
    return train(
        by_name, batches=dictionaries(meta=lambda i: {"path": f"file-{i}", "size": (i, i + 1), "tags": {str(i)}})
    )


# ---- batches that the loss edits ----


@case
def labels_popped_by_the_loss() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        y = b.pop("y")
        return F.mse_loss(m(**b), y)

    batches = dictionaries()
    return train(loss, batches=batches, state=lambda: [list(batch) for batch in batches])


@more
def batch_entry_replaced_by_the_loss() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        b["x"] = (b["x"] - b["x"].mean(0)) / b["x"].std(0)
        return by_name(m, b)

    batches = dictionaries()
    return train(loss, batches=batches, state=lambda: [batch["x"] for batch in batches])


@case
def batch_tensor_written_by_the_loss() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        b[0].mul_(0.5)
        return mse(m, b)

    batches = pairs()
    return train(loss, batches=batches, state=lambda: [x for x, _ in batches])


@case
def model_that_takes_keywords() -> Made:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, **unused: Any) -> dict[str, torch.Tensor]:
            out = super().forward(x)
            return {"loss": F.mse_loss(out, y), "out": out}

    return train(None, model=Model(), batches=dictionaries(name=lambda i: NAMES[i]))
