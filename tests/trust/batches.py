"""Batches of rarer kinds, and what comes and goes in them: containers, memory layouts, types, ragged and empty parts."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from tests.trust.case import STEPS, Made, Net, adamw, cases_of, labelled, mse, pairs, sgd, tokens, train
from torch import nn
from torch.nn.utils import rnn

case, more = cases_of("batches")


class Row(TypedDict, total=False):
    x: torch.Tensor
    y: torch.Tensor
    mask: torch.Tensor | None


@more
def typed_dictionary_with_entries_that_come_and_go() -> Made:
    batches: list[Any] = [Row(x=x, y=y) for x, y in pairs()]
    batches[2]["mask"] = torch.tensor([1.0] * 4 + [0.0] * 4)
    batches[4]["mask"] = None

    def loss(m: Any, b: Any) -> torch.Tensor:
        error = (m(b["x"]) - b["y"]).square().mean(1)
        mask = b.get("mask")
        return error.mean() if mask is None else (error * mask).sum() / mask.sum()

    return train(loss, batches=batches)


class Encoding(collections.UserDict):
    """As tokenizers return it: a dictionary by attribute, with lengths beside."""

    def __init__(self, data: dict[str, Any], lengths: Any = None) -> None:
        super().__init__(data)
        self.lengths = lengths

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


@more
def encoding_whose_attribute_changes() -> Made:
    batches = [Encoding({"x": x, "y": y}, 4 + i // 2) for i, (x, y) in enumerate(pairs())]
    loss = lambda m, b: F.mse_loss(m(b.x)[: b.lengths], b["y"][: b.lengths])  # noqa: E731
    return train(loss, batches=batches)


@more
def ragged_lists_of_tensors() -> Made:
    source = torch.Generator().manual_seed(3)
    batches = [[torch.randn(n, 6, generator=source) for n in (2 + i % 2, 3, 4 - i % 3)] for i in range(STEPS)]

    def loss(m: Any, b: Any) -> torch.Tensor:
        return torch.stack([m(x).square().mean() for x in b]).mean()

    return train(loss, batches=batches)


@more
def ragged_lists_padded_in_the_loss() -> Made:
    source = torch.Generator().manual_seed(3)
    batches = [[torch.randn(n, 6, generator=source) for n in (2, 3 + i % 2, 5)] for i in range(STEPS)]

    def loss(m: Any, b: Any) -> torch.Tensor:
        padded = rnn.pad_sequence(b, batch_first=True)
        lengths = torch.tensor([len(x) for x in b])
        mask = torch.arange(padded.shape[1])[None] < lengths[:, None]
        return (m(padded).square().mean(-1) * mask).sum() / mask.sum()

    return train(loss, batches=batches)


@more
def lengths_as_a_list_of_numbers() -> Made:
    batches = [(x, y, [1, 3 - i % 2, 1 + i % 3]) for i, (x, y) in enumerate(pairs())]

    def loss(m: Any, b: Any) -> torch.Tensor:
        parts = m(b[0]).split([*b[2], 8 - sum(b[2])])
        wanted = b[1].split([*b[2], 8 - sum(b[2])])
        return sum(F.mse_loss(p, w, reduction="sum") / (len(p) + 1) for p, w in zip(parts, wanted))

    return train(loss, batches=batches)


@case
def targets_as_plain_numbers() -> Made:
    batches = [(x, [float(v) for v in y[:, 0]]) for x, y in pairs()]
    return train(lambda m, b: F.mse_loss(m(b[0])[:, 0], torch.tensor(b[1])), batches=batches)


@more
def labels_as_a_list_of_integers() -> Made:
    batches = [(x, y.tolist()) for x, y in labelled()]
    return train(lambda m, b: F.cross_entropy(m(b[0]), torch.tensor(b[1])), batches=batches)


@more
def packed_sequence_as_the_batch() -> Made:
    source = torch.Generator().manual_seed(4)
    model = nn.Linear(6, 3)
    batches = [
        rnn.pack_sequence([torch.randn(n, 6, generator=source) for n in (5, 3 + i % 2, 2)]) for i in range(STEPS)
    ]
    return train(lambda m, b: m(b.data).square().mean(), model=model, batches=batches)


class Split(enum.Enum):
    TRAIN = 1
    EXTRA = 2


@more
def keys_that_are_no_texts() -> Made:
    """Keys are members of an enum, numbers and tuples."""
    batches = [{Split.TRAIN: x, 0: y, ("w", 1): 1.0 / (i + 1)} for i, (x, y) in enumerate(pairs())]
    loss = lambda m, b: F.mse_loss(m(b[Split.TRAIN]), b[0]) * b["w", 1]  # noqa: E731
    return train(loss, batches=batches)


@more
def keys_in_an_order_that_matters() -> Made:
    model = nn.ModuleDict({"trunk": nn.Linear(6, 6), "head": nn.Linear(6, 3)})
    batches = [{"x": x, "order": {"tanh": 1.0, "sin": 2.0} if i < 3 else {"sin": 2.0, "tanh": 1.0}, "y": y}
               for i, (x, y) in enumerate(pairs())]  # fmt: skip

    def loss(m: Any, b: Any) -> torch.Tensor:
        hidden = m["trunk"](b["x"])
        for name, factor in b["order"].items():
            hidden = getattr(torch, name)(hidden * factor)
        return F.mse_loss(m["head"](hidden), b["y"])

    return train(loss, model=model, batches=batches)


@more
def functions_in_the_batch() -> Made:
    """A collator that hands over what is to be applied."""
    batches = [(x, y, torch.tanh if i % 3 else torch.sin) for i, (x, y) in enumerate(pairs())]
    return train(lambda m, b: F.mse_loss(b[2](m(b[0])), b[1]), batches=batches)


@more
def sets_in_the_batch() -> Made:
    batches = [(x, y, {"flip", "scale"} if i >= 3 else {"scale"}) for i, (x, y) in enumerate(pairs())]

    def loss(m: Any, b: Any) -> torch.Tensor:
        x = b[0].flip(1) if "flip" in b[2] else b[0]
        return F.mse_loss(m(x), b[1]) * (0.5 if len(b[2]) == 2 else 1.0)

    return train(loss, batches=batches)


class Lazy(Mapping):
    """Entries are computed when they are asked for."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.raw = {"x": x, "y": y}

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.raw[key] * 0.5

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)


