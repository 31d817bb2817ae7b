"""Dynamo's graph of a loss as it is read: marks, module paths, numbers of tensors, assertions, and a hash that processes share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.capture.readings import reading_of, subject_of
from tests.runtime.twins import Side, Twins, class_batches, classify, interpreted, small_mlp
from torch import nn

from wholestep.capture.cache import capture_key
from wholestep.capture.front.replay import as_number, user_line
from wholestep.errors import WholestepWarning
from wholestep.graph.training_graph import OutputKind, Role

BATCHES = class_batches()
ROOT = Path(__file__).resolve().parents[3]


def sgd(model: nn.Module, loss_fn: Any = classify) -> Side:
    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)


def test_results_are_told_apart() -> None:
    """The loss, aux by name, and tensors that the Python keeps somewhere."""
    kept: list[torch.Tensor] = []

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        logits = model(batch[0])
        kept[:] = [logits.detach()]
        return F.cross_entropy(logits, batch[1]), {"top": logits.max(), "mean": logits.mean()}

    side = sgd(small_mlp(), loss_fn)
    reading = reading_of(subject_of(side), BATCHES[0])
    kinds = [(r.kind, r.name) for r in reading.graph.returned]
    assert ("loss", "") in kinds and {("aux", "top"), ("aux", "mean")} <= set(kinds)
    assert sum(kind == "kept" for kind, _ in kinds) == 1 and kept == [], "nothing ran"
    assert reading.names(Role.BATCH) == ["0", "1"] and len(reading.names(Role.PARAMETER)) == 4
    step = interpreted(side, BATCHES[0], check="off")
    aux = step(BATCHES[0])[1]
    assert list(aux) == ["top", "mean"] and kept[0].shape == (5, 3)
    assert [o.name for o in step.graph.outputs if o.kind is OutputKind.AUX][:2] == ["top", "mean"]


def test_an_aux_that_is_the_loss_itself() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        loss = classify(model, batch)
        return loss, {"loss": loss, "again": loss}

    step = interpreted(sgd(small_mlp(), loss_fn), BATCHES[0])
    loss, aux = step(BATCHES[0])
    assert list(aux) == ["loss", "again"] and all(float(value) == float(loss) for value in aux.values())


def test_modules_have_boundaries_also_when_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(self.inner(x).tanh()))

    step = interpreted(sgd(Twice()), BATCHES[0])
    assert {"inner", "inner#2", "head"} <= set(step.graph.boundaries)
    paths = {n.meta["custom"].get("module") for n in step.graph.operations()}
    assert {"inner", "head"} <= paths
    lines = {str(n.meta["custom"].get("source")) for n in step.graph.operations()}
    assert any(line.startswith("test_loss_graph.py:") for line in lines)


@pytest.mark.parametrize("check", ["first", "off"])
def test_item_and_what_is_computed_from_it(check: str) -> None:
    """Numbers read off tensors are computed with in double precision, as Python does; they may come back as tensors."""

    def make() -> Side:
        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            total, count = batch[0].sum().item(), (batch[1] > 0).sum().item()
            share = count / batch[1].shape[0]
            limited = max(min(total, 2.0), -2.0)
            return classify(model, batch) * (1.5 + 0.1 * limited) + torch.scalar_tensor(share) + torch.tensor(total) * 0

        return sgd(small_mlp(), loss_fn)

    twins = Twins(make, BATCHES[0], check=check)
    twins.train(BATCHES, tolerance=1e-6)
    assert (twins.step.rung, twins.step.captures) == ("whole step", 1), twins.step.explain()


def test_item_for_a_log_is_the_number() -> None:
    def make() -> Side:
        side = sgd(small_mlp())
        side.extra = []

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            loss = classify(model, batch)
            side.extra.append((loss.item(), int(batch[1].sum().item())))
            return loss

        side.loss_fn = loss_fn
        return side

    twins = Twins(make, BATCHES[0])
    twins.train(BATCHES)
    assert twins.ours.extra == twins.theirs.extra and len(twins.ours.extra) == len(BATCHES)
    assert [type(v) for v in twins.ours.extra[-1]] == [float, int]
    assert twins.step.rung == "whole step"


def test_numbers_promote_as_pythons() -> None:
    half = as_number(torch.ones((), dtype=torch.bfloat16))
    assert half.dtype == torch.float64 and half.dim() == 0
    assert as_number(torch.ones((1,), dtype=torch.int32)).dtype == torch.int64
    assert as_number(torch.ones((), dtype=torch.bool)).dtype == torch.bool


def test_the_users_line_of_a_trace() -> None:
    trace = f'File "{torch.__file__}", line 3, in f\n  File "{__file__}", line 7, in g\n  File "{torch.__file__}", line 9, in h'
    assert user_line(trace) == "test_loss_graph.py:7" and user_line("no file") is None


SCRIPT = """
import sys, torch
from torch import nn
from tests.capture.readings import reading_of, subject_of
from tests.runtime.twins import Side
from wholestep.capture.cache import capture_key

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop = nn.Linear(4, 3), nn.Dropout(0.1)
        self.register_buffer("table", torch.arange(3.0))
    def forward(self, x):
        return self.drop(self.a(x)) * self.table + torch.tensor([1.0, 2.0, 3.0])

