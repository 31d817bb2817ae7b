"""Optimizers as one functional node per parameter group.

`plan_updates` reads an optimizer and says, group by group, which operator updates it, which state it needs and which flags are
fixed; what differs between optimizers is in their records (`wholestep.ops.updates`). Every number (lr, betas, momentum, the step
count) stays out of the graph: it enters as a float64 tensor that `hyper_values` fills before each step, because schedulers move
them (OneCycleLR moves betas too).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import os
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from wholestep.errors import UnsupportedOptimizer
from wholestep.ops.updates import BY_CLASS, UPDATES, Update, update_of
from wholestep.ops.wide import wide_dtype


@dataclasses.dataclass(frozen=True, slots=True)
class UpdatePlan:
    """How one parameter group (or the part of it that shares a step count) is updated."""

    group: int
    """Index in `optimizer.param_groups`."""
    part: int
    """Parameters of one group that took a different number of steps are updated apart: bias correction differs."""
    kind: str
    """Of its record in `UPDATES`: `adamw` (Adam too), `sgd`, ..."""
    names: tuple[str, ...]
    """Parameters, in the group's order."""
    state_keys: tuple[str, ...]
    """Per-parameter tensors in `optimizer.state`, as torch names them."""
    flags: tuple[tuple[str, Any], ...]
    """What is fixed in the node, in the operator's order: amsgrad, maximize, decoupled, implementation."""

    @property
    def update(self) -> Update:
        return UPDATES[self.kind]

    @property
    def hyper_name(self) -> str:
        return f"group{self.group}" if self.part == 0 else f"group{self.group}.{self.part}"


def supported(optimizer: Optimizer) -> str | None:
    """None when the optimizer's update is captured; otherwise the reason why its own eager step is used."""
    update = update_of(optimizer)
    if update is None:
        return f"{type(optimizer).__name__} is not one of {', '.join(cls.__name__ for cls in BY_CLASS)}"
    if _foreign_pre_hooks(optimizer) or optimizer._optimizer_step_post_hooks:  # type: ignore[attr-defined]
        return "it has step hooks, which must run in Python"
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return "all optimizers have step hooks, which must run in Python"
    if not genuine_step(optimizer):
        return "its step or zero_grad was replaced by one that is not its own"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "a group has differentiable=True"
        for key, value in group.items():
            # asking whether something is a tensor is slow in torch, and this is asked before every step
            if type(value) not in _PLAIN and isinstance(value, torch.Tensor) and value.device.type != "cpu":
                return f"{key} is a tensor on {value.device}; make it a number or a CPU tensor"
        refusal = update.refuses(group)
        if refusal is not None:
            return refusal
    return None


OWN_HOOKS = "_wholestep_hooks"
"""On the optimizer of a Step: handles of what looks at `step()` by hand, and makes `state_dict()` wait for state on the host."""


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer within that of Hugging Face's accelerate, which passes everything on to it; refused where it does more."""
    if not any(cls.__module__ == "accelerate.optimizer" for cls in type(optimizer).__mro__):
        return optimizer
    wrapper: Any = optimizer
    if wrapper.scaler is not None:
        raise UnsupportedOptimizer(
            "accelerate's optimizer unscales gradients (mixed_precision='fp16')",
            hint="use Accelerator(mixed_precision='no') and wholestep.compile(precision='fp16')",
        )
    if wrapper.gradient_state.num_steps > 1:
        raise UnsupportedOptimizer(
            f"accelerate's optimizer steps once in {wrapper.gradient_state.num_steps} batches (gradient_accumulation_steps)",
            hint=f"leave that out and use wholestep.compile(accumulate={wrapper.gradient_state.num_steps})",
        )
    within: Optimizer = wrapper.optimizer
    return within


def _foreign_pre_hooks(optimizer: Optimizer) -> bool:
    """Step hooks of somebody else: what we have put there ourselves is about steps by hand."""
    found: Mapping[int, Any] = optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]
    return bool(found) and bool(found.keys() - {handle.id for handle in getattr(optimizer, OWN_HOOKS, ())})


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
    """Whether `optimizer.step` is torch's own, or its class's; a scheduler's wrapper, which counts calls, is."""
    own = vars(optimizer).get("step")
    if own is not None and not getattr(own, "_wrapped_by_lr_sched", False):
        return False
    home = type(optimizer).__init__.__code__.co_filename if type(optimizer) in BY_CLASS else _TORCH_OPTIM
    groups = getattr(optimizer, "_init_group", optimizer.step)
    own_functions = _is_from(optimizer.step, home) and _is_from(groups, home) and _unpatched(type(optimizer), home)
    return own_functions and genuine_zero_grad(optimizer)


def genuine_zero_grad(optimizer: Optimizer) -> bool:
    return "zero_grad" not in vars(optimizer) and _is_from(optimizer.zero_grad, _TORCH_OPTIM)


