"""Operators that only move, copy, cast, fill or choose values: no FLOPs. Their cost is their traffic.

Views need no row: their schemas say that they are views, and they move nothing either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from wholestep.ops.record import flops_of, record

# fmt: off
MOVEMENT = (
    # copies and casts
    "clone", "_to_copy", "copy", "contiguous", "lift_fresh_copy", "lift_fresh", "to", "_conj_physical",
    "resolve_conj", "view_as_real_copy",
    # shapes that need a copy
    "cat", "stack", "repeat", "tile", "flip", "roll", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d",
    "replication_pad1d",
    "replication_pad2d", "repeat_interleave", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "im2col",
    "_pack_padded_sequence",
    "_pad_packed_sequence", "tril", "triu", "diag_embed", "_reshape_copy", "unfold_copy", "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d", "_pad_enum", "narrow_copy", "expand_copy", "permute_copy", "transpose_copy", "slice_copy",
    "select_copy",
    # fills
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "full", "full_like", "new_full",
    "zeros", "zeros_like",
    "new_zeros", "ones", "ones_like", "new_ones", "zero", "fill", "scalar_tensor", "arange", "linspace", "eye",
    "tril_indices",
    "triu_indices", "_efficientzerotensor", "_nested_tensor_from_mask",
    # reads and writes at indices
    "embedding", "index", "_unsafe_index", "index_select", "gather", "take", "take_along_dim", "masked_select",
    "nonzero", "nonzero_static",
    "scatter", "masked_scatter", "masked_scatter_backward", "index_copy", "index_fill", "slice_scatter",
    "select_scatter", "as_strided_scatter",
    "diagonal_scatter", "slice_backward", "select_backward", "diagonal_backward", "unfold_backward",
    "_local_scalar_dense", "item",
    "_unsafe_masked_index", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "_assert_async",
    "_assert_scalar", "one_hot",
)
# fmt: on

for _name in MOVEMENT:
    flops_of(f"aten::{_name}", kind="movement")(lambda _: 0)


def _zeros(size: Sequence[int], **options: Any) -> torch.Tensor:
    """Forward-mode derivatives make zeros without memory, which Inductor takes for a buffer of its own and writes to."""
    return torch.zeros(size, **options)


record("aten::_efficientzerotensor", decomposition=_zeros)
