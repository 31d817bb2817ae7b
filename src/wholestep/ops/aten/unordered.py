"""Operators of torch's that may give other last bits when an equal step is run again.

They add what many threads bring in the order in which it comes. The names are from torch's list under
`torch.use_deterministic_algorithms`, and those of `COMPILED` from what Inductor makes of operators that repeat themselves as
torch runs them: atomic additions. On the CPU none is left: what would be there has an order of its own (`in_order`, add_rows.py).
"""

from __future__ import annotations

from wholestep.ops.record import record

CUDA = frozenset({"cuda"})
# fmt: off
UNORDERED = (
    "convolution_backward",
    # sums into places that an index names
    "scatter_add", "scatter_reduce", "index_add", "index_reduce", "put", "histc", "bincount", "_embedding_bag_dense_backward",
    # gradients of windows that overlap
    "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", "avg_pool3d_backward",
    "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward",
    "fractional_max_pool2d_backward", "fractional_max_pool3d_backward",
    "upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward",
    "upsample_trilinear3d_backward",
    "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
    "replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward",
    "grid_sampler_2d_backward", "grid_sampler_3d_backward",
    # losses and scans
    "nll_loss2d_forward", "nll_loss2d_backward", "_ctc_loss_backward", "cumsum",
)
COMPILED = ("embedding_dense_backward", "index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate")
# fmt: on

record(*(f"aten::{name}" for name in UNORDERED), unordered=CUDA)
record(*(f"aten::{name}" for name in COMPILED), unordered_compiled=CUDA)
