"""Random draws: every rank draws what the model draws and takes its part, so that a mesh changes no number of a training.

Whole values need nothing: all ranks have the same keys.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from wholestep.schedule.sharding.layout import WHOLE, Cut
from wholestep.schedule.sharding.program import Program
from wholestep.schedule.sharding.registry import rule
from wholestep.schedule.sharding.values import Called, Value


@rule("dropout", "feature_dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")
def dropout(p: Program, call: Called) -> Any:
    x = p.reduced(call.args[0])
    chance, training = call.get("p", 0.5), call.get("training", call.get("train", True))
    if x.cut is None:
        return p.again(call, WHOLE, p.reduced)
    if not training or chance == 0:
        return p.again(call, x.cut)
    if call.name != "dropout" or call.writes:
        p.refuse_cut(call.name if call.name != "dropout" else "dropout in place", x)
    return dropped(p, x, chance, x.cut)


def dropped(p: Program, x: Value, chance: float, cut: Cut) -> Value:
    """The arithmetic of ws::dropout, with this rank's part of the mask of the whole value."""
    if chance >= 1:
        return p.emit(torch.zeros_like, x, layout=cut) if not x.learns else p.emit(torch.mul, x, 0.0, layout=cut)
    ones = p.emit(torch.ones, x.shape, layout=WHOLE, dtype=x.example.dtype, device=x.example.device)
    mask = p.part(p.emit(F.dropout, ones, chance, True, layout=WHOLE), cut)
    kept = p.emit(torch.ne, mask, 0, layout=cut)
    scaled = p.emit(torch.mul, x, 1.0 / (1.0 - chance), layout=cut)
    return p.emit("masked_fill", scaled, p.emit(torch.logical_not, kept, layout=cut), 0.0, layout=cut)


@rule("rand_like", "randn_like")
def drawn_like(p: Program, call: Called) -> Any:
    x = call.args[0]
    make = torch.rand if call.name == "rand_like" else torch.randn
    dtype = call.kwargs.get("dtype") or x.example.dtype
    found = p.emit(make, x.shape, layout=WHOLE, dtype=dtype, device=x.example.device)
    return found if x.cut is None else p.part(found, x.cut)
