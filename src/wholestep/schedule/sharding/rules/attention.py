"""Attention over cut heads. Where keys and values have fewer heads than there are ranks, each rank takes those that it needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from wholestep.schedule.sharding.layout import WHOLE, Cut
from wholestep.schedule.sharding.program import Program
from wholestep.schedule.sharding.registry import rule
from wholestep.schedule.sharding.rules.elementwise import local
from wholestep.schedule.sharding.values import Called, Value


@rule("scaled_dot_product_attention")
def attention(p: Program, call: Called) -> Any:
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), call.args)) | call.kwargs
    query, key, value = (p.reduced(given[name]) for name in ("query", "key", "value"))
    mask = None if given.get("attn_mask") is None else p.reduced(given["attn_mask"])
    heads = query.dim - 3
    cuts = [one.cut for one in (query, key, value, mask) if one is not None and one.cut is not None]
    if not cuts:
        return p.call(call.target, query, key, value, **{**_options(given), "attn_mask": mask})
    query, cut = _query(p, query, (key, value), mask, cuts)
    grouped = bool(given.get("enable_gqa")) and cut.dim == heads
    key, value = (_keys(p, one, query, cut, grouped) for one in (key, value))
    mask = None if mask is None else local(p, mask, cut, query.dim)
    options = _options(given)
    if grouped and key.shape[heads] == query.shape[heads]:
        options.pop("enable_gqa")
    if options.get("dropout_p", 0.0) > 0.0 and len(cut.sizes) > 1:
        p.refuse(f"random numbers are not drawn for heads in unequal blocks ({cut.sizes})", "leave dropout out")
    return p.emit(F.scaled_dot_product_attention, query, key, value, attn_mask=mask, layout=cut, **options)


def _options(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in ("dropout_p", "is_causal", "scale", "enable_gqa") if name in given}


def _query(
    p: Program, query: Value, rest: tuple[Value, Value], mask: Value | None, cuts: list[Cut]
) -> tuple[Value, Cut]:
    """The queries' part, and the cut of the result: along heads, or along what comes before them."""
    cut = query.cut
    if cut is None:
        if query.kept:
            text = f"the heads of its queries cannot be cut into {p.parts}"
            p.refuse(text, f"leave {', '.join(sorted(query.kept)[:3])} whole, and what is cut by its heads")
        found = next((one for one in (*rest, mask) if one is not None and one.cut is not None), None)
        assert found is not None and found.cut is not None
        if found is not mask and found.shape[found.cut.dim] != query.shape[found.cut.dim]:
            p.refuse_cut("attention of whole queries", found)
        cut = found.cut.at(found.cut.dim + query.dim - found.dim)
        if cut.dim <= query.dim - 3 and query.shape[cut.dim] == cut.size:
            query = p.part(query, cut)
    if cut.dim > query.dim - 3:
        p.refuse_cut(
            "attention over queries, keys or widths", next(v for v in (query, *rest, mask) if v is not None and v.cut)
        )
    for one in cuts:
        if one.dim == cut.dim and one.size == cut.size and not one.like(cut):
            p.refuse(
                f"its inputs are cut in other blocks: {one.blocks[:6]} and {cut.blocks[:6]}", "cut them alike: blocks="
            )
    return query, cut


def _keys(p: Program, keys: Value, query: Value, cut: Cut, grouped: bool) -> Value:
    """The part of keys or values that a rank's queries look at."""
    if keys.cut is not None:
        if keys.cut.dim != cut.dim or (not keys.cut.like(cut) and not (grouped and keys.cut.plain and cut.plain)):
            p.refuse_cut(f"attention whose queries are {cut}", keys)
        return keys
    count, total = keys.shape[cut.dim], query.shape[cut.dim]
    if count == total or (grouped and cut.plain and count % p.parts == 0):
        return p.part(keys, cut if count == total else Cut(cut.dim, (count,)))
    if not grouped or not cut.plain:
        return p.entered(keys) if count == 1 else p.refuse_cut("attention with fewer heads of keys", query)
    return _own_heads(p, keys, cut.dim, total // p.parts, total // count)


def _own_heads(p: Program, keys: Value, dim: int, queries: int, share: int) -> Value:
    """Of whole keys with fewer heads than ranks: the one that all of a rank's queries share, or one for each query."""
    first = p.emit(torch.mul, p.rank(), queries, layout=WHOLE)
    places: Value
    if share % queries == 0:
        places = p.emit(
            "reshape", p.emit(torch.div, first, share, layout=WHOLE, rounding_mode="floor"), (1,), layout=WHOLE
        )
    else:
        heads = p.emit(torch.arange, queries, layout=WHOLE, device=keys.example.device)
        places = p.emit(
            torch.div, p.emit(torch.add, heads, first, layout=WHOLE), share, layout=WHOLE, rounding_mode="floor"
        )
    found: Value = p.emit(torch.index_select, p.entered(keys), dim, places, layout=WHOLE)
    return Value(found.node, Cut(dim, (found.shape[dim] * p.parts,)), _times(found.shape, dim, p.parts), keys.by)


def _times(shape: tuple[int, ...], dim: int, parts: int) -> tuple[int, ...]:
    return tuple(size * parts if d == dim else size for d, size in enumerate(shape))
