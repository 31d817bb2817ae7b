"""One record per operator: what the rest of the compiler asks about it, said once, where the operator is.

In: `record("ws::dropout", kind="elementwise", ...)` in the operator's own file; torch's are described by family in `aten/`.
A name with an overload (`aten::max.other`) adds to what is said of the bare name, and goes before it. Out: `record_of(node)`, an
`Operator`; whoever plans, rewrites or lowers asks it and knows no names. A fact that nobody states is the one that is safe.

The names are strings, so operators that are absent from this build of torch can have a record.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import fx
from torch._ops import OpOverload

from wholestep.graph.training_graph import tensors_in
from wholestep.ops.call import Call

Kind = Literal[
    "matmul", "attention", "convolution", "elementwise", "reduction", "movement", "optimizer", "collective", "other"
]
KINDS: tuple[str, ...] = get_args(Kind)
TENSOR_KINDS: tuple[Kind, ...] = ("matmul", "attention", "convolution")
"""What runs on matrix units; MFU and HFU count these."""
Formula: TypeAlias = Callable[[Call], Any]
"""Call -> an Amount; FLOPs may be a pair (executed, mathematical), where the operator itself computes something again."""
Rule = Literal["low", "wide", "total", "first", "saved", "like", "given", "keep", "follow"]


@dataclasses.dataclass(frozen=True, slots=True)
class Precision:
    """How automatic mixed precision treats an operator; the rules are explained in `aten/precision.py`."""

    family: str
    """For reports."""
    rule: Rule
    positions: int | None = None
    """The argument before which the rule ends; None: it is about all of them."""
    saved: int = 1
    """Rule `saved`: which argument is the value of the forward."""
    first: int = 0
    """The argument with which it begins."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """What is known of one operator."""

    name: str

    # ---- what it computes
    reference: Callable[..., Any] | None = None
    """The same in plain PyTorch: the specification. None for torch's own, which are theirs."""
    cases: Callable[[], Iterable[tuple[Any, ...]]] | None = None
    """Arguments to try it with: odd sizes, empty ones, several dtypes. On the CPU."""
    tolerance: float = 0.0
    """How far from the reference results may be, relatively; 0: the same bits."""
    draws: Callable[[Mapping[str, Any]], bool] | None = None
    """Whether a call with these arguments draws from torch's generator, so that a second one gives other numbers."""

    # ---- what it costs
    kind: Kind | None = None
    flops: Formula | None = None
    reads: Formula | None = None
    """Bytes it reads, where that is not every input once."""
    unread: tuple[str, ...] = ()
    """Arguments whose content it does not look at."""
    writes: bool = True
    """Whether it puts something into its results; `empty` does not."""
    passes_through: Callable[[Call], tuple[Any, Any]] | None = None
    """Bytes read and written beyond inputs and outputs: what goes through memory inside it."""
    scratch: Callable[[Call], int] | None = None
    """Bytes it takes for itself while it runs."""
    spares: Callable[[Call], int] | None = None
    """Elements of a value that plain PyTorch has whole and this operator never has: logits."""

    # ---- how it is run
    precision: Precision | None = None
    fuses: bool | None = None
    """Whether a compiler writes code for it instead of calling it; None: by its kind."""
    layout: Literal["", "elements", "two", "any", "memory"] = ""
    """In memory orders that it was not captured with: it works element by element, as all that torch tags as pointwise; its kernels
    know two orders, and want gradients and saved values in the same (some do not look whether they are); it takes any strides, and
    gives those that it announces; it gives others, or picks elements by their place in memory. Not said: it wants its own."""
    compiled: bool = True
    """Whether a compiler may see it."""
    trip: Literal["", "copy_out", "out_done", "copy_in", "in_done"] = ""
    """Which part it is of a value's way to the host and back (`offload.py`)."""
    on_host: bool = False
    """Whether its result lies in the host's memory: it takes none of the card, whatever device its tensor names."""
    guards: bool = False
    """Whether it ends a step in which a fact does not hold, and has to run before whatever rests on that fact."""
    decomposition: Callable[..., Any] | None = None
    """aten arithmetic that a compiler fuses."""
    in_place: Callable[..., None] | None = None
    """A Python function that updates parameters and states where they are."""
    in_order: Callable[..., Any] | None = None
    """The same sum in an order that repeats itself, called in its place; returns NotImplemented where there is nothing to order."""
    unordered: frozenset[str] = frozenset()
    """Devices on which it may round otherwise in an equal run."""
    unordered_compiled: frozenset[str] = frozenset()
    """The same for what a compiler makes of it."""

    # ---- across the ranks of a mesh
    across: Callable[..., list[Any]] | None = None
    """A collective as a function over the values of all ranks of its axis, in their order: its specification."""
    on_link: Formula | None = None
    """Bytes that every rank sends to another one; None where nothing is sent, so that a second call costs no link."""


