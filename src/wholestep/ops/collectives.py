"""Collectives, named by an axis of the mesh: `ws::all_reduce(x, "tp", 4)` means the sum over the four ranks along `tp`.

In: what one rank has. Out: what it gets. `parts` is how many ranks the axis has. No process group is named, so that a graph is the
same on every rank and can be cached, printed and planned anywhere. The specification of each is its `across`: a function over the
values of all ranks of the axis, by which `lower/lockstep.py` runs them side by side; `reference` is the case of one rank.

    operator          in                          out                      derivative of x
    all_reduce(sum)   partial sums                the same everywhere      the gradient: readers are the same everywhere
    all_reduce(max)   any values                  the same everywhere      none: detach x before
    enter             the same everywhere         x                        all_reduce: ranks go on with x differently
    all_gather        this rank's part            the whole, everywhere    own_part
    own_part          the whole, everywhere       this rank's part         all_gather
    reduce_scatter    partial sums                this rank's part of sum  all_gather
    axis_index        -                           this rank's coordinate   -

Sums run in the order of ranks, 16-bit values in float32, so that every run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from wholestep.errors import WholestepError
from wholestep.ops.amounts import Amount, numel, stored_bytes
from wholestep.ops.call import Call
from wholestep.ops.record import Precision, record

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define('all_reduce(Tensor x, str axis, int parts, str op="sum") -> Tensor')
LIBRARY.define("enter(Tensor x, str axis, int parts) -> Tensor")
LIBRARY.define("all_gather(Tensor x, int dim, str axis, int parts) -> Tensor")
LIBRARY.define("own_part(Tensor x, int dim, str axis, int parts) -> Tensor")
LIBRARY.define("reduce_scatter(Tensor x, int dim, str axis, int parts) -> Tensor")
LIBRARY.define("axis_index(str axis, int parts, Device device) -> Tensor")
NARROW = (torch.bfloat16, torch.float16)


# ---- over the values of all ranks: the specification ----


def all_reduce(xs: Sequence[Tensor], axis: str, parts: int, op: str = "sum") -> list[Tensor]:
    if op not in ("sum", "max"):
        raise WholestepError(f"ws::all_reduce has no operation {op!r}", hint="use 'sum' or 'max'")
    wide = xs[0].dtype in NARROW and op == "sum"
    total = xs[0].float() if wide else xs[0].clone()
    for x in xs[1:]:
        total = total + x if op == "sum" else torch.maximum(total, x)
    return [total.to(xs[0].dtype)] * len(xs)


def enter(xs: Sequence[Tensor], axis: str, parts: int) -> list[Tensor]:
    return [x.clone() for x in xs] if parts == 1 else list(xs)


def all_gather(xs: Sequence[Tensor], dim: int, axis: str, parts: int) -> list[Tensor]:
    return [torch.cat(list(xs), dim).contiguous()] * len(xs)


def own_part(xs: Sequence[Tensor], dim: int, axis: str, parts: int) -> list[Tensor]:
    size = part_of(xs[0], dim, parts)
    return [x.narrow(dim, rank * size, size).clone(memory_format=torch.contiguous_format) for rank, x in enumerate(xs)]


def reduce_scatter(xs: Sequence[Tensor], dim: int, axis: str, parts: int) -> list[Tensor]:
    return own_part(all_reduce(xs, axis, parts), dim, axis, parts)


def axis_index(xs: Sequence[None], axis: str, parts: int, device: torch.device) -> list[Tensor]:
    return [torch.tensor(rank, dtype=torch.int64, device=device) for rank in range(len(xs))]


def part_of(x: Tensor, dim: int, parts: int) -> int:
    """Size of one of equal parts of a dimension."""
    size = x.shape[dim]
    if isinstance(size, int) and size % parts:
        raise WholestepError(f"a dimension of {size} does not divide into {parts} equal parts")
    return size // parts


# ---- of one rank ----


def _alone(name: str, across: Callable[..., list[Tensor]]) -> Callable[..., Tensor]:
    """The operator where it is really called: with one rank on the axis, or not at all."""
    has_x = name != "axis_index"

    def call(*args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(_arguments(name), args, strict=False)) | kwargs
        if given["parts"] > 1:
            raise WholestepError(
                f"ws::{name} over the {given['parts']} ranks of axis {given['axis']!r} was called by one rank alone",
                hint="run the step by wholestep.compile(..., mesh=...), which runs its ranks side by side",
            )
        x = given.pop("x") if has_x else None
        return across([x], **given)[0]

    return call


def _arguments(name: str) -> list[str]:
    return [a.name for a in getattr(torch.ops.ws, name).default._schema.arguments]


@torch.library.register_fake("ws::all_reduce", lib=LIBRARY)
def _same(x: Tensor, axis: str, parts: int, op: str = "sum") -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("ws::enter", lib=LIBRARY)
def _entered(x: Tensor, axis: str, parts: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("ws::all_gather", lib=LIBRARY)
def _gathered(x: Tensor, dim: int, axis: str, parts: int) -> Tensor:
    return _resized(x, dim, x.shape[dim] * parts)


@torch.library.register_fake("ws::own_part", lib=LIBRARY)
def _own(x: Tensor, dim: int, axis: str, parts: int) -> Tensor:
    return _resized(x, dim, part_of(x, dim, parts))


@torch.library.register_fake("ws::reduce_scatter", lib=LIBRARY)
def _scattered(x: Tensor, dim: int, axis: str, parts: int) -> Tensor:
    return _resized(x, dim, part_of(x, dim, parts))


@torch.library.register_fake("ws::axis_index", lib=LIBRARY)
def _index(axis: str, parts: int, device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


# ---- derivatives ----


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rest = inputs[1:]


def _reduced_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    if ctx.rest[2] != "sum":
        raise WholestepError("ws::all_reduce(op='max') has no derivative", hint="detach its input")
    return grad, None, None, None


def _entered_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.ws.all_reduce(grad, *ctx.rest), None, None


def _gathered_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.ws.own_part(grad, *ctx.rest), None, None, None


def _part_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.ws.all_gather(grad, *ctx.rest), None, None, None


_BACKWARD = {
    "all_reduce": _reduced_backward, "enter": _entered_backward, "all_gather": _gathered_backward, "own_part": _part_backward,
    "reduce_scatter": _part_backward,
}  # fmt: skip
for _name, _backward in _BACKWARD.items():
    torch.library.register_autograd(f"ws::{_name}", _backward, setup_context=_keep, lib=LIBRARY)


# ---- records ----


# Bytes that each of n ranks in a ring sends to the next, of the x bytes that go in: a sum travels round in n - 1 messages of x / n
# to where it is complete, and in as many back to everyone; a gathered part of x bytes passes n - 1 times.


def ring_hops(call: Call) -> int:
    """Messages that follow on each other."""
    return (call["parts"] - 1) * (2 if call.name == "ws::all_reduce" else 1)


def _link_reduced(call: Call) -> Amount:
    return 2 * (call["parts"] - 1) * stored_bytes(call.tensor("x")) / call["parts"]


def _link_gathered(call: Call) -> Amount:
    return (call["parts"] - 1) * stored_bytes(call.tensor("x"))


def _link_scattered(call: Call) -> Amount:
    return (call["parts"] - 1) * stored_bytes(call.tensor("x")) / call["parts"]


def _additions(call: Call) -> Amount:
    """Every rank adds up its own part of the sum."""
    return (call["parts"] - 1) * numel(call.tensor("x")) // call["parts"]


def _tensors() -> Iterator[Tensor]:
    for shape in ((4, 3), (1, 1), (0, 5)):
        yield from (torch.randn(shape).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64))
    yield torch.randn(3, 4).t()


def _record(name: str, across: Callable[..., list[Tensor]], cases: Callable[[], Any], **facts: Any) -> None:
    alone = _alone(name, across)
    for device in ("CPU", "CUDA") if name != "axis_index" else ("CompositeExplicitAutograd",):
        LIBRARY.impl(name, alone, device)
    record(
        f"ws::{name}", reference=alone, cases=cases, across=across, kind="collective", fuses=False, compiled=False, **facts
    )  # fmt: skip


def _none(call: Call) -> int:
    return 0


_FOLLOW = Precision("collective", "follow")
_record("all_reduce", all_reduce, lambda: [(x, "tp", 1, op) for x in _tensors() for op in ("sum", "max")],
        flops=_additions, on_link=_link_reduced, precision=_FOLLOW)  # fmt: skip
_record("enter", enter, lambda: [(x, "tp", 1) for x in _tensors()], flops=_none, precision=_FOLLOW)
_record("all_gather", all_gather, lambda: [(x, 0, "tp", 1) for x in _tensors()],
        flops=_none, on_link=_link_gathered, precision=_FOLLOW)  # fmt: skip
_record("own_part", own_part, lambda: [(x, -1, "tp", 1) for x in _tensors()],
        flops=_none, precision=_FOLLOW)  # fmt: skip
_record("reduce_scatter", reduce_scatter, lambda: [(x, 1, "tp", 1) for x in _tensors()],
        flops=_additions, on_link=_link_scattered, precision=_FOLLOW)  # fmt: skip
_record("axis_index", axis_index, lambda: [("tp", 1, torch.device("cpu"))], flops=_none)
