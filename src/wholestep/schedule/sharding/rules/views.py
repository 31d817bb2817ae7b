"""Other shapes of the same elements: views, reshapes, permutations, expansions, repetitions. A sum that is due stays due."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from wholestep.graph.mesh import fitting_parts
from wholestep.schedule.operators import call_of
from wholestep.schedule.sharding.layout import WHOLE, Cut, reshaped, wanted_blocks
from wholestep.schedule.sharding.program import Program
from wholestep.schedule.sharding.registry import rule
from wholestep.schedule.sharding.values import Called, Value

_MARK = 1_000_003
"""A size that no dimension has: where it turns up in a result, there the dimension went."""


@rule("view", "reshape", "unflatten", "flatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel")
def reshape(p: Program, call: Called) -> Any:
    """A view of another type (`x.view(dtype)`) has no shape to follow."""
    x = call.first
    if any(isinstance(one, torch.dtype) for one in call.args[1:]):
        p.refuse_cut(call.name, x)
    if not isinstance(x, Value) or x.cut is None:
        return p.again(call, x.layout)
    shape = call.result or shape_after(call, x)
    cut = reshaped(x.cut, x.shape, shape, p.parts)
    if cut is None:
        _refuse(p, x, shape)
    if _one_head(p, call, x.cut, cut, shape):
        hint = "only keys and values can have fewer heads than there are ranks"
        p.recut(x, None, f"1 head cannot be cut into {p.parts}", hint)
    if call.name in ("flatten", "unsqueeze", "ravel"):
        return p.again(call, cut)
    target = "view" if call.name == "view" and isinstance(call.target, str) else torch.reshape
    return p.emit(target, x, _sizes(p, call, shape, cut), layout=cut)


def shape_after(call: Called, x: Value) -> tuple[int, ...]:
    """The shape of the result in the model, of a call that a rule made."""
    return tuple(_call(call.target, torch.empty(x.shape, device="meta"), call.args[1:], call.kwargs).shape)


def _call(target: Any, x: torch.Tensor, rest: Sequence[Any], named: dict[str, Any]) -> Any:
    return getattr(x, target)(*rest, **named) if isinstance(target, str) else target(x, *rest, **named)


def _sizes(p: Program, call: Called, shape: Sequence[int], cut: Cut) -> tuple[Any, ...]:
    """The sizes that the call gives, those that vary among them, with the local one where the result is cut."""
    given = call.args[1:] if call.name in ("view", "reshape") else ()
    if len(given) == 1 and isinstance(given[0], tuple | list):
        given = tuple(given[0])
    if (
        len(given) == 1 and isinstance(given[0], Value) and isinstance(given[0].example, tuple)
    ):  # sizes of another value
        given = tuple(p.emit(operator.getitem, given[0], dim, layout=WHOLE) for dim in range(len(shape)))
    if len(given) != len(shape) and call.varies:
        p.refuse_cut(f"{call.name} to sizes that vary", call.first)
    sizes: list[Any] = list(given) if len(given) == len(shape) else list(shape)
    if not (isinstance(sizes[cut.dim], int) and sizes[cut.dim] == -1):
        sizes[cut.dim] = shape[cut.dim] // p.parts
    return tuple(sizes)


def _one_head(p: Program, call: Called, before: Cut, after: Cut, shape: Sequence[int]) -> bool:
    """Whether a view makes one head of what is cut: (…, width) -> (…, 1, width), and the 1 then goes where heads go."""
    one = (
        call.name in ("view", "reshape", "unflatten")
        and after.dim == len(shape) - 1
        and shape[after.dim - 1 : after.dim] == (1,)
    )
    if not one or after.dim != before.dim + 1:
        return False
    names = [reader.name for user in p.at.users if (reader := call_of(user)) is not None]
    return bool(names) and all(name in ("transpose", "permute", "swapaxes", "movedim") for name in names)


def _refuse(p: Program, x: Value, shape: Sequence[int]) -> NoReturn:
    """Cut the parameter in blocks, or leave it whole where what it is divided into are fewer than the ranks."""
    assert x.cut is not None
    text = f"{x.shape} is {x.layout}, and as {tuple(shape)} its parts do not stay together"
    found = wanted_blocks(x.cut, x.shape, shape, p.parts) if x.cut.plain else None
    if found is not None and (len(found[1]) > 1 or _taken_apart(p, found[1][0] - 1)):
        count = x.cut.size // found[0]
        p.recut(x, (count,) * found[0], text, "say how it is built: shard(..., blocks=...)")
    heads = (
        shape[x.cut.dim] if x.cut.dim < len(shape) and x.shape[: x.cut.dim] == tuple(shape[: x.cut.dim]) else x.cut.size
    )
    if x.cut.plain and 0 < heads < p.parts and p.parts % heads == 0:
        hint = "only keys and values can have fewer heads than there are ranks"
        p.recut(x, None, f"{heads} heads cannot be cut into {p.parts}", hint)
    p.refuse(
        text + p.because(x), f"{heads} would have to be cut into {p.parts}; {fitting_parts((heads,), p.parts - 1)}"
    )


def _taken_apart(p: Program, dim: int) -> bool:
    """Whether single places of a dimension of the current call's result are read: they are values side by side, not heads."""
    for user in p.at.users:
        call = call_of(user)
        if call is not None and call.name in ("unbind", "select") and call.arguments.get("dim", 0) == dim:
            return True
        if call is not None and call.name == "getitem":
            index = user.args[1] if isinstance(user.args[1], tuple) else (user.args[1],)
            ahead = next((i for i, item in enumerate(index) if item is Ellipsis), None)
            place = dim if ahead is None else dim - len(p.at.meta["example_value"].shape) + len(index)
            if 0 <= place < len(index) and isinstance(index[place], int):
                return True
    return False


