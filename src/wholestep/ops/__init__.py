"""Operators of the library namespace `ws`: importing this package registers them.

Out: `IN_PLACE` (functional update overload -> Python function that updates parameters and states in place), `DECOMPOSITIONS`
(overload -> aten arithmetic that Inductor fuses), `IN_ORDER` (overload -> the same sum in an order that repeats itself) and
`UNCOMPILED` (overloads that no compiler may see). Importing touches no GPU and does not import Triton.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from wholestep.ops import (
    adamw,
    add_rows,
    attention,
    clip,
    ctc,
    draw,
    dropout,
    grouped_mm,
    linear_cross_entropy,
    packed_recurrent,
    random_bits,
    recurrent,
    require,
    scatter_shared,
    sgd,
    sparse_mm,
)
from wholestep.ops.attention import decomposition
from wholestep.ops.updates import UPDATES

IN_PLACE: dict[OpOverload, Callable[..., None]] = {update.operator: update.in_place for update in UPDATES.values()}

DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.ws.attention.default: decomposition.attention,
    torch.ops.ws.attention_backward.default: decomposition.attention_backward,
    torch.ops.ws.dropout.default: dropout.reference,
    torch.ops.ws.uniform.default: random_bits.uniform,
    torch.ops.ws.normal.default: random_bits.normal,
}

IN_ORDER: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten.index_put.default: add_rows.index_put,
    torch.ops.aten._unsafe_index_put.default: add_rows.index_put,
    torch.ops.aten._unsafe_masked_index_put_accumulate.default: add_rows.masked_index_put,
    torch.ops.aten.put.default: add_rows.put,
}
"""Called in place of the operator, compiled or not; it returns NotImplemented for calls that need no order (add_rows.py)."""

UNCOMPILED: frozenset[OpOverload] = frozenset({
    torch.ops.ws.recurrent.default, torch.ops.ws.recurrent_backward.default,
    torch.ops.ws.grouped_mm.default, torch.ops.ws.grouped_mm_backward.default, torch.ops.ws.ctc.default,
    torch.ops.ws.draw.default, torch.ops.ws.require.default, torch.ops.ws.sparse_mm.default,
    torch.ops.ws.packed_recurrent.default, torch.ops.ws.packed_recurrent_backward.default,
})  # fmt: skip
"""The sizes of some results are known only to cuDNN, and Inductor would check them against the guess; or a value is read."""

__all__ = [
    "DECOMPOSITIONS", "IN_ORDER", "IN_PLACE", "UNCOMPILED", "adamw", "add_rows", "attention", "clip", "ctc", "draw", "dropout",
    "grouped_mm", "linear_cross_entropy", "packed_recurrent", "random_bits", "recurrent", "require", "scatter_shared", "sgd",
    "sparse_mm",
]  # fmt: skip
