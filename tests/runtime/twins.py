"""One training run twice: ours through `wholestep.compile`, theirs as a plain PyTorch loop. Tests compare the two.

A `make()` builds one side from the same seed each time; whatever a test does between steps it does to both sides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import wholestep
from wholestep import Step

LossFn = Callable[[Any, Any], Any]


@dataclasses.dataclass(slots=True)
class Side:
    """One of the two runs."""

    model: Any
    optimizer: torch.optim.Optimizer | None
    loss_fn: LossFn
    extra: Any = None
    """What the test moves between steps: a scheduler, a teacher, a list of options."""

    @property
    def trained(self) -> list[torch.Tensor]:
        assert self.optimizer is not None
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def small_mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def classify(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def class_batches(count: int = 6, size: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(7)
    return [
        (torch.randn(size, 4, generator=source), torch.randint(0, 3, (size,), generator=source)) for _ in range(count)
    ]


def mlp_side() -> Side:
    model = small_mlp()
    return Side(model, torch.optim.AdamW(model.parameters(), lr=1e-2), classify)


def interpreted(side: Side, batch: Any, **options: Any) -> Step:
    """Compile without the disk cache and without warnings about it, interpreted."""
    options = {"backend": "interpret", "cache": False, **options}
    return wholestep.compile(side.model, side.loss_fn, side.optimizer, batch, **options)


def eager_update(side: Side, batch: Any, clip_norm: float | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The loop body that people write; the loss and the gradient norm."""
    assert side.optimizer is not None
    side.optimizer.zero_grad(set_to_none=True)
    result = side.loss_fn(side.model, batch)
    loss = result[0] if isinstance(result, tuple) else result
    loss.backward()
    norm = None if clip_norm is None else torch.nn.utils.clip_grad_norm_(side.trained, clip_norm)
    side.optimizer.step()
    side.optimizer.zero_grad(set_to_none=True)
    return loss.detach(), norm


class Twins:
    """Both runs side by side."""

    def __init__(
        self, make: Callable[[], Side], example: Any, *, clip_norm: float | None = None, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.ours = make()
        torch.manual_seed(0)
        self.theirs = make()
        self.clip_norm = clip_norm
        self.step = interpreted(self.ours, example, clip_norm=clip_norm, **options)

    def both(self, action: Callable[[Side], Any]) -> None:
        action(self.ours)
        action(self.theirs)

    def losses(
        self, batches: Sequence[Any], after: Callable[[Side], Any] | None = None
    ) -> tuple[list[float], list[float]]:
        """Train on `batches`, `after` each step on both sides; our losses and theirs."""
        ours, theirs = [], []
        for batch in batches:
            result = self.step(batch)
            ours.append(float(result[0] if isinstance(result, tuple) else result))
            loss, norm = eager_update(self.theirs, batch, self.clip_norm)
            theirs.append(float(loss))
            if norm is not None:
                assert self.step.grad_norm is not None
                torch.testing.assert_close(self.step.grad_norm, norm, rtol=1e-6, atol=0.0)
            if after is not None:
                self.both(after)
        return ours, theirs

    def train(self, batches: Sequence[Any], after: Callable[[Side], Any] | None = None, tolerance: float = 0.0) -> None:
        """Train both and require equal losses, parameters, buffers and optimizer state."""
        ours, theirs = self.losses(batches, after)
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=tolerance, atol=tolerance)
        self.assert_same_state(tolerance)

    def assert_same_state(self, tolerance: float = 0.0) -> None:
        for ours, theirs in zip(modules_of(self.ours.model), modules_of(self.theirs.model), strict=True):
            assert_same_tree(ours.state_dict(), theirs.state_dict(), tolerance)
        if self.ours.optimizer is not None and self.theirs.optimizer is not None:
            assert_same_tree(self.ours.optimizer.state_dict(), self.theirs.optimizer.state_dict(), tolerance)


def modules_of(model: Any) -> list[nn.Module]:
    if isinstance(model, nn.Module):
        return [model]
    return list(model.values() if isinstance(model, dict) else model)


def assert_same_tree(ours: Any, theirs: Any, tolerance: float = 0.0) -> None:
    """Equal structure, keys in order, dtypes, devices; values within `tolerance` (0: every bit)."""
    assert type(ours) is type(theirs), f"{type(ours)} against {type(theirs)}"
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_same_tree(ours[key], theirs[key], tolerance)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert_same_tree(a, b, tolerance)
    else:
        assert ours == theirs