@rule("permute", "transpose", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint", "mT", "T", "mH", "H")
def permute(p: Program, call: Called) -> Any:
    x = call.first
    return p.again(call, x.layout if x.cut is None else x.cut.at(moved(call, x)))


def moved(call: Called, x: Value, rest: Sequence[Any] | None = None, named: dict[str, Any] | None = None) -> int:
    """Where the dimension that is cut goes in a call that leaves it alone."""
    assert x.cut is not None
    shape = list(x.shape)
    shape[x.cut.dim] = _MARK
    marked = torch.empty(shape, device="meta")
    result = _call(
        call.target, marked, call.args[1:] if rest is None else rest, call.kwargs if named is None else named
    )
    first = result[0] if isinstance(result, tuple | list) else result
    return list(first.shape).index(_MARK)


@rule("expand", "broadcast_to", "expand_as")
def expand(p: Program, call: Called) -> Any:
    x = p.reduced(call.first)
    if call.name == "expand_as":
        if call.varies:
            p.refuse_cut("expand_as to sizes that vary", next(value for value in call.values if not value.is_whole))
        sizes: tuple[Any, ...] = call.at(1).shape
    else:
        sizes = call.args[1:] or tuple(call.kwargs.values())
        sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
    if x.cut is None:  # as large as in the model: each rank takes its part where it is read
        return p.emit("expand", x, sizes, layout=x.layout)
    cut = x.cut.at(x.cut.dim + len(sizes) - x.dim)
    return p.emit("expand", x, _sizes_of(sizes, cut, p.parts), layout=cut)


def _sizes_of(sizes: Sequence[Any], cut: Cut, parts: int) -> tuple[Any, ...]:
    found = list(sizes)
    if not (isinstance(found[cut.dim], int) and found[cut.dim] == -1):
        found[cut.dim] = cut.size // parts
    return tuple(found)


@rule("repeat", "tile")
def repeat(p: Program, call: Called) -> Any:
    """Copies of the dimension that is cut stand side by side: as many blocks more."""
    x = p.reduced(call.first)
    counts = call.args[1:] or tuple(call.kwargs.values())
    counts = tuple(counts[0]) if len(counts) == 1 and isinstance(counts[0], tuple | list) else counts
    if x.cut is None:
        return p.again(call, x.layout, p.reduced)
    counts = (*([1] * (x.dim - len(counts))), *counts)
    dim = x.cut.dim + len(counts) - x.dim
    return p.emit("repeat", x, counts, layout=Cut(dim, x.cut.sizes, x.cut.times * counts[dim]))


@rule("repeat_interleave")
def repeat_interleave(p: Program, call: Called) -> Any:
    x, count, dim = p.reduced(call.first), call.get("repeats"), call.get("dim")
    count = count[0] if isinstance(count, tuple) and len(count) == 1 else count
    if x.cut is None:
        return p.again(call, x.layout, p.reduced)
    if isinstance(count, Value) or dim is None:
        p.refuse_cut(call.name, x)
    cut = x.cut
    if dim % x.dim == cut.dim:
        cut = Cut(cut.dim, tuple(size * count for size in cut.sizes), cut.times)
    return p.emit(torch.repeat_interleave, x, count, dim, layout=cut)


@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
def made_new(p: Program, call: Called) -> Any:
    """It takes the type and device of another, and has nothing else of it."""
    return p.again(call, WHOLE)


@rule("size", "numel", "dim", "ndim", "shape")
def about(p: Program, call: Called) -> Any:
    """Sizes are those of the model."""
    return _asked(p, call.first, call.name, call.args[1:] or tuple(call.kwargs.values()))


@rule("builtins.getattr")
def attribute(p: Program, call: Called) -> Any:
    return _asked(p, call.args[0], call.args[1], ())


def _asked(p: Program, x: Value, name: str, rest: tuple[Any, ...]) -> Any:
    varies = any(not isinstance(size, int) for size in x.example.shape)
    if name in ("dtype", "device", "requires_grad", "is_cuda", "layout"):
        return getattr(x.example, name)
    if name in ("dim", "ndim"):
        return x.dim
    if name == "numel" and not varies:
        return math.prod(x.shape)
    if name not in ("size", "shape"):
        p.refuse_cut(name, x)
    fixed = [isinstance(size, int) for size in x.example.shape]
    each = [x.shape[d] if fixed[d] else p.emit("size", x, d, layout=WHOLE) for d in range(x.dim)]
    return each[rest[0]] if rest else tuple(each)
