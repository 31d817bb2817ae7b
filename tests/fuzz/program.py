"""A random program: a training step as a few lines of Python that can be built, shortened and printed as a test.

A program is text. Its lines are drawn one after the other while their values are at hand (`draw.py`), a failing one is
shortened by leaving lines out (`shrink.py`), and what is left is printed as it stands.
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import sys
import textwrap
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

UPDATES = 3
"""How long every stage trains."""
SEED = 5
"""Of dropout's keys."""
HEADER = """\
from tests.fuzz.blocks import *
import torch
import torch.nn.functional as F
from torch import nn
"""
_DRAWN = "tests.fuzz.drawn"
_serial = itertools.count()


@dataclasses.dataclass(frozen=True)
class Line:
    """`results = code`, where {0}, {1}, ... in the code stand for what it reads."""

    results: tuple[str, ...]
    code: str
    reads: tuple[str, ...] = ()

    def text(self) -> str:
        done = self.code.format(*self.reads)
        return f"{', '.join(self.results)} = {done}" if self.results else done

    def reading(self, old: str, new: str) -> Line:
        return dataclasses.replace(self, reads=tuple(new if name == old else name for name in self.reads))


@dataclasses.dataclass(frozen=True)
class Program:
    """A module, what it is called with, and how it is trained."""

    inputs: tuple[tuple[str, str], ...]
    """Name and code of every tensor of a batch."""
    members: tuple[tuple[str, str], ...]
    """Name and code of every parameter, buffer and module."""
    lines: tuple[Line, ...]
    """The forward; one of them makes `loss`."""
    aux: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    """Of the training: see `Case`."""

    def source(self) -> str:
        """`Net` and `batch`, as Python."""
        returned = "loss"
        if self.aux:
            returned = f"loss, {{{', '.join(f'{name!r}: {name}' for name in self.aux)}}}"
        members = [f"self.{name} = {code}" for name, code in self.members]
        forward = [line.text() for line in self.lines] + [f"return {returned}"]
        names = "".join(f", {name}" for name, _ in self.inputs)
        made = "".join(f"{code}, " for _, code in self.inputs)
        return "\n".join(
            ["class Net(nn.Module):", "    def __init__(self):", "        super().__init__()"]
            + [textwrap.indent(text, " " * 8) for text in members]
            + ["", f"    def forward(self{names}):"]
            + [textwrap.indent(text, " " * 8) for text in forward]
            + ["", "", "def batch():", f"    return ({made})", ""]
        )

    def case(self) -> Case:
        number = next(_serial)
        _forget(number - 2)
        module = types.ModuleType(f"{_DRAWN}{number}")
        sys.modules[module.__name__] = module  # Dynamo looks globals up there
        source = HEADER + "\n\n" + self.source()
        linecache.cache[module.__name__] = (len(source), None, source.splitlines(keepends=True), module.__name__)
        exec(compile(source, module.__name__, "exec"), module.__dict__)
        return Case(module.Net, module.batch, **dict(self.options))

    def tidy(self) -> Program:
        """Without what no line reads."""
        text = "\n".join(line.text() for line in self.lines)
        members: list[tuple[str, str]] = []
        for name, code in reversed(self.members):  # a later member may mention an earlier one, as a tied weight does
            if f"self.{name}" in text or any(f"self.{name}" in later for _, later in members):
                members.insert(0, (name, code))
        read = {name for line in self.lines for name in line.reads} | set(self.aux)
        return dataclasses.replace(
            self, members=tuple(members), inputs=tuple(entry for entry in self.inputs if entry[0] in read)
        )

    def as_test(self, stage: str, name: str) -> str:
        """A file that pytest runs."""
        options = "".join(f", {key}={value!r}" for key, value in self.options)
        head = '"""Found by the fuzzer."""\n\n' + HEADER
        test = f"def test_{name}() -> None:\n    assert_right(Case(Net, batch{options}), stage={stage!r})\n"
        imports = "from tests.fuzz.check import assert_right\nfrom tests.fuzz.program import Case\n"
        return f"{head}{imports}\n\n{self.source()}\n\n{test}"


@dataclasses.dataclass(frozen=True)
class Case:
    """What is checked: a net, its batches, and how it is trained."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple]
    optimizer: str = "SGD"
    flags: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"lr": 0.1})
    """Of the optimizer."""
    step: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of `wholestep.compile`: precision, clip_norm, chunked_loss, nonfinite, accumulate."""
    guards: bool = True
    """Captured through Dynamo, or traced as plain Python."""
    plan_seed: int = 0
    """What is recomputed, where a plan is carried out, is drawn from it."""
    groups: bool = False
    """Whether what is no matrix is a group of its own, with another learning rate and without decay."""
    frozen: int = 0
    """Every so manyth parameter is not trained; 0: none."""

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The same net each time."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(1)
            model = self.make()
        for number, parameter in enumerate(model.parameters(), 1):
            if (self.frozen and number % self.frozen == 0) or (self.optimizer == "Muon" and parameter.dim() != 2):
                parameter.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        given: list[Any] = trained
        others = [p for p in trained if p.dim() != 2]
        if self.groups and 0 < len(others) < len(trained):
            matrices = {"params": [p for p in trained if p.dim() == 2]}
            given = [matrices, {"params": others, "lr": self.flags["lr"] * 2, "weight_decay": 0.0}]
        return model, getattr(torch.optim, self.optimizer)(given, **self.flags)

    def autocast(self) -> torch.autocast:
        """As it is trained."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.step.get("precision") == "bf16")

    def batches(self, count: int = 3) -> list[tuple]:
        made = []
        with torch.random.fork_rng(devices=[]):
            for number in range(count):
                torch.default_generator.manual_seed(100 + number)
                made.append(self.batch())
        return made


def forget_all() -> None:
    """No case is in use any more."""
    last = next(_serial)
    for number in (last - 2, last - 1):
        _forget(number)


def _forget(number: int) -> None:
    sys.modules.pop(f"{_DRAWN}{number}", None)
    linecache.cache.pop(f"{_DRAWN}{number}", None)


def loss_fn(model: Any, batch: Any) -> Any:
    return model(*batch)
