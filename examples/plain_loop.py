"""The usual PyTorch loop, and the same loop with Wholestep: five lines become one call.

Both functions below train the same model on the same batches. The program prints their difference as a diff, runs both,
and compares the loss they end at: equal bit for bit on backend `interpret`, up to rounding on compiled code.

    python examples/plain_loop.py --steps 60
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

import wholestep

Batch = dict[str, torch.Tensor]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def batches(steps: int) -> Iterator[Batch]:
    """Inputs, and targets that a fixed function makes of them."""
    source = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(64, 16, generator=source)
        yield {"x": x, "y": x[:, :1] * x[:, 1:2] + x[:, 2:3].sin()}


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def train_eager(model: nn.Module, steps: int, backend: str) -> list[float]:
    """Plain PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for batch in batches(steps):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def train_wholestep(model: nn.Module, steps: int, backend: str) -> list[float]:
    """The same with Wholestep."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    step = wholestep.compile(model, loss_fn, optimizer, next(batches(1)), clip_norm=1.0, backend=backend)
    for batch in batches(steps):
        loss = step(batch)
        scheduler.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def print_difference(one: Callable, other: Callable) -> None:
    """The lines in which the bodies of two functions differ."""
    before, after = (inspect.getsource(function).splitlines()[2:] for function in (one, other))
    for line in difflib.unified_diff(before, after, lineterm="", n=1):
        if not line.startswith(("---", "+++", "@@")):
            print("   ", line)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--backend", choices=["inductor", "interpret"], default="interpret")
    given = parser.parse_args()
    print("the loop, before (-) and after (+):")
    print_difference(train_eager, train_wholestep)
    results = []
    for train in (train_eager, train_wholestep):
        began = time.perf_counter()
        results.append(train(make_model(), given.steps, given.backend))
        first, last = results[-1][0], results[-1][-1]
        print(f"{train.__name__:<16} loss {first:.6f} -> {last:.6f} in {time.perf_counter() - began:.1f} s")
    gap = max(abs(a - b) for a, b in zip(*results))
    same = "bit for bit" if gap == 0 else f"up to {gap:.1e}"
    print(f"the two loops have the same losses {same}, over {given.steps} steps")
    return 0 if gap < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
