"""What compilers do with torch's operators where their kind does not tell."""

from __future__ import annotations

from wholestep.ops.record import record

# fmt: off
LIBRARY_CALLS = (
    "embedding_dense_backward", "index_put", "_unsafe_index_put", "scatter_add", "index_add", "sort", "topk", "cumsum",
    "max_pool2d_with_indices_backward", "_ctc_loss", "_ctc_loss_backward", "_unique2", "nonzero",
)
# fmt: on
"""Called as they are, with their operands and results in memory."""

record(*(f"aten::{name}" for name in LIBRARY_CALLS), fuses=False)
