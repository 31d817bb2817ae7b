"""Modes, flags and functions of torch and Python that are switched, entered or replaced between two steps."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import math
import sys
import types
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.trust.case import STEPS, Made, Net, adamw, at, cases_of, momentum, mse, pairs, sgd, train
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

case, more = cases_of("switches")


class HalvesTanh(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.tanh else out


class DoublesTanh(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2.0 if func is torch.ops.aten.tanh.default else out


def entered(make: Any, first: int, last: int = STEPS) -> dict[str, Any]:
    """Keywords for a training whose steps from `first` to `last` run inside of a context."""
    stack = contextlib.ExitStack()

    def change(i: int) -> None:
        if i == first:
            stack.enter_context(make())
        if i == last:
            stack.close()

    return {"change": change, "cleanup": stack.close}


@case
def function_mode_around_later_steps() -> Made:
    return train(**entered(HalvesTanh, 3))


@more
def function_mode_around_first_steps() -> Made:
    return train(**entered(HalvesTanh, 0, 3))


@more
def dispatch_mode_around_later_steps() -> Made:
    return train(**entered(DoublesTanh, 3))


@more
def default_device_around_the_step() -> Made:
    loss = lambda m, b: mse(m, b) * torch.ones(()).to(b[0].device)  # noqa: E731
    return train(loss, **entered(lambda: torch.device("cpu"), 3))


@case
def saved_tensors_rounded_around_the_step() -> Made:
    make = lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float())  # noqa: E731
    return train(**entered(make, 3))


@more
def inference_mode_around_the_step() -> Made:
    """A step trains whatever surrounds it; the plain loop would raise, so it leaves the mode too."""
    return train(**entered(lambda: torch.inference_mode(False), 3))


@more
def autocast_dtype_changes_around_the_step() -> Made:
    stack = contextlib.ExitStack()

    def change(i: int) -> None:
        stack.close()
        if i >= 2:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16 if i < 4 else torch.float16))

    return train(change=change, cleanup=stack.close)


@more
def autocast_inside_with_a_flag() -> Made:
    model = Net()
    model.amp = False

    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=m.amp):
            out = m(b[0])
        return F.mse_loss(out.float(), b[1])

    return train(loss, at(3, setattr, model, "amp", True), model=model)


@more
def default_dtype_of_arithmetic() -> Made:
    """Integers divided become the default dtype, at no place that the code names."""

    def loss(m: Any, b: Any) -> torch.Tensor:
        share = torch.arange(8) / 7
        m.seen = str(share.dtype)
        return (((m(b[0]) - b[1]) ** 2).mean(1) * share).mean()

    model = Net()
    model.seen = ""
    return train(loss, at(3, torch.set_default_dtype, torch.float64), model=model, state=lambda: model.seen)


@more
def number_of_threads_read() -> Made:
    threads = torch.get_num_threads()
    loss = lambda m, b: mse(m, b) * torch.get_num_threads()  # noqa: E731
    return train(loss, at(3, torch.set_num_threads, threads + 1))


@more
def matmul_precision_read() -> Made:
    loss = lambda m, b: mse(m, b) * (0.1 if torch.get_float32_matmul_precision() == "high" else 1.0)  # noqa: E731
    restore = lambda: torch.set_float32_matmul_precision("highest")  # noqa: E731
    return train(loss, at(3, torch.set_float32_matmul_precision, "high"), cleanup=restore)


@case
def flag_of_a_backend_read() -> Made:
    def switch(on: bool) -> None:
        torch.backends.mkldnn.enabled = on

    loss = lambda m, b: mse(m, b) * (1.0 if torch.backends.mkldnn.enabled else 0.1)  # noqa: E731
    return train(loss, at(3, switch, False), cleanup=lambda: switch(True))


@more
def deterministic_algorithms_switched() -> Made:
    """With it torch raises where no ordered kernel is, and fills empty tensors."""

    def loss(m: Any, b: Any) -> torch.Tensor:
        scale = 0.5 if torch.are_deterministic_algorithms_enabled() else 1.0
        return mse(m, b) * scale

    restore = lambda: torch.use_deterministic_algorithms(False)  # noqa: E731
    return train(loss, at(3, torch.use_deterministic_algorithms, True), cleanup=restore)


@more
def seed_read() -> Made:
    torch.manual_seed(3)
    loss = lambda m, b: mse(m, b) * (torch.initial_seed() % 5)  # noqa: E731
    return train(loss, at(3, torch.manual_seed, 4))


@more
def torch_seeded_in_the_loss() -> Made:
    """The same noise at every step."""

    def loss(m: Any, b: Any) -> torch.Tensor:
        torch.manual_seed(5)
        return F.mse_loss(m(b[0] + 0.3 * torch.randn(8, 6)), b[1])

    return train(loss)


@more
def generator_of_torch_in_the_forward() -> Made:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.source = torch.Generator().manual_seed(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.randn(x.shape, generator=self.source))

    return train(model=Model())


@more
def state_of_the_generator_kept_in_the_loss() -> Made:
    """Noise whose generator is set back: the same at every step."""
    state = torch.Generator().manual_seed(9).get_state()

    def loss(m: Any, b: Any) -> torch.Tensor:
        before = torch.get_rng_state()
        torch.set_rng_state(state)
        noise = torch.rand(8, 6)
        torch.set_rng_state(before)
        return F.mse_loss(m(b[0] * noise), b[1])

    return train(loss)


@more
def random_state_forked_in_the_loss() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            noise = torch.rand(8, 6)
        return F.mse_loss(m(b[0] * noise), b[1])

    return train(loss)


def patched(owner: Any, name: str, make: Any, step: int = 3) -> dict[str, Any]:
    """Keywords for a training before whose step `step` a function is replaced by what `make` makes of it."""
    plain = getattr(owner, name)
    return {"change": at(step, setattr, owner, name, make(plain)), "cleanup": lambda: setattr(owner, name, plain)}


@more
def function_of_math_patched() -> Made:
    loss = lambda m, b: mse(m, b) * math.sqrt(4.0)  # noqa: E731
    return train(loss, **patched(math, "sqrt", lambda plain: lambda x: plain(x) * 0.1))


@more
def builtin_function_patched() -> Made:
    loss = lambda m, b: mse(m, b) * max(0.5, 1.0)  # noqa: E731
    return train(loss, **patched(builtins, "max", lambda plain: lambda *a, **k: 0.1 * plain(*a, **k)))


@case
def builtin_name_shadowed_by_a_global() -> Made:
    table: dict[str, Any] = {"__builtins__": builtins}
    scale = types.FunctionType((lambda: max(0.5, 1.0)).__code__, table)
    return train(lambda m, b: mse(m, b) * scale(), at(3, table.__setitem__, "max", min))


@more
def functional_of_a_layer_module_patched() -> Made:
    """`nn.modules.linear` has names of its own."""
    linear = sys.modules["torch.nn.modules.linear"]
    stand_in = types.SimpleNamespace(linear=lambda x, w, b: F.linear(x, w, b) * 0.5)
    plain = linear.F
    return train(change=at(3, setattr, linear, "F", stand_in), cleanup=lambda: setattr(linear, "F", plain))


@case
def operator_of_the_tensor_class_patched() -> Made:
    loss = lambda m, b: ((m(b[0]) - b[1]) ** 2).mean()  # noqa: E731
    plain = torch.Tensor.__pow__
    restore = lambda: setattr(torch.Tensor, "__pow__", plain)  # noqa: E731
    return train(loss, at(3, setattr, torch.Tensor, "__pow__", lambda a, b: plain(a, b) * 0.1), cleanup=restore)


@more
def softmax_patched_behind_a_module() -> Made:
    model = nn.Sequential(nn.Linear(6, 6), nn.Softmax(dim=1), nn.Linear(6, 3))
    return train(model=model, **patched(F, "softmax", lambda plain: lambda *a, **k: plain(*a, **k) * 0.5))


@case
def update_function_of_torch_patched() -> Made:
    """`torch.optim.sgd.sgd` does the work of SGD.step."""
    make = lambda plain: lambda *a, **k: plain(*a, **(k | {"lr": 0.0}))  # noqa: E731
    return train(**patched(sys.modules["torch.optim.sgd"], "sgd", make))


@more
def update_function_of_adam_patched() -> Made:
    make = lambda plain: lambda *a, **k: plain(*a, **(k | {"lr": 0.0}))  # noqa: E731
    return train(optimizer=adamw, **patched(sys.modules["torch.optim.adam"], "adam", make))


@case
def group_making_of_the_optimizer_patched() -> Made:
    make = lambda plain: lambda self, group, *a: plain(self, {**group, "params": group["params"][:2]}, *a)  # noqa: E731
    return train(**patched(torch.optim.SGD, "_init_group", make))


@more
def zero_grad_of_all_optimizers_patched() -> Made:
    """Zeros in place of None: unused parameters go on with their momentum."""
    make = lambda plain: lambda self, set_to_none=True: plain(self, set_to_none=False)  # noqa: E731
    model = Net()
    model.use_a = True

    def loss(m: Any, b: Any) -> torch.Tensor:
        return mse(m, b) if m.use_a else F.mse_loss(m.b(torch.ones(8, 16)), b[1])

    found = patched(torch.optim.Optimizer, "zero_grad", make, step=0)

    def change(i: int) -> None:
        found["change"](i)
        model.use_a = i < 3

    return train(loss, change, model=model, optimizer=momentum, cleanup=found["cleanup"])


@more
def module_imported_in_the_loss() -> Made:
    name = "wholestep_trust_config"
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].weight = 1.0

    def loss(m: Any, b: Any) -> torch.Tensor:
        import wholestep_trust_config as config

        return mse(m, b) * config.weight

    change = lambda i: setattr(sys.modules[name], "weight", 1.0 if i < 3 else 0.1)  # noqa: E731
    return train(loss, change, cleanup=lambda: sys.modules.pop(name))


@case
def module_replaced_and_imported_in_the_loss() -> Made:
    name = "wholestep_trust_config"

    def put(weight: float) -> None:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].weight = weight

    def loss(m: Any, b: Any) -> torch.Tensor:
        from wholestep_trust_config import weight

        return mse(m, b) * weight

    put(1.0)
    return train(loss, at(3, put, 0.1), cleanup=lambda: sys.modules.pop(name, None))


@more
def module_found_by_name_in_the_loss() -> Made:
    name = "wholestep_trust_config"

    def put(weight: float) -> None:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].weight = weight

    put(1.0)
    loss = lambda m, b: mse(m, b) * importlib.import_module(name).weight  # noqa: E731
    return train(loss, at(3, put, 0.1), cleanup=lambda: sys.modules.pop(name, None))


WEIGHT = 1.0


@more
def global_read_by_the_table() -> Made:
    loss = lambda m, b: mse(m, b) * globals()["WEIGHT"]  # noqa: E731
    return train(loss, at(3, globals().__setitem__, "WEIGHT", 0.1), cleanup=lambda: globals().update(WEIGHT=1.0))


@more
def recursion_limit_read() -> Made:
    limit = sys.getrecursionlimit()
    loss = lambda m, b: mse(m, b) * (1.0 if sys.getrecursionlimit() == limit else 0.1)  # noqa: E731
    return train(loss, at(3, sys.setrecursionlimit, limit + 1), cleanup=lambda: sys.setrecursionlimit(limit))


@more
def modules_of_the_process_counted() -> Made:
    name = "wholestep_trust_extra"
    loss = lambda m, b: mse(m, b) * (0.1 if name in sys.modules else 1.0)  # noqa: E731
    change = at(3, sys.modules.__setitem__, name, types.ModuleType(name))
    return train(loss, change, cleanup=lambda: sys.modules.pop(name, None))


@more
def default_arguments_of_a_layer_class() -> Made:
    """nn.GELU reads its own attribute; F.gelu a default of its signature."""
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    return train(model=model, change=at(3, setattr, model[1], "approximate", "tanh"))


@more
def numpy_error_state_around() -> Made:
    loss = lambda m, b: mse(m, b) * (0.1 if np.geterr()["divide"] == "ignore" else 1.0)  # noqa: E731
    before = np.geterr()["divide"]
    return train(
        loss, lambda i: np.seterr(divide="ignore") if i == 3 else None, cleanup=lambda: np.seterr(divide=before)
    )


@more
def anomaly_mode_around_later_steps() -> Made:
    return train(**entered(torch.autograd.detect_anomaly, 3))


@more
def multithreading_of_the_backward_off() -> Made:
    return train(**entered(lambda: torch.autograd.set_multithreading_enabled(False), 3))


@more
def hook_of_all_modules_for_parameters() -> Made:
    """Called when a module is given a parameter; returns another one."""
    model = Net()

    def change(i: int) -> None:
        if i == 3:
            hook = lambda module, name, p: nn.Parameter(p.data * 0.5) if name == "bias" else None  # noqa: E731
            handle = nn.modules.module.register_module_parameter_registration_hook(hook)
            model.b.bias = nn.Parameter(torch.ones(3))
            handle.remove()

    return train(model=model, change=change, optimizer=sgd)


@more
def stance_of_the_compiler_set_later() -> Made:
    restore = lambda: torch.compiler.set_stance("default")  # noqa: E731
    return train(
        lambda m, b: mse(m, b), at(3, torch.compiler.set_stance, "force_eager"), cleanup=restore, batches=pairs()
    )
