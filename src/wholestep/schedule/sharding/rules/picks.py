"""Parts of values, and values side by side: slices, indices, split, chunk, cat, stack, padding."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from wholestep.schedule.sharding.layout import Cut, joined, picked, refined
from wholestep.schedule.sharding.program import Program
from wholestep.schedule.sharding.registry import rule
from wholestep.schedule.sharding.rules.elementwise import agreed, local
from wholestep.schedule.sharding.rules.views import moved
from wholestep.schedule.sharding.values import Called, Value, values_in


def taken(p: Program, x: Value, edges: Sequence[tuple[int, int]]) -> list[Cut]:
    """The cuts of several slices of the dimension that is cut; the parameter is cut in blocks that fit them, if need be."""
    assert x.cut is not None
    found = [picked(x.cut, start, stop) for start, stop in edges]
    if all(found):
        return [cut for cut in found if cut is not None]
    blocks = refined(x.cut, [edge for pair in edges for edge in pair])
    text = f"a value that is {x.layout} is taken apart there, at {sorted({e for pair in edges for e in pair})} of {x.cut.size}"
    uneven = [size for size in blocks if size % p.parts]
    hint = (
        f"pieces of {uneven[0]} cannot be cut into {p.parts}" if uneven else f"cut it in blocks: blocks={list(blocks)}"
    )
    p.recut(x, blocks, text, hint)


def one_by_one(p: Program, x: Value) -> NoReturn:
    """Single places of the dimension that is cut are read, as of `(2, heads, width)`: they are values side by side, so the
    parameter is cut in that many blocks, of which each rank has its part."""
    assert x.cut is not None
    text = f"one place is picked of a value that is {x.layout}"
    p.recut(x, x.cut.size, text, p.gather_hint(x))


# ---- split ----


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unbind")
def split(p: Program, call: Called) -> Any:
    x = p.reduced(call.first)
    if x.cut is None:
        return p.again(call, x.layout, p.reduced)
    if call.get("dim", 0) % x.dim != x.cut.dim:
        return p.again(call, x.cut.at(moved(call, x)))
    if call.name == "unbind":
        one_by_one(p, x)
    whole = torch.empty(x.shape, device="meta")
    function = call.target if not isinstance(call.target, str) else getattr(torch.Tensor, call.target)
    sizes = [one.shape[x.cut.dim] for one in function(whole, *call.args[1:], **call.kwargs)]
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    cuts = taken(p, x, [(stop - size, stop) for size, stop in zip(sizes, stops)])
    parts = p.emit(torch.split, x, [size // p.parts for size in sizes], x.cut.dim, layout=x.cut)
    return tuple(Value(part.node, cut, part.shape, x.by) for part, cut in zip(parts, cuts, strict=True))


# ---- indices ----


@rule("getitem")
def getitem(p: Program, call: Called) -> Any:
    x, index = call.args
    if not isinstance(x, Value) or any(not value.is_whole for value in values_in(index)):
        p.refuse("its index is not whole", "")
    if x.is_partial:
        return p.again(call, x.layout)
    items, dims = _by_dimension(index, x.dim)
    assert x.cut is not None
    place = dims.index(x.cut.dim) if x.cut.dim in dims else None
    item = slice(None) if place is None else items[place]
    if isinstance(item, int):
        one_by_one(p, x)
    if not isinstance(item, slice) or item.step not in (None, 1):
        p.refuse(f"places are picked of a value that is {x.layout}{p.because(x)}", p.gather_hint(x))
    if any(isinstance(one, Value) for one in (item.start, item.stop)):
        p.refuse_cut(call.name, x)
    start, stop, _ = item.indices(x.cut.size)
    cut = x.cut if (start, stop) == (0, x.cut.size) else taken(p, x, [(start, stop)])[0]
    if place is not None:
        first = sum(size // p.parts for size in _before(x.cut, start))
        items[place] = slice(None) if cut is x.cut else slice(first, first + cut.size // p.parts)
    return p.emit(operator.getitem, x, tuple(items), layout=cut.at(_landing(x, items, place)))


def _before(cut: Cut, start: int) -> list[int]:
    found, total = [], 0
    for size in cut.blocks:
        if total >= start:
            break
        found.append(size)
        total += size
    return found


def _by_dimension(index: Any, rank: int) -> tuple[list[Any], list[int | None]]:
    """The items of an index and the dimension that each is about (None: a new one), the ellipsis written out."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(_width(item) for item in items)
    if Ellipsis in [item for item in items if not isinstance(item, Value)]:
        place = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[place : place + 1] = [slice(None)] * (rank - used)
    else:
        items += [slice(None)] * (rank - used)
    dims: list[int | None] = []
    at = 0
    for item in items:
        dims.append(at if _width(item) else None)
        at += _width(item)
    return items, dims


def _width(item: Any) -> int:
    """How many dimensions an item of an index takes up."""
    if item is None or item is Ellipsis:
        return 0
    boolean = isinstance(item, Value) and item.example.dtype in (torch.bool, torch.uint8)
    return item.dim if boolean else 1


def _landing(x: Value, items: Sequence[Any], place: int | None) -> int:
    """Where the dimension that is cut is in the result."""
    assert x.cut is not None
    mark = 1_000_003
    shape = list(x.shape)
    shape[x.cut.dim] = mark
    index = [
        torch.empty(item.shape, dtype=item.example.dtype, device="meta") if isinstance(item, Value) else item
        for item in items
    ]
    if place is not None:
        index[place] = slice(None)
    return list(torch.empty(shape, device="meta")[tuple(index)].shape).index(mark)