def _unpatched(kind: type[Optimizer], home: str) -> bool:
    """Whether the functions that do the work of its step are those they were, `torch.optim.sgd.sgd` among them."""
    table, names, values, genuine = _functions_beside(kind, home)  # type: ignore[arg-type]
    return genuine and [*map(table.get, names)] == values


@functools.cache
def _functions_beside(kind: type[Optimizer], home: str) -> tuple[dict[str, Any], list[str], list[Any], bool]:
    """The globals of an optimizer's step, functions among them, and whether those that it names were written beside it."""
    step = inspect.unwrap(kind.step)
    found = {name: value for name, value in step.__globals__.items() if isinstance(value, types.FunctionType)}
    named = [found[name] for name in step.__code__.co_names if name in found and found[name] is not typing.cast]
    genuine = all(_is_from(function, home) for function in named)
    return step.__globals__, list(found), list(found.values()), genuine


def _is_from(function: Any, home: str) -> bool:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith((home, _TORCH_OPTIM))


_PLAIN = frozenset((int, float, bool, str, tuple, list, type(None)))
_TORCH_OPTIM = os.path.dirname(torch.optim.__file__)


def structure(optimizer: Optimizer) -> list[Any]:
    """What a captured update has fixed: members and flags of the groups, and that the step is the optimizer's own."""
    update = update_of(optimizer)
    fixed, switches = ((), ()) if update is None else (update.structure, update.switches)
    groups = [
        ([*map(id, g["params"])], [g.get(key) for key in fixed], [bool(g.get(key)) for key in switches])
        for g in optimizer.param_groups
    ]
    return [groups, supported(optimizer)]


def plan_updates(optimizer: Optimizer, names: Mapping[int, str]) -> list[UpdatePlan]:
    """One plan per group (and step count); `names` maps id(parameter) to its name and holds only the trained ones."""
    update = update_of(optimizer)
    assert update is not None
    plans = []
    for index, group in enumerate(optimizer.param_groups):
        alike: dict[tuple[float, int], list[torch.Tensor]] = {}
        for p in group["params"]:
            if id(p) in names:
                alike.setdefault((steps_taken(optimizer, p), update.apart(p)), []).append(p)
        for part, key in enumerate(sorted(alike, reverse=True)):
            state_keys, flags = update.describe(optimizer, group, alike[key])
            chosen = tuple(names[id(p)] for p in alike[key])
            plans.append(UpdatePlan(index, part, update.kind, chosen, state_keys, tuple(flags.items())))
    return plans


def steps_taken(optimizer: Optimizer, parameter: torch.Tensor) -> float:
    """How many updates a parameter has had, as `optimizer.state` tells it; where nobody counts, 1 stands for any."""
    state = optimizer.state.get(parameter)
    if not state:
        return 0.0
    update = update_of(optimizer)
    if update is None or update.counts_steps:
        return float(state.get("step", 0.0))
    return float(any(t is not None and not hasattr(t, UNUSED) for t in (state.get(key) for key in update.states)))


UNUSED = "_wholestep_unused"
"""Mark on a state that was made before its first step, where the optimizer would not have one yet and does not count steps."""


def unused_state(optimizer: Optimizer) -> set[torch.Tensor]:
    """Parameters whose state carries that mark."""
    update = update_of(optimizer)
    if update is None or update.counts_steps:
        return set()
    return {p for p in optimizer.state if steps_taken(optimizer, p) == 0}


def mark_stepped(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Their state now holds a gradient."""
    for state in (optimizer.state.get(p, {}) for p in parameters):
        for value in state.values():
            if hasattr(value, UNUSED):
                delattr(value, UNUSED)


def hyper_values(plan: UpdatePlan, group: dict, steps: float) -> list[float]:
    """The numbers of one group for the update after `steps` earlier ones, in the order the operators read them."""
    return plan.update.fill(group, steps)


def hyper_size(plan: UpdatePlan) -> int:
    return len(plan.update.numbers)


def new_state(optimizer: Optimizer, plan: UpdatePlan, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state the optimizer would create for a parameter at its first step."""
    group, update = optimizer.param_groups[plan.group], plan.update
    state = {key: update.new_state(optimizer, key, parameter) for key in plan.state_keys}
    if update.counts_steps:
        on_device = bool(group.get("capturable") or group.get("fused"))
        device = parameter.device if on_device else torch.device("cpu")
        dtype = wide_dtype(torch.get_default_dtype())
        return {"step": torch.zeros((), dtype=dtype, device=device)} | state
    for value in state.values():
        setattr(value, UNUSED, True)
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
    count = len(params)
    lists = [list(states.get(key, [])) for key in plan.update.states]
    flags = [value for _, value in plan.flags]
    values = plan.update.operator(list(params), list(grads), *lists, hyper, scale, *flags)
    news = [list(values[i * count : (i + 1) * count]) for i in range(1 + len(plan.state_keys))]
    return news[0], dict(zip(plan.state_keys, news[1:], strict=True))