junk = [object() for _ in range(int(sys.argv[1]))]
model = Net()
side = Side(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).square().mean() + b.max().item())
subject = subject_of(side)
print(capture_key(subject, reading_of(subject, torch.ones(2, 4))))
"""


@pytest.mark.slow
def test_two_processes_have_one_hash() -> None:
    keys = []
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, junk], stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": junk, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        )
        for junk in ("1", "1000")
    ]  # fmt: skip
    for process in running:
        keys.append(process.communicate()[0].split()[-1])
    assert keys[0] == keys[1]


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["number", "tensor"])
def test_a_constant_in_the_graph_is_part_of_the_hash(kind: Any) -> None:
    keys = set()
    for scale in (2.0, 3.0):
        subject = subject_of(sgd(small_mlp(), lambda m, b, scale=scale: classify(m, b) * kind(scale)))
        keys.add(capture_key(subject, reading_of(subject, BATCHES[0])))
    assert len(keys) == 2


def test_an_intermediate_value_may_be_asked_for_its_gradient() -> None:
    """As speech models of transformers do, for activation checkpointing; nobody can read that gradient later."""

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        seen = batch[0] * 1.0
        seen.requires_grad = True
        assert seen.requires_grad
        return classify(model, (seen, batch[1]))

    twins = Twins(lambda: sgd(nn.Linear(4, 3), loss_fn), BATCHES[0])
    twins.train(BATCHES)
    assert twins.step.rung == "whole step", twins.step.explain()


def test_numbers_that_vary_in_a_tensor_and_sizes_that_are_kept() -> None:
    """`torch.tensor([1, number])` is no number itself; a size that the Python keeps is handed over as one."""

    def make() -> Side:
        side = sgd(nn.Linear(4, 3), lambda model, batch: classify(model, batch))
        side.extra = {"weight": 1.0, "rows": []}

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            side.extra["last"] = batch[0].shape[0]
            return classify(model, batch) * torch.tensor([1.0, side.extra["weight"]]).sum()

        side.loss_fn = loss_fn
        return side

    twins = Twins(make, BATCHES[0])
    for number, (x, y) in enumerate(BATCHES):
        twins.both(lambda side, number=number: side.extra.update(weight=1.0 + number))
        twins.train([(x[: 5 - number % 4], y[: 5 - number % 4])], tolerance=1e-6)
        assert twins.ours.extra["last"] == twins.theirs.extra["last"] == len(x[: 5 - number % 4])
    assert twins.step.rung == "whole step", twins.step.explain()


def test_cudnn_may_be_set_aside_for_a_part_of_the_loss() -> None:
    """As transformers do around CTC; it is as it was outside of that part, and when the capture is over."""

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        scores = model(batch[0])
        with torch.backends.cudnn.flags(enabled=False):
            return torch.nn.functional.cross_entropy(scores, batch[1])

    before = torch.backends.cudnn.enabled
    twins = Twins(lambda: sgd(nn.Linear(4, 3), loss_fn), BATCHES[0])
    twins.train(BATCHES)
    assert twins.step.rung == "whole step" and torch.backends.cudnn.enabled == before, twins.step.explain()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_named_with_its_line() -> None:
    def jagged(model: nn.Module, batch: Any) -> torch.Tensor:
        nested = torch.nested.nested_tensor_from_jagged(batch[0], batch[1])
        return torch.nested.to_padded_tensor(model(nested), 0.0).square().mean()

    batch = (torch.randn(5, 4), torch.tensor([0, 2, 5]))
    with pytest.warns(WholestepWarning, match=r"a nested tensor; pad it .* \(at test_loss_graph\.py:\d+\)"):
        step = interpreted(sgd(small_mlp(), jagged), batch, check="off")
    assert step(batch).isfinite()
