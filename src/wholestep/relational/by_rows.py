"""Which operators work row by row, rows in dimension 0: such a one computes the same in any index space.

In: a traced node, and which of its operands have rows. Out: whether it may be run on the rows of a smaller space. An operator that
is not known here is not taken for one.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
VIEWS = RESHAPES | {
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.expand.default, aten.permute.default,
    aten.transpose.int, aten.t.default, aten.slice.Tensor, aten.select.int, aten.alias.default, aten.detach.default,
    aten.diagonal.default, aten.unfold.default, aten.view_as_complex.default, aten.view_as_real.default,
}  # fmt: skip
CONSTANTS = {
    aten.zeros.default: 0, aten.ones.default: 0, aten.full.default: 0,
    aten.new_zeros.default: 1, aten.new_ones.default: 1, aten.new_full.default: 1, aten.expand.default: 1,
}  # fmt: skip
"""The same for every edge where their size says edges first; which argument is the size."""
_LIKE = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
_ALONG = {
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim, aten.argmax.default,
    aten.argmin.default, aten.prod.dim_int, aten.any.dim, aten.any.dims, aten.all.dim, aten.all.dims, aten.logsumexp.default,
    aten.std.correction, aten.var.correction, aten.var_mean.correction, aten.std_mean.correction, aten.linalg_vector_norm.default,
    aten._softmax.default, aten._log_softmax.default, aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default,
    aten.sort.default, aten.sort.stable, aten.topk.default, aten.median.dim, aten.flip.default, aten.roll.default, aten.glu.default,
    aten.cat.default, aten.stack.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.gather.default,
    aten.index_select.default, aten.linalg_cross.default, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype,
    aten.select_scatter.default, aten.slice_scatter.default, aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default,
}  # fmt: skip
"""Along a dimension that they are told, which has to be another one."""
_LAST_DIMS = {aten.native_layer_norm.default, aten._fused_rms_norm.default}
_OTHERS = {
    aten.mm.default, aten.addmm.default, aten.mv.default, aten.bmm.default, aten._to_copy.default, aten.repeat.default,
    aten.convolution.default, operator.getitem,
}  # fmt: skip
"""Whose result says enough: it has rows in dimension 0, and no other dimension of their number."""


_LAST_TWO = {aten.triu.default, aten.tril.default}
_UNTAGGED = {
    aten.leaky_relu.default, aten.floor_divide.default, aten.floor_divide.Scalar, aten.complex.default, aten.polar.default,
    aten._prelu_kernel.default, aten.fill.Tensor, aten.copy.default,
}  # fmt: skip
"""Pointwise, though not every torch says so."""


def draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def has_rows(value: Any, edges: int) -> bool:
    """Rows in dimension 0, and in no other."""
    return (
        isinstance(value, Tensor)
        and value.dim() > 0
        and value.shape[0] == edges
        and not counted(value.shape[1:], edges)
    )


def counted(sizes: Any, edges: int) -> bool:
    """Whether a size is a multiple of the number of edges."""
    return any(size and size % edges == 0 for size in sizes)


def works_by_rows(node: fx.Node, rowed: set[fx.Node], edges: int) -> bool:
    results = [t for t in _each(node.meta["val"]) if t is not None]
    operands = [t for n in node.all_input_nodes if n in rowed for t in _each(n.meta["val"])]
    if not results or not all(has_rows(t, edges) for t in [*results, *operands] if t is not None):
        return False
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _UNTAGGED:
        return all(t.dim() == results[0].dim() for t in operands)
    if node.target in _ALONG:
        return _along_others(node)
    if node.target in _LAST_DIMS:
        return len(node.args[1]) < node.args[0].meta["val"].dim()  # type: ignore[arg-type,union-attr]
    if node.target is aten.bucketize.Tensor:  # by limits that all edges share
        return node.args[1] not in rowed
    if node.target in _LAST_TWO:
        return results[0].dim() > 2  # type: ignore[no-any-return]
    if node.target is aten.constant_pad_nd.default:  # two numbers per dimension, from the last
        return len(node.args[1]) < 2 * results[0].dim()  # type: ignore[arg-type]
    return node.target in VIEWS | _LIKE | _OTHERS or draws(node)


def _each(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def argument(node: fx.Node, *names: str) -> Any:
    """An argument by name, given or not."""
    for place, declared in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if declared.name in names:
            default = declared.default_value if declared.has_default_value() else None
            return node.args[place] if place < len(node.args) else node.kwargs.get(declared.name, default)
    return None


def _along_others(node: fx.Node) -> bool:
    told = argument(node, "dim", "dims")
    dims = told if isinstance(told, list | tuple) else [told]
    first = node.all_input_nodes[0].meta["val"]
    count = first.dim() + (node.target is aten.stack.default)
    return bool(dims) and all(isinstance(dim, int) and dim % count != 0 for dim in dims)
