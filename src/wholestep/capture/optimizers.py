"""torch's optimizers as one functional node per parameter group.

`plan_updates` reads a torch optimizer and says, group by group, which operator updates it, which state it needs and which
flags are fixed. Every number (lr, betas, momentum, the step count) stays out of the graph: it enters as a float64 tensor that
`hyper_values` fills before each step, because schedulers move them (OneCycleLR moves betas too).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import os
import textwrap
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

ws = torch.ops.ws


@dataclasses.dataclass(frozen=True, slots=True)
class UpdatePlan:
    """How one parameter group (or the part of it that shares a step count) is updated."""

    group: int
    """Index in `optimizer.param_groups`."""
    part: int
    """Parameters of one group that took a different number of steps are updated apart: bias correction differs."""
    kind: str
    """`adamw` (Adam too) or `sgd`."""
    names: tuple[str, ...]
    """Parameters, in the group's order."""
    state_keys: tuple[str, ...]
    """Per-parameter tensors in `optimizer.state`, as torch names them."""
    flags: tuple[tuple[str, Any], ...]
    """What is fixed in the node: amsgrad, maximize, nesterov, decoupled, implementation."""

    @property
    def hyper_name(self) -> str:
        return f"group{self.group}" if self.part == 0 else f"group{self.group}.{self.part}"


def supported(optimizer: Optimizer) -> str | None:
    """None when the optimizer's update is captured; otherwise the reason why its own eager step is used."""
    if type(optimizer) not in (SGD, Adam, AdamW):
        return f"{type(optimizer).__name__} is not one of torch's SGD, Adam, AdamW"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:  # type: ignore[attr-defined]
        return "it has step hooks, which must run in Python"
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return "all optimizers have step hooks, which must run in Python"
    if not genuine_step(optimizer):
        return "its step or zero_grad was replaced by one that is not torch's"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "a group has differentiable=True"
        for key, value in group.items():
            # asking whether something is a tensor is slow in torch, and this is asked before every step
            if type(value) not in _PLAIN and isinstance(value, torch.Tensor) and value.device.type != "cpu":
                return f"{key} is a tensor on {value.device}; make it a number or a CPU tensor"
    return None


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `optimizer.step()` cannot be called without one: LBFGS, SAM and what is written like them."""
    if all(callable(getattr(optimizer, name, None)) for name in ("first_step", "second_step")):  # SAM's two halves
        return True
    step = inspect.unwrap(getattr(optimizer.step, "__func__", optimizer.step))
    try:
        parameter = inspect.signature(step).parameters.get("closure")
        if parameter is None or not inspect.isfunction(step):
            return False
        insists = _code_insists(step.__code__)
    except (TypeError, ValueError, OSError, SyntaxError):  # no source at hand
        return False
    return insists is not None and (parameter.default is parameter.empty or insists)


@functools.lru_cache(maxsize=64)  # reading a source file takes longer than all else that is asked before a capture
def _code_insists(code: types.CodeType) -> bool | None:
    """Whether a function calls its `closure` in any case; None where what is written there is no plain function."""
    written = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    return _insists(written.body) if isinstance(written, ast.FunctionDef) else None


def _insists(statements: Sequence[ast.stmt]) -> bool:
    """Whether these call `closure`, or raise for want of it, other than behind a question whether there is one."""
    for statement in statements:
        if isinstance(statement, ast.If | ast.Assert) and _mentions(statement.test):
            missing = isinstance(statement.test, ast.UnaryOp) or any(
                isinstance(n, ast.Is) for n in ast.walk(statement.test)
            )
            if isinstance(statement, ast.Assert):
                return not missing
            if missing:  # what comes after it is for those who gave one
                return any(isinstance(inner, ast.Raise) for inner in statement.body)
            continue
        inside = [inner for name in ("body", "orelse", "finalbody") for inner in getattr(statement, name, ())]
        if inside:
            if _insists(inside):
                return True
        elif any(isinstance(n, ast.BoolOp | ast.IfExp) and _mentions(n) for n in ast.walk(statement)):
            return False  # it asks in passing: `closure = closure or ...`
        elif any(
            isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "closure"
            for n in ast.walk(statement)
        ):
            return True
    return False


def _mentions(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Name) and inner.id == "closure" for inner in ast.walk(node))


def genuine_step(optimizer: Optimizer) -> bool:
    """Whether `optimizer.step` is torch's own; a scheduler's wrapper, which counts calls, is."""
    own = vars(optimizer).get("step")
    if own is not None and not getattr(own, "_wrapped_by_lr_sched", False):
        return False
    return _is_torchs(optimizer.step) and genuine_zero_grad(optimizer)


def genuine_zero_grad(optimizer: Optimizer) -> bool:
    return "zero_grad" not in vars(optimizer) and _is_torchs(optimizer.zero_grad)


def _is_torchs(function: Any) -> bool:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_TORCH_OPTIM)


_PLAIN = frozenset((int, float, bool, str, tuple, list, type(None)))
_TORCH_OPTIM = os.path.dirname(torch.optim.__file__)
_STRUCTURE = (
    "amsgrad",
    "maximize",
    "nesterov",
    "fused",
    "foreach",
    "decoupled_weight_decay",
    "capturable",
    "differentiable",
)


def structure(optimizer: Optimizer) -> list[Any]:
    """What a captured update has fixed: members and flags of the groups, and that the step is torch's own."""
    groups = [
        ([*map(id, g["params"])], [g.get(key) for key in _STRUCTURE], bool(g.get("momentum")))
        for g in optimizer.param_groups
    ]
    return [groups, supported(optimizer)]