@more
def batch_that_computes_its_entries() -> Made:
    batches = [Lazy(x, y) for x, y in pairs()]
    loss = lambda m, b: F.mse_loss(m(b["x"]), b["y"])  # noqa: E731
    return train(loss, batches=batches)


class Graph:
    """Like PyG's: tensors as attributes, a number of nodes by property."""

    def __init__(self, x: torch.Tensor, edges: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.edge_index, self.y = x, edges, y

    @property
    def num_nodes(self) -> int:
        return self.x.shape[0]


@more
def graphs_with_other_numbers_of_edges() -> Made:
    source = torch.Generator().manual_seed(5)
    batches = [Graph(x, torch.randint(0, 8, (2, 9 + i), generator=source), y) for i, (x, y) in enumerate(pairs())]

    def loss(m: Any, g: Any) -> torch.Tensor:
        hidden = m.a(g.x)
        mixed = torch.zeros_like(hidden).index_add(0, g.edge_index[1], hidden[g.edge_index[0]])
        degree = torch.bincount(g.edge_index[1], minlength=g.num_nodes).clamp(min=1)
        return F.mse_loss(m.b(torch.tanh(mixed / degree[:, None])), g.y)

    return train(loss, batches=batches)


@more
def whole_numbers_of_another_width() -> Made:
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
    batches = [ids.to(torch.int32) if i in (2, 4) else ids for i, ids in enumerate(tokens())]
    loss = lambda m, b: F.cross_entropy(m(b[:, :-1]).flatten(0, 1), b[:, 1:].flatten().long())  # noqa: E731
    return train(loss, model=model, batches=batches)


@more
def images_of_bytes_and_of_floats() -> Made:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3))
    source = torch.Generator().manual_seed(6)
    batches = []
    for i in range(STEPS):
        x = torch.randint(0, 256, (4, 3, 6, 6), generator=source, dtype=torch.uint8)
        batches.append((x.float() / 255 if i % 2 else x, torch.randn(4, 3, generator=source)))

    def loss(m: Any, b: Any) -> torch.Tensor:
        x = b[0].float().div(255) if b[0].dtype == torch.uint8 else b[0]
        return F.mse_loss(m(x), b[1])

    return train(loss, model=model, batches=batches)


