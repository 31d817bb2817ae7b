"""A bias that repeats itself along the batch is given to attention once: `ws::biased_attention` with fewer tables.

In: bias = table (1, H, T, S) + mask, where the mask of W windows was copied for every picture of the batch (shifted windows).
Out: the bias of W windows; its gradient comes summed over the pictures. Otherwise a square of scores per window and head is
written, read three times and summed, for nothing.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from wholestep.graph.training_graph import TrainingGraph
from wholestep.passes.fx_edit import Editor, is_static, tensor_of
from wholestep.passes.pipeline import compiler_pass

aten, ws = torch.ops.aten, torch.ops.ws

_COPIES = (aten.clone.default, aten._unsafe_view.default, aten.view.default, aten.reshape.default)


@compiler_pass(numerics="rounding")
def share_bias(graph: TrainingGraph) -> TrainingGraph:
    """biased_attention(.., table + repeated mask) => biased_attention(.., table + mask)."""
    editor = Editor(graph)
    for node in list(graph.operations()):
        if node.target is ws.biased_attention.default:
            _share(editor, node)
    return editor.finish()


def _share(editor: Editor, forward: fx.Node) -> None:
    bias = forward.args[3]
    value = tensor_of(bias)
    if value is None or not is_static(value) or value.shape[0] == 1:
        return
    assert isinstance(bias, fx.Node)
    period = _period(bias)
    backwards = [n for n in bias.users if n.target is ws.biased_attention_backward.default and n.args[5] is bias]
    if period == value.shape[0] or not all(_summed_over_the_batch(n) for n in backwards):
        return
    small = _shrunk(editor, forward, bias, period)
    forward.replace_input_with(bias, small)
    for backward in backwards:
        backward.replace_input_with(bias, small)
        grads = backward.meta["val"]
        backward.meta["val"] = (*grads[:3], grads[3].new_empty(small.meta["val"].shape))
        for node in backward.users:
            if node.args[1] == 3:
                node.meta["val"] = backward.meta["val"][3]
    editor.changed += 1


def _summed_over_the_batch(backward: fx.Node) -> bool:
    """Whether the bias's gradient is read by nothing but sums over its first dimension."""
    grads = [n for n in backward.users if n.target is operator.getitem and n.args[1] == 3]
    sums = [user for grad in grads for user in grad.users]
    return all(user.target is aten.sum.dim_IntList and list(user.args[1]) == [0] for user in sums)  # type: ignore[arg-type]


def _period(node: fx.Node) -> int:
    """After how many entries of its first dimension a value repeats itself; its length where that is not known."""
    value = tensor_of(node)
    assert value is not None
    length = value.shape[0]
    if length == 1:
        return 1
    if node.target is aten.add.Tensor and not node.kwargs and all(isinstance(a, fx.Node) for a in node.args):
        periods = {_period(a) if _rank(a) == value.dim() else 1 for a in node.args}  # type: ignore[arg-type]
        return max(periods) if len(periods - {1}) <= 1 else length
    source = _repeated(node)
    return length if source is None else source.meta["val"].shape[1]


def _repeated(node: fx.Node) -> fx.Node | None:
    """m, where the node is expand(m, (R, W, ...)) made (R * W, ...), m (1, W, ...)."""
    shape = node.meta["val"].shape
    while node.target in _COPIES:
        node = node.args[0]  # type: ignore[assignment]
    if node.target is not aten.expand.default:
        return None
    expanded, source = node.meta["val"], node.args[0]
    before = source.meta["val"]  # type: ignore[union-attr]
    if (
        before.dim() != expanded.dim()
        or before.dim() < 2
        or before.shape[0] != 1
        or before.shape[1:] != expanded.shape[1:]
    ):
        return None
    merged = expanded.shape[0] * expanded.shape[1] == shape[0] and expanded.shape[2:].numel() == shape[1:].numel()
    return source if merged and all(type(size) is int for size in expanded.shape) else None  # type: ignore[return-value]


def _rank(node: object) -> int:
    value = tensor_of(node)
    return 0 if value is None else value.dim()


def _shrunk(editor: Editor, before: fx.Node, node: fx.Node, period: int) -> fx.Node:
    """The first `period` entries of a value that repeats itself, made from what it is made of."""
    value = node.meta["val"]
    if value.shape[0] == 1 or value.shape[0] == period:
        return node
    if node.target is aten.add.Tensor:
        parts = [_shrunk(editor, before, a, period) if _rank(a) == value.dim() else a for a in node.args]  # type: ignore[arg-type]
        return editor.compute(before, aten.add.Tensor, *parts)
    source = _repeated(node)
    assert source is not None
    return editor.compute(before, aten.reshape.default, source, [period, *value.shape[1:]])
