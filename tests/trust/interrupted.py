"""Exceptions and Ctrl-C in a step, after which the loop goes on; steps in threads."""

from __future__ import annotations

import math
import signal
from typing import Any

import torch
import torch.nn.functional as F
from tests.trust.case import Made, Net, adamw, cases_of, momentum, mse, pairs, tokens, train
from torch import nn

case, more = cases_of("interrupted")


class Calls:
    """Counts, and raises at the fourth call."""

    def __init__(self, error: BaseException) -> None:
        self.count, self.error = 0, error

    def __call__(self) -> None:
        self.count += 1
        if self.count == 4:
            raise self.error


@case
def error_at_a_step() -> Made:
    calls = Calls(ValueError("a bad step"))

    def loss(m: Any, b: Any) -> torch.Tensor:
        calls()
        return mse(m, b)

    return train(loss, raises={3: ValueError}, state=lambda: calls.count, optimizer=momentum)


@more
def error_after_the_forward() -> Made:
    """What the code wrote before it raised stays written."""
    calls, seen = Calls(RuntimeError("too late")), []

    def loss(m: Any, b: Any) -> torch.Tensor:
        found = mse(m, b)
        seen.append(found.detach())
        calls()
        return found

    return train(loss, raises={3: RuntimeError}, state=lambda: seen)


@case
def error_at_the_first_step_of_a_graph() -> Made:
    """A count that is seen to vary has the second step captured anew, and it is that step which fails."""
    model, count = Net(), {"steps": 0}

    def loss(m: Any, b: Any) -> torch.Tensor:
        count["steps"] += 1
        found = mse(m, b)
        if not torch.isfinite(found):
            raise FloatingPointError(f"not finite at step {count['steps']}")
        return found

    batches = [(x * math.nan if i == 1 else x, y) for i, (x, y) in enumerate(pairs())]
    return train(loss, model=model, batches=batches, raises={1: FloatingPointError}, state=lambda: dict(count))


@case
def error_of_ones_own() -> Made:
    class Skip(Exception):
        def __init__(self, reason: str) -> None:
            super().__init__(reason)
            self.reason = reason

    model = Net()
    model.skip = False

    def loss(m: Any, b: Any) -> torch.Tensor:
        if m.skip:
            raise Skip("asked for")
        return mse(m, b)

    return train(loss, lambda i: setattr(model, "skip", i in (2, 4)), model=model, raises={2: Skip, 4: Skip})


@case
def error_in_a_layer() -> Made:
    calls = Calls(ArithmeticError("overflow"))

    class Fragile(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls()
            return super().forward(x)

    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), Fragile(8, 3))
    return train(model=model, raises={3: ArithmeticError}, state=lambda: calls.count)


@case
def error_by_the_shape_of_a_batch() -> Made:
    batches = pairs()
    batches[3] = (batches[3][0][:, :5], batches[3][1])
    return train(batches=batches, raises={3: RuntimeError}, optimizer=adamw)


@case
def error_by_a_token_out_of_range() -> Made:
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
    batches = tokens()
    batches[3] = batches[3] + 11
    loss = lambda m, b: F.cross_entropy(m(b).flatten(0, 1), b.flatten() % 11)  # noqa: E731
    return train(loss, model=model, batches=batches, raises={3: IndexError})


@case
def iterator_exhausted() -> Made:
    weights = iter([1.0, 0.5, 0.25, 0.1])
    return train(lambda m, b: mse(m, b) * next(weights), raises={4: StopIteration, 5: StopIteration})


@more
def error_caught_inside_the_loss() -> Made:
    calls = Calls(ValueError("recovered"))

    def loss(m: Any, b: Any) -> torch.Tensor:
        try:
            calls()
        except ValueError:
            return (m(b[0]) - b[1]).abs().mean()
        return mse(m, b)

    return train(loss, state=lambda: calls.count)


@case
def error_in_the_backward() -> Made:
    calls = Calls(ValueError("in the backward"))

    class Fragile(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            calls()
            return gradient

    return train(lambda m, b: Fragile.apply(mse(m, b)), raises={3: ValueError}, state=lambda: calls.count)


@case
def error_in_a_gradient_hook() -> Made:
    model, calls = Net(), Calls(FloatingPointError("a gradient"))

    def hook(gradient: torch.Tensor) -> None:
        calls()

    model.b.weight.register_hook(hook)
    return train(model=model, raises={3: FloatingPointError}, state=lambda: calls.count, optimizer=momentum)


@case
def interrupted_in_the_loss() -> Made:
    calls = Calls(KeyboardInterrupt())

    def loss(m: Any, b: Any) -> torch.Tensor:
        calls()
        return mse(m, b)

    return train(loss, raises={3: KeyboardInterrupt}, state=lambda: calls.count, optimizer=adamw)


@case
def interrupted_by_a_signal() -> Made:
    calls = [0]

    def handler(*_: Any) -> None:
        raise KeyboardInterrupt

    def loss(m: Any, b: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 4:
            signal.raise_signal(signal.SIGUSR1)
        return mse(m, b)

    before = signal.signal(signal.SIGUSR1, handler)
    cleanup = lambda: signal.signal(signal.SIGUSR1, before)  # noqa: E731
    return train(loss, raises={3: KeyboardInterrupt}, state=lambda: calls[0], cleanup=cleanup)


@case
def interrupted_while_the_batch_is_read() -> Made:
    class Batch(dict):
        fails = False

        def __getitem__(self, key: str) -> Any:
            if self.fails:
                raise KeyboardInterrupt
            return super().__getitem__(key)

    batches = [Batch(x=x, y=y) for x, y in pairs()]
    batches[3].fails = True
    return train(lambda m, b: F.mse_loss(m(b["x"]), b["y"]), batches=batches, raises={3: KeyboardInterrupt})


@case
def interrupted_in_the_backward() -> Made:
    model, calls = Net(), Calls(KeyboardInterrupt())
    hook = lambda module, grad_in, grad_out: calls()  # noqa: E731
    model.b.register_full_backward_hook(hook)
    return train(model=model, raises={3: KeyboardInterrupt}, state=lambda: calls.count, optimizer=momentum)


@case
def two_threads() -> Made:
    counts = {"one": 0, "two": 0}

    def one(m: Any, b: Any) -> torch.Tensor:
        counts["one"] += 1
        return mse(m, b) / counts["one"]

    def two(m: Any, b: Any) -> torch.Tensor:
        counts["two"] += 1
        return (m(b[0]) - b[1]).abs().mean() * (1.0 if counts["two"] < 4 else 0.1)

    other = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    partner = train(two, model=other, optimizer=momentum)
    return train(one, partner=partner, together=True, state=lambda: dict(counts))


@case
def two_threads_with_one_loss() -> Made:
    return train(partner=train(mse, model=nn.Linear(6, 3), optimizer=momentum), together=True)


@case
def step_in_another_thread() -> Made:
    """Compiled here, called there."""
    model = Net()
    model.factor = 1.0
    loss = lambda m, b: mse(m, b) * m.factor  # noqa: E731
    return train(loss, lambda i: setattr(model, "factor", 1.0 if i < 3 else 0.1), model=model, together=True)
