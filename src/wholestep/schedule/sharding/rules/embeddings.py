"""Embeddings: cut along the width, or along the vocabulary, where every rank knows its ids and gives zeros for others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from wholestep.schedule.sharding.layout import PARTIAL, WHOLE, Cut
from wholestep.schedule.sharding.program import Program
from wholestep.schedule.sharding.registry import rule
from wholestep.schedule.sharding.values import Called, Value


@rule("embedding")
def embedding(p: Program, call: Called) -> Any:
    ids, weight = call.first, call.get("weight")
    if call.get("max_norm") is not None or call.get("scale_grad_by_freq") or call.get("sparse"):
        p.refuse_cut("embedding with max_norm, scale_grad_by_freq or sparse", weight)
    weight = p.reduced(weight)
    padding = call.get("padding_idx")
    if not ids.is_whole:
        if ids.cut is None or not weight.is_whole:
            p.refuse_cut("embedding", ids)
        return p.emit(F.embedding, ids, p.entered(weight), padding, layout=ids.cut)
    if weight.cut is None:
        return p.emit(F.embedding, ids, weight, padding, layout=WHOLE)
    if weight.cut.dim == 1:
        return p.emit(F.embedding, ids, weight, padding, layout=weight.cut.at(ids.dim))
    own, place = own_places(p, ids, weight.cut)
    rows = p.emit(F.embedding, place, weight, layout=PARTIAL)
    if padding is not None:  # that row learns nothing, on the rank that has it
        padded = p.emit(torch.eq, ids, padding % weight.shape[0], layout=WHOLE)
        fixed = p.emit("detach", rows, layout=PARTIAL)
        rows = p.emit(torch.where, p.emit("unsqueeze", padded, -1, layout=WHOLE), fixed, rows, layout=PARTIAL)
    other = p.emit(torch.logical_not, p.emit("unsqueeze", own, -1, layout=WHOLE), layout=WHOLE)
    return p.emit("masked_fill", rows, other, 0.0, layout=PARTIAL)


def own_places(p: Program, ids: Value, cut: Cut) -> tuple[Value, Value]:
    """(whether this rank has an id, its place there; 0 for ids of other ranks). An id that no rank has stays out of range, so that
    reading it fails as it does without a mesh."""
    if not cut.plain:
        p.refuse(f"ids are looked up in a dimension that is {cut}", "cut it in one block")
    count = cut.size // p.parts
    first = p.emit(torch.mul, p.rank(), count, layout=WHOLE)
    place = p.emit(torch.sub, ids, first, layout=WHOLE)
    within = lambda x, size: p.emit(  # noqa: E731
        torch.logical_and, p.emit(torch.ge, x, 0, layout=WHOLE), p.emit(torch.lt, x, size, layout=WHOLE), layout=WHOLE
    )
    own = within(place, count)
    others = p.emit(
        torch.logical_and, p.emit(torch.logical_not, own, layout=WHOLE), within(ids, cut.size), layout=WHOLE
    )
    return own, p.emit("masked_fill", place, others, 0, layout=WHOLE)