def plan_updates(optimizer: Optimizer, names: Mapping[int, str]) -> list[UpdatePlan]:
    """One plan per group (and step count); `names` maps id(parameter) to its name and holds only the trained ones."""
    plans = []
    for index, group in enumerate(optimizer.param_groups):
        members = [p for p in group["params"] if id(p) in names]
        by_step: dict[float, list[torch.Tensor]] = {}
        for p in members:
            by_step.setdefault(steps_taken(optimizer, p), []).append(p)
        for part, step in enumerate(sorted(by_step, reverse=True)):
            params = by_step[step]
            describe = _describe_sgd if type(optimizer) is SGD else _describe_adam
            kind, state_keys, flags = describe(optimizer, group, params)
            chosen = tuple(names[id(p)] for p in params)
            plans.append(UpdatePlan(index, part, kind, chosen, state_keys, tuple(flags.items())))
    return plans


def _describe_adam(optimizer: Optimizer, group: dict, params: Sequence[torch.Tensor]) -> tuple[str, tuple, dict]:
    amsgrad = bool(group["amsgrad"])
    decoupled = bool(group.get("decoupled_weight_decay", type(optimizer) is AdamW))
    flags = dict(amsgrad=amsgrad, maximize=bool(group["maximize"]), decoupled=decoupled)
    keys = ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if amsgrad else ())
    return "adamw", keys, flags | {"implementation": _implementation(group, params)}


def _describe_sgd(optimizer: Optimizer, group: dict, params: Sequence[torch.Tensor]) -> tuple[str, tuple, dict]:
    flags = dict(nesterov=bool(group["nesterov"]), maximize=bool(group["maximize"]))
    keys = ("momentum_buffer",) if float(group["momentum"]) != 0.0 else ()
    return "sgd", keys, flags | {"implementation": _implementation(group, params)}


def _implementation(group: dict, params: Sequence[torch.Tensor]) -> str:
    """The one of torch's three implementations the optimizer itself would take, so that bits can agree."""
    if group.get("fused"):
        return "fused"
    if group.get("foreach") or (group.get("foreach") is None and all(p.is_cuda for p in params)):
        return "foreach"
    return "single"


def steps_taken(optimizer: Optimizer, parameter: torch.Tensor) -> float:
    """How many updates a parameter has had, as `optimizer.state` tells it."""
    state = optimizer.state.get(parameter)
    if not state:
        return 0.0
    if type(optimizer) is SGD:
        buffer = state.get("momentum_buffer")
        return 0.0 if buffer is None or hasattr(buffer, UNUSED) else 1.0
    return float(state.get("step", 0.0))


UNUSED = "_wholestep_unused"
"""Mark on a momentum buffer that was made before its first step, where torch would not have one yet."""


def mark_stepped(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Their momentum buffers now hold a gradient."""
    for p in parameters:
        buffer = optimizer.state.get(p, {}).get("momentum_buffer")
        if buffer is not None and hasattr(buffer, UNUSED):
            delattr(buffer, UNUSED)


def hyper_values(plan: UpdatePlan, group: dict, steps: float) -> list[float]:
    """The numbers of one group for the update after `steps` earlier ones, in the order the operators read them."""
    if plan.kind == "adamw":
        beta1, beta2 = group["betas"]
        return [steps + 1, *map(float, (group["lr"], beta1, beta2, group["eps"], group["weight_decay"]))]
    # torch's first momentum step takes the gradient undamped; with a zero buffer that is dampening 0
    dampening = float(group["dampening"]) if steps > 0 else 0.0
    return [float(group["lr"]), float(group["momentum"]), dampening, float(group["weight_decay"])]


def hyper_size(plan: UpdatePlan) -> int:
    return 6 if plan.kind == "adamw" else 4


def new_state(optimizer: Optimizer, plan: UpdatePlan, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state torch would create for a parameter at its first step."""
    group = optimizer.param_groups[plan.group]
    state = {k: torch.zeros_like(parameter, memory_format=torch.preserve_format) for k in plan.state_keys}
    if plan.kind == "adamw":
        on_device = bool(group.get("capturable") or group.get("fused"))
        device = parameter.device if on_device else torch.device("cpu")
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        state = {"step": torch.zeros((), dtype=dtype, device=device)} | state
    elif "momentum_buffer" in state:
        setattr(state["momentum_buffer"], UNUSED, True)
    return state


def call_update(
    plan: UpdatePlan,
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    states: Mapping[str, Sequence[torch.Tensor]],
    hyper: torch.Tensor,
    scale: torch.Tensor | None,
) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
    """The functional update: new parameters, and new state by key."""
    flags = dict(plan.flags)
    count = len(params)
    if plan.kind == "adamw":
        highest = list(states.get("max_exp_avg_sq", []))
        values = ws.adamw(
            list(params), list(grads), list(states["exp_avg"]), list(states["exp_avg_sq"]), highest, hyper, scale,
            flags["amsgrad"], flags["maximize"], flags["decoupled"], flags["implementation"],
        )  # fmt: skip
    else:
        buffers = list(states.get("momentum_buffer", []))
        values = ws.sgd(
            list(params), list(grads), buffers, hyper, scale,
            flags["nesterov"], flags["maximize"], flags["implementation"],
        )  # fmt: skip
    news = [list(values[i * count : (i + 1) * count]) for i in range(1 + len(plan.state_keys))]
    return news[0], dict(zip(plan.state_keys, news[1:], strict=True))
