"""The launch that the Triton bodies of updates share. Import only where Triton exists.

In: a kernel (table, chunk_tensor, chunk_start, sizes, hyper, scale, num_tensors, constants). Out: one launch per dtype group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from wholestep.ops import multi_tensor
from wholestep.ops.triton_types import triton_dtype


def launch_update(
    kernel: Any,
    params: list[Tensor],
    grads: list[Tensor],
    states: list[list[Tensor]],
    hyper: Tensor,
    scale: Tensor | None,
    *,
    state_types: Sequence[str],
    **flags: bool,
) -> None:
    """`state_types`: the constants that hold the dtypes of the states; those of a state that is not kept are never read."""
    for group in multi_tensor.launches(params, grads, states):
        types = [triton_dtype(d) for d in group.dtypes]
        kept = types[2:] + types[-1:] * (len(state_types) - len(states))
        kernel[(group.chunks.num_chunks,)](
            group.table,
            group.chunks.tensor,
            group.chunks.start,
            group.chunks.size,
            hyper,
            hyper if scale is None else scale,
            len(group.rows[0]),
            PARAM=types[0],
            GRAD=types[1],
            **dict(zip(state_types, kept, strict=True)),
            MATH=tl.float64 if group.dtypes[0] == torch.float64 else tl.float32,
            HAS_SCALE=scale is not None,
            ALIGNED=group.aligned,
            BLOCK=multi_tensor.BLOCK,
            **flags,
        )
        multi_tensor.copy_back(group)