@more
def double_precision_once() -> Made:
    batches = [(x.double(), y) if i == 3 else (x, y) for i, (x, y) in enumerate(pairs())]
    return train(lambda m, b: F.mse_loss(m(b[0].float()), b[1]) + 0 * b[0].sum(), batches=batches)


@more
def layouts_of_every_kind() -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    source = torch.Generator().manual_seed(7)
    images = [torch.randn(4, 3, 6, 6, generator=source) for _ in range(STEPS)]
    images[1] = images[1].to(memory_format=torch.channels_last)
    images[2] = images[2].transpose(2, 3)
    images[3] = images[3][:1].expand(4, 3, 6, 6)
    images[4] = torch.randn(8, 3, 6, 12, generator=source)[::2, :, :, ::2]
    images[5] = torch.randn(6, 6, 3, 4, generator=source).permute(3, 2, 0, 1)
    return train(model=model, batches=[(x, torch.ones(4, 3)) for x in images])


@more
def inputs_that_require_gradients_now_and_then() -> Made:
    batches = [(x.requires_grad_(i in (2, 3)), y) for i, (x, y) in enumerate(pairs())]

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = mse(m, b)
        if b[0].requires_grad:
            (slope,) = torch.autograd.grad(out, b[0], create_graph=True)
            out = out + slope.square().sum()
        return out

    return train(loss, batches=batches)


@more
def truths_of_the_batch_flip() -> Made:
    batches = [{"pair": pair, "augment": bool(i % 2), "ema": i > 3} for i, pair in enumerate(pairs())]

    def loss(m: Any, b: Any) -> torch.Tensor:
        x, y = b["pair"]
        return F.mse_loss(m(x * (2.0 if b["augment"] else 1.0)), y) * (not b["ema"] or 0.5)

    return train(loss, batches=batches)


@more
def rows_of_numpy_beside_tensors() -> Made:
    source = np.random.default_rng(0)
    batches = [
        {"x": x, "y": source.normal(size=(8, 3)).astype(np.float32), "n": np.int64(i + 1)}
        for i, (x, _) in enumerate(pairs())
    ]
    loss = lambda m, b: F.mse_loss(m(b["x"]), torch.from_numpy(b["y"])) / b["n"]  # noqa: E731
    return train(loss, batches=batches)


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    weight: float = 1.0
    extra: torch.Tensor | None = None


@more
def samples_replaced_by_others_with_more() -> Made:
    batches = [Sample(x, y) for x, y in pairs()]
    batches[2] = dataclasses.replace(batches[2], weight=0.1)
    batches[4] = dataclasses.replace(batches[4], extra=torch.ones(8, 3))

    def loss(m: Any, b: Any) -> torch.Tensor:
        wanted = b.y if b.extra is None else b.y + b.extra
        return F.mse_loss(m(b.x), wanted) * b.weight

    return train(loss, batches=batches)


