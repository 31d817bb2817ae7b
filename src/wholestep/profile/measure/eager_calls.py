"""Eager PyTorch, operator by operator: a step in, one TimedCall per operator that reaches the dispatcher out.

The operator is timed by itself, its FLOPs and bytes counted with the formulas of `wholestep.cost`. The module of a forward
operator is the one whose forward is running; that of a backward operator is found by autograd's number, which forward operator
and backward node share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from wholestep.cost.devices import Device
from wholestep.cost.node_costs import NodeCost, number_format
from wholestep.cost.roofline import Fp32Units
from wholestep.graph.layers import layer_pattern
from wholestep.lower.footprint.cuda import wait
from wholestep.ops.call import Call
from wholestep.ops.flops import flops
from wholestep.ops.traffic import traffic
from wholestep.profile.measure import kernels
from wholestep.profile.measure.calls import TimedCall, with_kernels
from wholestep.profile.measure.work import work_of_cost


class _Seconds(TorchDispatchMode):
    """Times every operator of a step and does nothing else, so that the step stays as it is but for two readings of a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []
        """Nanoseconds, in order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.perf_counter_ns()
        result = func(*args, **kwargs) if kwargs else func(*args)
        self.taken.append(time.perf_counter_ns() - began)
        return result


class _Operators(TorchDispatchMode):
    """Notes what every operator of a step is, where it belongs and what it has to do; on a GPU with a mark around it."""

    def __init__(self, place: torch.device, device: Device, fp32: Fp32Units) -> None:
        super().__init__()
        self.on_gpu, self.device, self.fp32 = place.type == "cuda", device, fp32
        self.calls: list[TimedCall] = []
        self.modules: list[str] = []
        self.updating = False
        self.forward: dict[int, str] = {}
        """Autograd's number -> the module whose forward took it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        phase, module = self._place()
        with kernels.mark(len(self.calls)) if self.on_gpu else contextlib.nullcontext():
            result = func(*args, **kwargs)
        self.calls.append(self._call(func, args, kwargs, result, phase, module))
        return result

    def _place(self) -> tuple[str, str]:
        node = torch._C._current_autograd_node()
        if node is not None:
            return "backward", self.forward.get(node._sequence_nr(), "")
        if self.updating:
            return "update", ""
        module = self.modules[-1] if self.modules else ""
        self.forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, module)
        return "forward", module

    def _call(
        self, func: Any, args: Any, kwargs: Any, result: Any, phase: str, module: str
    ) -> TimedCall:  # fmt: skip
        name = func._schema.name
        short = name.rsplit("::", 1)[-1]
        arguments = {a.name: a.default_value if a.has_default_value() else None for a in func._schema.arguments}
        arguments |= dict(zip(arguments, args)) | kwargs
        functional = name[:-1] if name.endswith("_") and not name.endswith("__") else name
        read = Call(functional, func._overloadname, arguments, result, func._schema)
        work, kind = None, "other"
        with contextlib.suppress(
            KeyError, IndexError, TypeError, ValueError
        ):  # an operator no formula expects in this form
            found, moved = flops(read), traffic(read)
            kind = found.kind
            cost = NodeCost(
                short, name, kind, number_format(read), phase, module, found.count, found.model, moved.read, moved.written,
                found.found,
            )  # fmt: skip
            work = work_of_cost(cost, self.device, self.fp32)
        return TimedCall(short, kind, phase, module, work, f"{short}|{phase}|{layer_pattern(module)}")


@contextlib.contextmanager
def _places(root: nn.Module, optimizer: Optimizer | None, mode: _Operators) -> Iterator[None]:
    """Tells the mode which module runs, and when the update does."""
    paths = {module: path for path, module in root.named_modules()}

    def enter(module: nn.Module, *_: Any) -> None:
        if module in paths:
            mode.modules.append(paths[module])

    def leave(module: nn.Module, *_: Any) -> None:
        if module in paths and mode.modules:
            mode.modules.pop()

    hooks: list[Any] = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    if optimizer is not None:
        hooks.append(optimizer.register_step_pre_hook(lambda *_: setattr(mode, "updating", True)))
        hooks.append(optimizer.register_step_post_hook(lambda *_: setattr(mode, "updating", False)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def watch_eager(
    step: Callable[[Any], Any], root: nn.Module, optimizer: Optimizer | None, batches: Sequence[Any], place: torch.device,
    device: Device, fp32: Fp32Units,
) -> list[tuple[float, list[TimedCall]]]:  # fmt: skip
    """(seconds of the whole step, its calls) for each batch. On a CPU a first step tells what the operators are, and the others
    are timed: counting FLOPs between two operators would empty the caches for the second."""
    found = []
    known = [] if place.type == "cuda" else _named(step, root, optimizer, batches[0], place, device, fp32)[1]
    for batch in batches:
        if place.type == "cuda":
            found.append(_named(step, root, optimizer, batch, place, device, fp32))
            continue
        began = time.perf_counter()
        with _Seconds() as clock:
            step(batch)
        taken = time.perf_counter() - began
        if len(clock.taken) != len(known):  # the step did something else this time
            known = _named(step, root, optimizer, batch, place, device, fp32)[1]
        pairs = zip(known, clock.taken, strict=False)
        found.append((taken, [dataclasses.replace(call, seconds=ns / 1e9) for call, ns in pairs]))
    return found


def _named(
    step: Callable[[Any], Any], root: nn.Module, optimizer: Optimizer | None, batch: Any, place: torch.device, device: Device,
    fp32: Fp32Units,
) -> tuple[float, list[TimedCall]]:  # fmt: skip
    """(seconds, calls) of one step whose operators are looked at; times of kernels on a GPU, none on a CPU."""
    mode = _Operators(place, device, fp32)
    with contextlib.ExitStack() as stack:
        activities = stack.enter_context(kernels.recorded(place)) if place.type == "cuda" else []
        stack.enter_context(_places(root, optimizer, mode))
        stack.enter_context(mode)
        wait(place)
        began = time.perf_counter()
        step(batch)
        wait(place)
        taken = time.perf_counter() - began
    return taken, with_kernels(mode.calls, activities) if place.type == "cuda" else mode.calls
