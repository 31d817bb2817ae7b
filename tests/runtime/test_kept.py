"""A step that fails tells it as eager PyTorch does - type, words, the user's line, nothing else - and leaves nothing behind."""

from __future__ import annotations

import copy
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep
from wholestep import Step
from wholestep.errors import BadBatch

Batch = dict[str, torch.Tensor]


class OwnError(Exception):
    """With fields of its own."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")
        self.code = code


def missing_method(net: Any, h: torch.Tensor) -> Any:
    return net.missing(h)


def missing_key(net: Any, h: torch.Tensor) -> Any:
    return {"there": h}["gone"]


def list_index(net: Any, h: torch.Tensor) -> Any:
    return [h][3]


def wrong_operand(net: Any, h: torch.Tensor) -> Any:
    return h + "x"  # type: ignore[operator]


def own_words(net: Any, h: torch.Tensor) -> Any:
    raise ValueError("rows must be sorted")


def own_class(net: Any, h: torch.Tensor) -> Any:
    raise OwnError(7, "no such row")


def assertion(net: Any, h: torch.Tensor) -> Any:
    assert h.shape[1] == 9, "width must be 9"
    return h


def unknown_name(net: Any, h: torch.Tensor) -> Any:
    return unknown(h)  # type: ignore[name-defined]  # noqa: F821


def shapes(net: Any, h: torch.Tensor) -> Any:
    return h @ torch.ones(3, 3)


def dtypes(net: Any, h: torch.Tensor) -> Any:
    return F.linear(h, net.b.weight.double())


def view(net: Any, h: torch.Tensor) -> Any:
    return h.view(7, 3)


def concatenation(net: Any, h: torch.Tensor) -> Any:
    return torch.cat([h, torch.ones(5, 5)])


def column(net: Any, h: torch.Tensor) -> Any:
    return h[:, 50]


FAULTS: tuple[Callable[[Any, torch.Tensor], Any], ...] = (
    missing_method, missing_key, list_index, wrong_operand, own_words, own_class, assertion, unknown_name, shapes, dtypes, view,
    concatenation, column,
)  # fmt: skip


class Net(nn.Module):
    """BatchNorm counts in the forward, before anything can fail."""

    def __init__(self, fault: Callable[[Any, torch.Tensor], Any] | None = None) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.words = nn.Embedding(10, 8)
        self.fault = fault

    def forward(self, batch: Batch) -> torch.Tensor:
        h = self.norm(self.a(batch["x"])) + self.words(batch["i"])
        if self.fault is not None:
            h = self.fault(self, h)
        return self.b(h)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch), batch["y"])


def good(rows: int = 6, **changes: torch.Tensor) -> Batch:
    return {"x": torch.randn(rows, 4), "i": torch.arange(rows), "y": torch.randint(0, 2, (rows,))} | changes


BAD: dict[str, Callable[[], Batch]] = {
    "too wide": lambda: good(x=torch.randn(6, 5)),
    "another rank": lambda: good(x=torch.randn(6, 3, 4)),
    "double": lambda: good(x=torch.randn(6, 4).double()),
    "whole numbers": lambda: good(x=torch.ones(6, 4, dtype=torch.long)),
    "target out of range": lambda: good(y=torch.full((6,), 7)),
    "index out of range": lambda: good(i=torch.full((6,), 70)),
    "fewer targets": lambda: good(y=torch.zeros(5, dtype=torch.long)),
    "targets of floats": lambda: good(y=torch.zeros(6)),
    "indices of floats": lambda: good(i=torch.zeros(6)),
}
"""Every one of them fails in eager, most after the BatchNorm has counted."""


def made(net: nn.Module, **options: Any) -> tuple[torch.optim.Optimizer, Step]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    options = {"backend": "interpret", "verbose": False} | options
    return optimizer, wholestep.compile(net, loss, optimizer, good(options.get("accumulate", 1) * 6), **options)


def everything(net: nn.Module, optimizer: torch.optim.Optimizer, step: Step) -> list[Any]:
    """Parameters, buffers, optimizer state, counters and generators, as values."""
    state = [
        {key: torch.as_tensor(value).tolist() for key, value in entry.items()} for entry in optimizer.state.values()
    ]
    tensors = {name: tensor.tolist() for name, tensor in net.state_dict().items()}
    return [tensors, state, step.count, [p.grad for p in net.parameters()], torch.get_rng_state().tolist()]


def assert_left_as_by_eager(net: nn.Module, twin: nn.Module, before: list[Any], after: list[Any]) -> None:
    """Nothing is trained; buffers are those of a twin whose own loss failed on the same batch."""
    assert after[1:] == before[1:]
    for (name, ours), eager in zip(net.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, eager, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[misc]


def told_by(call: Callable[..., Any], *arguments: Any) -> Exception:
    with pytest.raises(Exception) as caught:
        call(*arguments)
    return caught.value


def assert_told_as_in_eager(ours: Exception, eager: Exception) -> None:
    assert type(ours) is type(eager) and str(ours) == str(eager)
    lines = traceback.format_exception(ours)
    assert len(lines) < 40 and not any("During handling" in line or "direct cause" in line for line in lines)
    assert own_frames(ours) == own_frames(eager)


def assert_told_in_one_line(ours: Exception, eager: Exception) -> None:
    """Caught as in eager and with its words, the user's line and what differs from the example batch."""
    assert isinstance(ours, type(eager)) and isinstance(ours, BadBatch) and ours.__cause__ is None
    assert " ".join(str(eager).split()) in str(ours) and "and was" in str(ours)
    assert f"{Path(__file__).name}:{own_frames(eager)[-1][1]}" in str(ours) and "\n" not in str(ours)