@more
def batch_of_batches_of_another_count() -> Made:
    """Views of one image: two at first, more later (multi-crop)."""
    batches = [[x + k for k in range(2 + i // 2)] for i, (x, _) in enumerate(pairs())]

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = [m(v) for v in b]
        return sum(F.mse_loss(o, out[0].detach()) + o.square().mean() for o in out) / len(out)

    return train(loss, batches=batches)


@more
def last_batch_is_empty_in_one_part() -> Made:
    batches = [{"x": x, "y": y, "more": x[: 3 - i // 2]} for i, (x, y) in enumerate(pairs())]
    loss = lambda m, b: F.mse_loss(m(b["x"]), b["y"]) + m(b["more"]).square().sum()  # noqa: E731
    return train(loss, batches=batches)


@more
def complex_numbers_in_the_batch() -> Made:
    batches = [(torch.fft.rfft(x), y) for x, y in pairs()]
    loss = lambda m, b: F.mse_loss(m(torch.fft.irfft(b[0], n=6)), b[1])  # noqa: E731
    return train(loss, batches=batches)


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor

    @property
    def weight(self) -> float:
        return 0.5 if self.x.shape[0] == 4 else 1.0


@more
def named_tuples_with_properties() -> Made:
    batches = [Point(x[: 4 if i > 2 else 8], y[: 4 if i > 2 else 8]) for i, (x, y) in enumerate(pairs())]
    return train(lambda m, b: F.mse_loss(m(b.x), b.y) * b.weight, batches=batches)


@more
def masks_of_numbers_and_truths() -> Made:
    masks: list[Any] = [
        torch.ones(8),
        torch.ones(8) > 0,
        torch.arange(8) % 2,
        torch.arange(8) % 2 == 0,
        torch.ones(8) * 0.5,
        torch.ones(8) > 0,
    ]
    batches = [(*pair, mask) for pair, mask in zip(pairs(), masks)]

    def loss(m: Any, b: Any) -> torch.Tensor:
        error = (m(b[0]) - b[1]).square().mean(1)
        return (error * b[2]).sum() / b[2].sum()

    return train(loss, batches=batches)


@more
def batches_made_in_place_by_a_pinned_buffer() -> Made:
    """A loader that reuses its memory: every batch is the same tensor, refilled before the step."""
    x, y = torch.zeros(8, 6), torch.zeros(8, 3)
    source = pairs()

    def change(i: int) -> None:
        x.copy_(source[i][0])
        y.copy_(source[i][1])

    return train(change=change, batches=[(x, y)] * STEPS, optimizer=adamw)


@more
def object_that_unpacks_itself() -> Made:
    class Pair(Sequence):
        def __init__(self, *parts: Any) -> None:
            self.parts = parts

        def __getitem__(self, i: Any) -> Any:
            return self.parts[i]

        def __len__(self) -> int:
            return len(self.parts)

    batches = [Pair(*pair) if i < 4 else Pair(*pair, 0.1) for i, pair in enumerate(pairs())]

    def loss(m: Any, b: Any) -> torch.Tensor:
        x, y, *weight = b
        return F.mse_loss(m(x), y) * (weight[0] if weight else 1.0)

    return train(loss, batches=batches)


@more
def namespaces_within_namespaces() -> Made:
    batches = [
        types.SimpleNamespace(data=types.SimpleNamespace(x=x, y=y), meta={"epoch": i // 2})
        for i, (x, y) in enumerate(pairs())
    ]
    loss = lambda m, b: F.mse_loss(m(b.data.x), b.data.y) * (1.0 + b.meta["epoch"])  # noqa: E731
    return train(loss, batches=batches, model=Net(), optimizer=sgd)


class Loaded(list):
    """Batches as a loader gives them: each is made when it is asked for, and gone when the next one is."""

    def __init__(self, make: Callable[[int, Any, Any], Any]) -> None:
        super().__init__(range(STEPS))
        self.make = functools.lru_cache(maxsize=1)(lambda i: make(i, *pairs()[i]))

    def __getitem__(self, i: Any) -> Any:
        return self.make(i)


@case
def objects_that_end_with_their_step() -> Made:
    make = lambda i, x, y: Sample(x, y)  # noqa: E731
    return train(lambda m, b: F.mse_loss(m(b.x), b.y), batches=Loaded(make))


@more
def mappings_that_end_with_their_step() -> Made:
    make = lambda i, x, y: collections.UserDict(x=collections.OrderedDict(a=x), y=collections.deque([y]))  # noqa: E731
    return train(lambda m, b: F.mse_loss(m(b["x"]["a"]), b["y"][0]), batches=Loaded(make))
