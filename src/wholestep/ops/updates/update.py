"""Update: all that is asked about one kind of optimizer, in one record.

In: what an optimizer's file says (`adam.py`, `sgd.py`, ...). Out: a row of the table in `__init__.py`, which capture, binding,
lowering, the FLOP formulas and the first-step check ask; none of them knows an optimizer by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.optim import Optimizer

from wholestep.ops.call import Call

Group: TypeAlias = Mapping[str, Any]
"""One of `optimizer.param_groups`."""
Flags: TypeAlias = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """How a tensor in which the gradient shows is moved by an update:

    new = carried * old + share * pull,   pull = gradient + decay * parameter
    """

    key: str | None
    """The state it is; None: the parameter itself."""
    carried: float
    share: float
    decay: float = 0.0
    sign: float = 1.0
    """-1 where the optimizer maximizes: the gradient counts negated."""
    root: str | None = None
    """The pull is divided by (square root of the new value of this state + eps)."""
    eps: float = 0.0
    squared: bool = False
    """The pull counts squared, so that its sign does not show."""
    mean_over: int | None = None
    """Squares are averaged over this dimension, which stays with size 1."""


def zeros_like_parameter(optimizer: Optimizer, key: str, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """One kind of update."""

    kind: str
    classes: tuple[type[Optimizer], ...]
    """The optimizers it stands for; their subclasses are others."""
    operator: OpOverload
    """Functional: (params, grads, one list per state, hyper, scale, flags...) -> new params and states, concatenated. The last
    flag is the implementation. Every parameter is treated by itself."""
    in_place: Callable[..., None]
    """The same on the tensors themselves."""
    states: tuple[str, ...]
    """All that may be kept per parameter, as the optimizer names it and in the operator's order; beside the step count."""
    numbers: tuple[str, ...]
    """What `hyper` holds; `step` (1 at the first update) is the first where steps are counted."""
    fill: Callable[[Group, float], list[float]]
    """Group, updates before this one -> the numbers."""
    describe: Callable[[Optimizer, Group, Sequence[Tensor]], tuple[tuple[str, ...], dict[str, Any]]]
    """The states this group keeps, and the operator's flags in their order."""
    rules: Callable[[Sequence[str], Flags, Mapping[str, float]], Sequence[Rule]]
    """States kept, flags, numbers -> where the gradient shows, the best place first; nothing where no tensor tells it."""
    flops: Callable[[Call], int]
    """Per element of the parameters."""
    elementwise: bool = False
    """Whether every element is updated by itself, so that a part of a parameter is updated as it is in the whole."""
    structure: tuple[str, ...] = ()
    """Keys of a group that a capture fixes."""
    switches: tuple[str, ...] = ()
    """Numbers of a group of which a capture fixes whether they are zero."""
    counts_steps: bool = True
    """Whether the state has a `step`. Without one, state that was made before its first step carries a mark."""
    new_state: Callable[[Optimizer, str, Tensor], Tensor] = zeros_like_parameter
    has_state_from_the_start: bool = False
    """The optimizer makes its state when it is built, and may not be able to do so again."""
    has_fused_kernel: bool = False
    """Whether torch has a kernel for the CPU that goes over memory once."""
    is_one_kernel: bool = False
    """Whether on a GPU one kernel goes over all parameters, so that it needs no memory for itself."""
    torch_operators: tuple[str, ...] = ()
    """Operators of torch that take the same FLOPs."""
    refuses: Callable[[Group], str | None] = lambda group: None
    """Why a group cannot be captured."""
    apart: Callable[[Tensor], int] = lambda parameter: 0
    """Parameters for which this differs keep other states and are updated by another node."""


def implementation(group: Group, params: Sequence[Tensor]) -> str:
    """The one of torch's three implementations the optimizer itself would take, so that bits can agree."""
    if group.get("fused"):
        return "fused"
    if group.get("foreach") or (group.get("foreach") is None and all(p.is_cuda for p in params)):
        return "foreach"
    return "single"


def floats(group: Group, *keys: str) -> list[float]:
    """Numbers of a group, any of which may be a tensor on the CPU."""
    return [float(group[key]) for key in keys]


def sign_of(flags: Flags) -> float:
    return -1.0 if flags["maximize"] else 1.0


def capturable_on_cpu(group: Group) -> str | None:
    """torch raises for these; so its own step is called, which says so."""
    on_cpu = group.get("capturable") and any(p.device.type == "cpu" for p in group["params"])
    return "a group has capturable=True with parameters on the CPU" if on_cpu else None