@rule(
    "index_select",
    "narrow",
    "select",
    "flip",
    "roll",
    "cumsum",
    "cumprod",
    "topk",
    "sort",
    "argsort",
    "unfold",
    "take_along_dim",
)
def along(p: Program, call: Called) -> Any:
    """Along one dimension that is not cut; what it picks is the same on every rank."""
    x = p.reduced(call.first)
    others = [value for value in call.values if value is not call.first]
    dims = call.get(
        "dim", call.get("dims", call.get("dimension", -1 if call.name in ("topk", "sort", "argsort") else None))
    )
    listed = dims if isinstance(dims, tuple | list) else (dims,)
    if x.cut is None and all(value.is_whole for value in others):
        return p.again(call, x.layout, p.reduced)
    if x.cut is None or dims is None or any(not value.is_whole for value in others) or call.name == "take_along_dim":
        p.refuse_cut(call.name, next(value for value in (x, *others) if not value.is_whole))
    if any(dim % x.dim == x.cut.dim for dim in listed):
        if call.name == "select":
            one_by_one(p, x)
        p.refuse_cut(f"{call.name} along it", x)
    meta = lambda value: torch.empty(value.shape, dtype=value.example.dtype, device="meta")  # noqa: E731
    rest = [meta(one) if isinstance(one, Value) else one for one in call.args[1:]]
    named = {name: meta(one) if isinstance(one, Value) else one for name, one in call.kwargs.items()}
    return p.again(call, x.cut.at(moved(call, x, rest, named)), p.reduced)


@rule("gather")
def gather(p: Program, call: Called) -> Any:
    """Along a dimension that is not cut, with as many places there as the value has."""
    x, dim, index = p.reduced(call.get("self")), call.get("dim"), call.get("index")
    if x.cut is None or dim % x.dim == x.cut.dim or index.shape[x.cut.dim] != x.shape[x.cut.dim]:
        p.refuse_cut(call.name, x if x.cut is not None else index)
    return p.emit(torch.gather, x, dim, local(p, index, x.cut, x.dim), layout=x.cut)


# ---- side by side ----


@rule("cat", "concat", "concatenate")
def cat(p: Program, call: Called) -> Any:
    given = call.first
    dim = call.get("dim", 0)
    empty = [value for value in given if value.shape == (0,)]  # torch leaves these out, whatever the others' rank
    values = [p.reduced(value) for value in given if value not in empty]
    rank = values[0].dim
    cuts = {value.cut.dim for value in values if value.cut is not None}
    if not cuts:
        return p.emit(torch.cat, [*empty, *values], dim, layout=values[0].layout)
    if cuts == {dim % rank}:
        parts = [
            value if value.cut is not None else p.part(value, Cut(dim % rank, (value.shape[dim],))) for value in values
        ]
        return p.emit(
            torch.cat, [*empty, *parts], dim, layout=joined(dim % rank, [v.cut for v in parts if v.cut is not None])
        )
    cut = agreed(p, values, rank)
    assert cut is not None
    return p.emit(torch.cat, [*empty, *(local(p, value, cut, rank) for value in values)], dim, layout=cut)


@rule("stack")
def stack(p: Program, call: Called) -> Any:
    values = [p.reduced(value) for value in (call.first)]
    rank, cut = values[0].dim, agreed(p, values, values[0].dim)
    dim = call.get("dim", 0) % (rank + 1)
    if cut is None:
        return p.emit(torch.stack, values, dim, layout=values[0].layout)
    placed = cut.at(cut.dim + (dim <= cut.dim))
    return p.emit(torch.stack, [local(p, value, cut, rank) for value in values], dim, layout=placed)


@rule("pad")
def pad(p: Program, call: Called) -> Any:
    x, padding = p.reduced(call.first), call.at(1)
    if x.cut is None:
        return p.again(call, x.layout, p.reduced)
    before_end = x.dim - 1 - x.cut.dim
    if any(padding[2 * before_end : 2 * before_end + 2]):
        p.refuse_cut("padding of it", x)
    return p.again(call, x.cut)


@rule("tril", "triu")
def triangle(p: Program, call: Called) -> Any:
    x = p.reduced(call.first)
    if x.cut is not None and x.cut.dim >= x.dim - 2:
        p.refuse_cut(call.name, x)
    return p.again(call, x.layout, p.reduced)


@rule("glu")
def glu(p: Program, call: Called) -> Any:
    """One half of a dimension by the sigmoid of the other."""
    one, other = p.call("chunk", p.reduced(call.first), 2, call.get("dim", -1))
    return p.call(torch.mul, one, p.call(torch.sigmoid, other))


@rule(
    "max_pool1d",
    "max_pool2d",
    "avg_pool1d",
    "avg_pool2d",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "upsample_nearest2d",
)
def pool(p: Program, call: Called) -> Any:
    """Over the last dimensions, of rows and channels that may be cut."""
    x = p.reduced(call.first)
    if x.cut is not None and x.cut.dim >= x.dim - int(call.name[-2]):
        p.refuse_cut(call.name, x)
    return p.again(call, x.layout, p.reduced)