def assert_fails_as_eager(
    net: nn.Module, optimizer: torch.optim.Optimizer, step: Step, batch: Batch, *, unlike: bool = False
) -> None:
    """`unlike`: whether the batch has other sizes or dtypes than the example."""
    twin, before = copy.deepcopy(net), everything(net, optimizer, step)
    ours, eager = told_by(step, batch), told_by(loss, twin, batch)
    assert_left_as_by_eager(net, twin, before, everything(net, optimizer, step))
    (assert_told_in_one_line if unlike else assert_told_as_in_eager)(ours, eager)


def own_frames(error: Exception) -> list[tuple[str, int | None]]:
    """The lines of this file below the loss."""
    found = [
        (frame.name, frame.lineno) for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__
    ]
    return found[[name for name, _ in found].index("loss") :]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_an_error_in_the_forward_is_told_as_in_eager(fault: Any, capfd: pytest.CaptureFixture[str]) -> None:
    net = Net(fault)
    optimizer, step = made(net)
    assert_fails_as_eager(net, optimizer, step, good())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_bad_batch_is_told_as_in_eager(bad: str, steps: int, capfd: pytest.CaptureFixture[str]) -> None:
    net = Net()
    optimizer, step = made(net)
    for _ in range(steps):
        step(good())
    assert_fails_as_eager(net, optimizer, step, BAD[bad](), unlike="out of range" not in bad)
    assert capfd.readouterr() == ("", "")
    step(good())
    assert step.rung == "whole step" and step.count == steps + 1, "the next good batch trains on"


class Branching(nn.Module):
    """What one graph cannot hold, behind a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, batch: Batch) -> torch.Tensor:
        h = self.norm(batch["x"])
        return h if h.sum() > 1e9 else h + 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::wholestep.WholestepWarning")
def test_a_bad_batch_on_the_rung_of_torch_compile(capfd: pytest.CaptureFixture[str]) -> None:
    net = Branching()
    optimizer, step = made(net, backend="inductor")
    for _ in range(3):
        step(good())
    assert step.rung == "torch.compile"  # the premise
    for bad in ("too wide", "target out of range", "fewer targets"):
        batch, twin = BAD[bad](), copy.deepcopy(net)
        before = everything(net, optimizer, step)
        ours = told_by(step, batch)
        eager = told_by(loss, twin, batch)
        assert_left_as_by_eager(net, twin, before[:4], everything(net, optimizer, step)[:4])
        assert isinstance(ours, type(eager)) and " ".join(str(eager).split()) in str(ours)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("check", ["first", pytest.param("off", marks=pytest.mark.slow)])
def test_compiled_code_tells_an_index_out_of_range_as_eager_does(check: str, capfd: pytest.CaptureFixture[str]) -> None:
    net = Net()
    optimizer, step = made(net, backend="inductor", check=check)
    step(good())
    for bad in ("index out of range", "target out of range"):
        assert_fails_as_eager(net, optimizer, step, BAD[bad]())
    assert capfd.readouterr() == ("", "")


def replaced(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.mean = 0.5 * net.mean + h.detach().mean(0)
    return h - net.mean


@pytest.mark.parametrize("fault", [None, replaced])
def test_a_second_micro_batch_that_fails_takes_the_first_one_back(fault: Any) -> None:
    net = Net()
    net.fault = fault
    net.register_buffer("mean", torch.zeros(8))
    optimizer, step = made(net, accumulate=2)
    for _ in range(2):
        step([good(), good()])
    halves = [good(), BAD["target out of range"]()]
    before = everything(net, optimizer, step)
    ours = told_by(step, halves)
    assert type(ours) is IndexError and everything(net, optimizer, step) == before


PROGRAM = """
import torch, wholestep
from torch import nn

def loss(model, batch):
    return model(batch).square().mean()

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = wholestep.compile(model, loss, optimizer, torch.ones(3, 4), backend="interpret", verbose=False)
step(torch.ones(3, 4))
step(torch.ones(3, 5))
"""


def test_what_a_program_prints_is_short_and_names_its_lines(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    found = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True)
    lines = found.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and len(lines) < 25, found.stderr
    assert lines[-1].startswith(
        "RuntimeError: 'batch' is float32[3, 5] and was float32[3, 4], compared with the example batch"
    )
    assert "mat1 and mat2 shapes cannot be multiplied (3x5 and 4x2) (at program.py:6)" in lines[-1]
    assert sum("program.py" in line for line in lines) == 2 and found.stdout == ""
