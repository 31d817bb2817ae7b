"""What a case of the battery is: a small training, built fresh by a function, and what changes before which step.

A file of cases takes two decorators for its class (`case, more = cases_of("hooks")`) and registers plain functions with
them; those of `more` are relatives of others and run with the slow tests only. Each function returns what is trained
(`train(...)` fills in the usual model, loss, optimizer and batches).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 6

Build = Callable[..., "Made"]
Register = Callable[[Build], Build]


def nothing(*_: Any) -> None:
    """What most cases do before a step, after it, and to clean up."""


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """One training, ready to run; the same one at each build."""

    model: Any
    """A module, or a dict or tuple of modules."""
    loss_fn: Callable[[Any, Any], Any] | None
    """None: model(**batch)["loss"]."""
    optimizer: torch.optim.Optimizer | None
    batches: list[Any]
    """One for each step; with options["accumulate"], lists of micro-batches."""
    change: Callable[[int], Any] = nothing
    """Called before step i."""
    after: Callable[[int], Any] = nothing
    """Called after step i, unless it raised: schedulers, teachers, an update of one's own."""
    state: Callable[[], Any] = nothing
    """What the user's code has written so far: numbers, strings, tensors in plain containers."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """For `wholestep.compile`; the plain loop honours `accumulate` and `clip_norm`."""
    partner: Made | None = None
    """A second step, trained in turns with this one on the same batches (its `batches`, `change`, ... are not used)."""
    together: bool = False
    """The two steps run at the same time, each in a thread of its own."""
    raises: dict[int, type[BaseException]] | None = dataclasses.field(default_factory=dict)
    """What the plain loop raises, at which steps; the loop catches it and goes on. None: whatever it raises."""
    cleanup: Callable[[], Any] = nothing
    """Puts back what a case changed for the whole process."""

    @property
    def modules(self) -> list[nn.Module]:
        return modules_of(self.model)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One row of the battery."""

    name: str
    kind: str
    build: Build
    slow: bool
    """Whether it runs with the slow tests only."""

    @property
    def has_forerunner(self) -> bool:
        """Whether `build(True)` makes another training, run first: its program must not be taken from the cache."""
        return bool(inspect.signature(self.build).parameters)


CASES: dict[str, Case] = {}


def cases_of(kind: str) -> tuple[Register, Register]:
    """The decorators that register cases of one class: those that always run, and more of them."""

    def register(build: Build, slow: bool = False) -> Build:
        assert build.__name__ not in CASES, f"two cases are named {build.__name__}"
        CASES[build.__name__] = Case(build.__name__, kind, build, slow)
        return build

    return register, functools.partial(register, slow=True)


class Net(nn.Module):
    """Two layers, no randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def mse(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def cross_entropy(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def pairs(size: int = 8, count: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches for a regression."""
    source = torch.Generator().manual_seed(11)
    return [(torch.randn(size, 6, generator=source), torch.randn(size, 3, generator=source)) for _ in range(count)]


def labelled(size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches for a classification."""
    source = torch.Generator().manual_seed(12)
    make = lambda: torch.randint(0, 3, (size,), generator=source)  # noqa: E731
    return [(torch.randn(size, 6, generator=source), make()) for _ in range(STEPS)]


def tokens(length: int = 7, vocabulary: int = 11) -> list[torch.Tensor]:
    """Batches of four token sequences."""
    source = torch.Generator().manual_seed(13)
    return [torch.randint(0, vocabulary, (4, length), generator=source) for _ in range(STEPS)]


def modules_of(model: Any) -> list[nn.Module]:
    if isinstance(model, nn.Module):
        return [model]
    return list(model.values() if isinstance(model, dict) else model)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def at(step: int, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[int], Any]:
    """A `change` that acts once, before `step`."""
    return lambda i: action(*args, **kwargs) if i == step else None


def train(
    loss_fn: Callable[[Any, Any], Any] | None = mse,
    change: Callable[[int], Any] = nothing,
    *,
    model: Any = None,
    optimizer: Any = sgd,
    batches: list[Any] | None = None,
    **more: Any,
) -> Made:
    """A training; `optimizer` is one, or None, or makes one from the model's parameters."""
    model = Net() if model is None else model
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer([p for m in modules_of(model) for p in m.parameters()])
    return Made(model, loss_fn, optimizer, pairs() if batches is None else batches, change, **more)


def weighted_by(weight: Callable[[int], Any]) -> Made:
    """The loss times `model.weight`, which is weight(i) at step i."""
    model = Net()
    model.weight = weight(0)
    return train(lambda m, b: mse(m, b) * m.weight, lambda i: setattr(model, "weight", weight(i)), model=model)
