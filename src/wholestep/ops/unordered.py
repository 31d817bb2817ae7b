"""Which operators may give other last bits when an equal step is run again, by the device they run on.

They add what many threads bring in the order in which it comes. The names are from torch's list under
`torch.use_deterministic_algorithms`, and those of `COMPILED` from what Inductor makes of operators that repeat themselves as
torch runs them: atomic additions. Operators of this package are listed for the library kernels below them. On the CPU none
is left: what would be there is in `IN_ORDER` (add_rows.py).
"""

from __future__ import annotations

from torch import fx

from wholestep.graph.training_graph import tensors_in

# fmt: off
UNORDERED: dict[str, frozenset[str]] = {
    "cuda": frozenset({
        # cuDNN, and attention kernels
        "convolution_backward", "attention_backward", "recurrent", "recurrent_backward", "packed_recurrent",
        "packed_recurrent_backward", "sparse_mm",
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
    }),
}
COMPILED: dict[str, frozenset[str]] = {
    "cuda": frozenset({"embedding_dense_backward", "index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate"}),
}
# fmt: on


def is_unordered(node: fx.Node, device: str, *, compiled: bool) -> bool:
    """Whether the operator may round otherwise in an equal run on this device; `compiled` by Inductor, or run as it is."""
    schema = getattr(node.target, "_schema", None)
    rounds = any(tensor.is_floating_point() for tensor in tensors_in(node.meta.get("val")))  # whole numbers are exact
    if schema is None or not rounds:
        return False
    name = schema.name.partition("::")[2]
    if name in ("index_put", "_unsafe_index_put", "put"):
        accumulate = node.kwargs.get("accumulate", node.args[3] if len(node.args) > 3 else False)
        if not accumulate:
            return False
    return name in UNORDERED.get(device, ()) or (compiled and name in COMPILED.get(device, ()))
