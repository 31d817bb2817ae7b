"""Things that no single graph can hold, or that need care: told with a reason, or trained as in eager."""

from __future__ import annotations

import copy
import gc
import inspect
import threading
import types
from typing import Any

import numpy as np
import scipy.optimize
import torch
import torch.nn.functional as F
from tests.trust.case import Made, Net, at, cases_of, mse, sgd, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

case, more = cases_of("refusals")


@case
def data_parallel() -> Made:
    return train(model=nn.DataParallel(Net(), device_ids=[]))


@case
def backward_inside_the_loss() -> Made:
    """Gradients of a second loss are left in p.grad, and the step's own are added to them."""

    def loss(m: Any, b: Any) -> torch.Tensor:
        (0.1 * m(b[0]).square().mean()).backward()
        return mse(m, b)

    return train(loss)


@case
def update_inside_the_loss() -> Made:
    critic = nn.Linear(3, 1)
    inner = sgd(critic.parameters())

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = m(b[0])
        inner.zero_grad()
        critic(out.detach()).square().mean().backward()
        inner.step()
        return F.mse_loss(out, b[1]) + 0.1 * critic(out).square().mean()

    return train(loss, state=lambda: list(critic.parameters()))


@case
def gradient_read_inside_the_loss() -> Made:
    return train(lambda m, b: mse(m, b) * (1.0 if m.a.weight.grad is None else 0.1))


@case
def compiled_part_of_a_model() -> Made:
    model, options = Net(), {"factor": 1.0}
    scaled = torch.compile(lambda x: x * options["factor"], backend="eager")
    return train(lambda m, b: scaled(mse(m, b)), at(3, options.update, factor=0.1), model=model)


@case
def part_that_disables_compilers() -> Made:
    factor = [1.0]

    @torch.compiler.disable
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * factor[0]

    return train(lambda m, b: scaled(mse(m, b)), at(3, factor.__setitem__, 0, 0.1))


@case
def assignment_by_scipy() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        out = m(b[0])
        cost = torch.cdist(out, b[1]).detach().numpy()
        rows, columns = scipy.optimize.linear_sum_assignment(cost)
        return F.mse_loss(out[torch.as_tensor(rows)], b[1][torch.as_tensor(columns)])

    return train(loss)


@more
def numpy_in_the_middle() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        order = np.argsort(b[1].numpy().sum(1)).copy()
        return F.mse_loss(m(b[0])[torch.from_numpy(order)], b[1])

    return train(loss)


@more
def evaluated_text() -> Made:
    rule = {"text": "x * 1.0"}
    return train(lambda m, b: eval(rule["text"], {"x": mse(m, b)}), at(3, rule.update, text="x * 0.1"))


@case
def thread_inside_the_loss() -> Made:
    done: list[int] = []

    def loss(m: Any, b: Any) -> torch.Tensor:
        worker = threading.Thread(target=lambda: done.append(1))
        worker.start()
        worker.join()
        return mse(m, b)

    return train(loss, state=lambda: len(done))


@more
def frame_inspected() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        factor = 0.5  # noqa: F841
        return mse(m, b) * inspect.currentframe().f_locals["factor"]

    return train(loss)


@more
def collector_called() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        gc.collect(0)
        return mse(m, b)

    return train(loss)


@more
def model_copied_inside_the_loss() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        frozen = copy.deepcopy(m).requires_grad_(False)
        return mse(m, b) + F.mse_loss(m(b[0].flip(0)), frozen(b[0]))

    return train(loss)


@case
def dispatch_mode_in_the_loss() -> Made:
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return function(*args, **(kwargs or {}))

    mode = Count()

    def loss(m: Any, b: Any) -> torch.Tensor:
        with mode:
            return mse(m, b)

    return train(loss, state=lambda: mode.calls)


@more
def anomaly_detection() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.autograd.set_detect_anomaly(True):
            return mse(m, b)

    return train(loss)


@more
def profiler_ranges() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.profiler.record_function("forward"):
            return mse(m, b)

    return train(loss)


@case
def traced_module() -> Made:
    model = torch.jit.trace(Net(), torch.zeros(8, 6))
    return train(model=model)


@case
def parameter_outside_the_modules() -> Made:
    """A leaf tensor in the closure, trained by the same optimizer; `compile` is not given the module that holds it."""
    model = Net()
    extra = torch.zeros(3, requires_grad=True)
    optimizer = sgd([*model.parameters(), extra])
    loss = lambda m, b: F.mse_loss(m(b[0]) + extra, b[1])  # noqa: E731
    return train(loss, model=model, optimizer=optimizer, state=lambda: extra)


@case
def leaf_in_the_closure_nobody_trains() -> Made:
    """It requires a gradient, and no optimizer has it."""
    probe = torch.zeros(3, requires_grad=True)
    return train(lambda m, b: F.mse_loss(m(b[0]) + probe, b[1]), state=lambda: probe)


@more
def module_in_the_closure_nobody_trains() -> Made:
    """A module in a namespace inside the closure, not among the modules given, is read and not trained."""
    held = types.SimpleNamespace(norm=nn.BatchNorm1d(3, affine=False))
    loss = lambda m, b: F.mse_loss(held.norm(m(b[0])), b[1])  # noqa: E731
    return train(loss, state=lambda: list(held.norm.buffers()))