FACTS: dict[str, dict[str, Any]] = {}
"""Name -> what was said of it."""
_found: dict[Any, Operator] = {}


def record(*names: str, **facts: Any) -> None:
    """Say something about these operators; what was said already cannot be said otherwise."""
    for name in names:
        known = FACTS.setdefault(name, {})
        for fact, value in facts.items():
            assert fact not in known, f"{name}: {fact} is said twice"
            known[fact] = value
    _found.clear()


def flops_of(*names: str, kind: Kind) -> Callable[[Formula], Formula]:
    """The same for a formula of FLOPs, as a decorator."""

    def said(formula: Formula) -> Formula:
        record(*names, kind=kind, flops=formula)
        return formula

    return said


def record_of(what: fx.Node | Call | OpOverload | Any) -> Operator:
    """What is known of an operator; of one that nobody described, the defaults."""
    target = (
        what.target if isinstance(what, fx.Node) else (what.name, what.overload) if isinstance(what, Call) else what
    )
    found = _found.get(target)
    if found is None:
        name, overload = target if isinstance(target, tuple) else _names(target)
        facts = {**FACTS.get(name, {}), **FACTS.get(f"{name}.{overload}", {})}
        found = _found[target] = Operator(name=name, **facts)
    return found


def _names(target: Any) -> tuple[str, str]:
    schema = getattr(target, "_schema", None)
    return (getattr(target, "__name__", str(target)), "") if schema is None else (schema.name, schema.overload_name)


def overloads(fact: str) -> dict[OpOverload, Any]:
    """Overload -> the fact, for all operators of which it is said."""
    found = {}
    for name, facts in FACTS.items():
        if fact in facts:
            space, _, rest = name.partition("::")
            packet, _, overload = rest.partition(".")
            found[getattr(getattr(getattr(torch.ops, space), packet), overload or "default")] = facts[fact]
    return found


def arguments_of(function: OpOverload, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by the names of the schema."""
    return dict(zip([a.name for a in function._schema.arguments], args, strict=False)) | dict(kwargs)


def may_recompute(node: fx.Node) -> bool:
    """Whether a second call gives the same bits: no random numbers but keyed ones, no messages, no effects."""
    target = node.target
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    if target.namespace.startswith("_c10d") or node.is_impure() or target._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags or record_of(target).on_link is not None:
        return False
    draws = record_of(target).draws
    return draws is None or not draws(arguments_of(target, node.args, node.kwargs))


def is_unordered(node: fx.Node, device: str, *, compiled: bool) -> bool:
    """Whether the operator may round otherwise in an equal run on this device; `compiled` by Inductor, or run as it is."""
    if not isinstance(node.target, OpOverload):
        return False
    known = record_of(node)
    if device not in known.unordered and not (compiled and device in known.unordered_compiled):
        return False
    if not any(t.is_floating_point() for t in tensors_in(node.meta.get("val"))):  # whole numbers are exact
        return False
    given = arguments_of(node.target, node.args, node.kwargs)
    return bool(given.get("accumulate", "accumulate" not in (a.name for a in node.target._schema.arguments)))
