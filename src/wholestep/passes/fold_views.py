"""Drops operators that hand on their argument. In: any TrainingGraph. Out: one with shorter chains of views, and without
copies, multiplications by one and dropouts that drop nothing.

A chain of views is the identity, or one `view`, when it picks the same elements in the same order *and* gives the same strides.
The first is worked out on a stand-in that lies dense in memory, because announced strides prove nothing: a kernel may return
others, and torch's tensors without data let `view` merge dimensions around one of size 1 that do not lie beside each other. The
second keeps the layout, and with it the bits of what reads it. Lowering calls `view` as `reshape`.

Bitwise: x * 1, x / 1 and x - 0 keep every bit; x - -0.0 and x + 0 do not (-0 + 0 is +0), and the last is dropped for integers only.
Of complex numbers none does: a factor of 1 is 1 + 0i, and makes NaN of what is infinite.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from wholestep import compat
from wholestep.graph.training_graph import TrainingGraph
from wholestep.graph.views import WHOLE_VIEWS, declares_view
from wholestep.passes.fx_edit import Editor, is_static, same_kind, same_sizes, tensor_of
from wholestep.passes.pipeline import compiler_pass

aten = torch.ops.aten
ws = torch.ops.ws

_VIEWS = WHOLE_VIEWS | {aten.slice.Tensor, aten.alias.default, aten.detach.default}
_LONGEST_CHAIN = 8


@compiler_pass(numerics="bitwise")
def fold_views(graph: TrainingGraph) -> TrainingGraph:
    """view(view(x)) => view(x) or x; clone(x), x * 1, x / 1, x - 0, dropout(x, 0) => x."""
    edit = Editor(graph)
    for node in list(graph.operations()):
        if node.target in _VIEWS:
            _fold_chain(edit, node)
        elif _hands_on(node):
            edit.replace(node, node.args[0])  # type: ignore[arg-type]
    return edit.finish()


def _fold_chain(edit: Editor, node: fx.Node) -> None:
    """Read the farthest ancestor from which this value is nothing, or one view, away."""
    after = tensor_of(node)
    ancestors = _ancestors(node)
    if after is None or not ancestors or any(free_unbacked_symbols(tensor_of(n)) for n in (node, *ancestors)):
        return  # a size that only the data tells has no number to try it with
    # A module's output that only views read could leave the graph, and blame could not look at it any more.
    reachable = [source for source in reversed(ancestors) if not _crosses_boundary(edit, node, source)]
    for source in reachable:
        before = tensor_of(source)
        if (
            before is not None
            and same_kind(before, after)
            and _same_offset(before, after)
            and _keeps_order(source, node)
        ):
            edit.replace(node, source)
            return
    for source in reachable[:-1]:
        shape = _one_view(source, after)
        if shape is not None and _keeps_order(source, node):
            new = edit.insert(node, aten.view.default, (source, shape))
            edit.replace(node, new)
            return


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """What this view looks at, through other views, nearest first."""
    found: list[fx.Node] = []
    while node.target in _VIEWS and isinstance(node.args[0], fx.Node) and len(found) < _LONGEST_CHAIN:
        node = node.args[0]
        found.append(node)
    return found


def _crosses_boundary(edit: Editor, node: fx.Node, source: fx.Node) -> bool:
    """Whether between `source` and `node` there is a module's output that nothing but views keeps in the graph."""
    while node is not source:
        parent = node.args[0]
        assert isinstance(parent, fx.Node)
        if parent is not source and parent.name in edit.boundary_names:
            if all(user.target in _VIEWS for user in parent.users):
                return True
        node = parent
    return False


def _one_view(source: fx.Node, after: torch.Tensor) -> list[int] | None:
    """The shape with which one `view` of `source` is `after`; None when no view is."""
    before = tensor_of(source)
    if before is None or not (is_static(before) and is_static(after)) or before.numel() != after.numel():
        return None
    try:
        viewed = torch.empty_strided(before.shape, before.stride(), dtype=before.dtype, device="meta").view(after.shape)
    except RuntimeError:
        return None
    same = viewed.stride() == after.stride() and _same_offset(before, after)
    return list(after.shape) if same else None


def _keeps_order(source: fx.Node, node: fx.Node) -> bool:
    """Whether the views from `source` to `node` hand on all its elements in their order; with symbolic sizes, at those traced."""
    chain = [node, *_ancestors(node)]
    chain = chain[: chain.index(source)]
    value = tensor_of(source)
    assert value is not None
    seen = torch.empty(_traced(value.shape), dtype=value.dtype, device="meta")
    whole = seen.numel()
    for view in reversed(chain):
        after = tensor_of(view)
        assert after is not None and callable(view.target)
        try:
            if view.target in (aten.view.default, aten._unsafe_view.default):
                seen = seen.view(_traced(after.shape))
            else:
                seen = view.target(seen, *fx.map_arg(_traced(view.args[1:]), _traced_node), **view.kwargs)
        except RuntimeError:  # it copies
            return False
    return seen.is_contiguous() and seen.storage_offset() == 0 and seen.numel() == whole


def _traced(sizes: Any) -> Any:
    """Symbolic sizes as the numbers they were traced with."""
    return fx.node.map_aggregate(tuple(sizes), lambda s: compat.traced_size(s) if isinstance(s, torch.SymInt) else s)  # type: ignore[arg-type,return-value]


def _traced_node(node: fx.Node) -> Any:
    return _traced((node.meta["val"],))[0]


def _same_offset(a: torch.Tensor, b: torch.Tensor) -> bool:
    return same_sizes([a.storage_offset()], [b.storage_offset()])


def _hands_on(node: fx.Node) -> bool:
    """Whether the node returns its first argument, bit for bit and in the same layout."""
    before, after = tensor_of(node.args[0] if node.args else None), tensor_of(node)
    if before is None or after is None or not same_kind(before, after):
        return False
    if node.target is aten.clone.default:
        return not _part_of_more(node.args[0])
    if node.target is ws.dropout.default:
        return node.args[1] == 0.0 and not _part_of_more(node.args[0])
    number = node.args[1] if len(node.args) > 1 else None
    if isinstance(number, fx.Node | bool) or node.kwargs or after.is_complex():
        return False
    if node.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        return number == 1 and after.dtype != torch.bool
    if node.target in (aten.sub.Tensor, aten.sub.Scalar):
        return number == 0 and math.copysign(1.0, number) > 0  # type: ignore[arg-type]
    return node.target in (aten.add.Tensor, aten.add.Scalar) and number == 0 and not after.dtype.is_floating_point


def _part_of_more(source: Any) -> bool:
    """Whether the value looks at a larger one: a copy of it lets the larger one die, and must stay."""
    size = tensor_of(source)
    while isinstance(source, fx.Node) and (source.target in _VIEWS or source.target is operator.getitem):
        # not `shares_memory`: copies of parts that `unsafe_split` makes (gates of recurrent cells) go, and always went
        if source.target is operator.getitem and not declares_view(getattr(source.args[0], "target", None)):
            return False
        source = source.args[0]
        whole = tensor_of(source)
        if whole is not None and size is not None and not same_sizes([whole.numel()], [size.numel()]):
            return True
        if whole is None:
            return True
    return False
