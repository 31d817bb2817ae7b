"""A convolution whose windows do not overlap is a product: `convolution(x, w)` with strides equal to its kernel, as vision models
cut pictures into patches.

In: x (B, C, h kh, w kw), weight (O, C, kh, kw). Out: rows (B h w, C kh kw), one copy of x, times the weight as a matrix; the
gradients are products too. The result lies in memory as (B, h, w, O), the order in which what follows reads patches (tokens), so
that nothing is transposed; its new strides are handed on as `channels_last` hands on its own.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from wholestep.graph.copies import copy_graph
from wholestep.graph.training_graph import TrainingGraph
from wholestep.passes.channels_last import GivenUp, Relayout
from wholestep.passes.fx_edit import Editor, has_static_sizes, is_static, tensor_of
from wholestep.passes.pipeline import compiler_pass

aten = torch.ops.aten

_DENSE = {"memory_format": torch.contiguous_format}


@compiler_pass(numerics="rounding")
def patch_products(graph: TrainingGraph, *, force: bool = False) -> TrainingGraph:
    """convolution(x, w), stride = kernel => patches(x) @ w.

    Args:
        force: on every device and in every precision; otherwise on a GPU, where tensor cores take both.
    """
    names = {
        n.name for n in graph.operations() if _cuts_patches(n) and (force or (graph.target.is_gpu and _is_narrow(n)))
    }
    if not names or not has_static_sizes(graph):
        return graph
    copy = copy_graph(graph)
    editor, before = Editor(copy), {}
    for node in [node for node in copy.operations() if node.name in names]:
        if node.target is aten.convolution.default:
            made = _forward(editor, node)
            before[made] = node.meta["val"]
            editor.replace(node, made)
        else:
            _backward(editor, node, before)
    editor.finish()
    relayout = Relayout(copy, set(), plain_follows=True)
    relayout.captured.update({node: value for node, value in before.items() if node in relayout.captured})
    try:
        relayout.run()
    except GivenUp as error:
        graph.notes.append(f"patches are convolved: {error}")
        return graph
    return relayout.graph


def _operands(node: fx.Node) -> tuple[Any, Any]:
    """(image, weight)"""
    return (node.args[0], node.args[1]) if node.target is aten.convolution.default else (node.args[1], node.args[2])


def _cuts_patches(node: fx.Node) -> bool:
    if node.target is aten.convolution.default:
        stride, padding, dilation, transposed, _, groups = node.args[3:9]
    elif node.target is aten.convolution_backward.default:
        stride, padding, dilation, transposed, _, groups = node.args[4:10]
    else:
        return False
    x, weight = map(tensor_of, _operands(node))
    if x is None or weight is None or x.dim() != 4 or not is_static(x) or not is_static(weight) or x.numel() == 0:
        return False
    kernel = list(weight.shape[2:])
    plain = not transposed and groups == 1 and not any(padding) and all(d == 1 for d in dilation)  # type: ignore[union-attr,arg-type]
    covered = all(size % k == 0 for size, k in zip(x.shape[2:], kernel, strict=True))
    return plain and covered and list(stride) == kernel and kernel != [1, 1]  # type: ignore[arg-type]


def _is_narrow(node: fx.Node) -> bool:
    """Wide types convolve on tensor cores where torch allows it, but multiply there only if it is told to."""
    x = tensor_of(_operands(node)[0])
    return x is not None and x.dtype in (torch.bfloat16, torch.float16)


def _sizes(node: fx.Node) -> tuple[int, int, int, int, int, int, int]:
    """B, C, h, w, O, kh, kw"""
    x, weight = (tensor_of(value) for value in _operands(node))
    assert x is not None and weight is not None
    out, channels, kh, kw = weight.shape
    return x.shape[0], channels, x.shape[2] // kh, x.shape[3] // kw, out, kh, kw


def _rows(editor: Editor, node: fx.Node) -> fx.Node:
    b, c, h, w, _, kh, kw = _sizes(node)
    split = editor.compute(node, aten.view.default, _operands(node)[0], [b, c, h, kh, w, kw])
    turned = editor.compute(node, aten.permute.default, split, [0, 2, 4, 1, 3, 5])
    copied = editor.compute(node, aten.clone.default, turned, **_DENSE)
    return editor.compute(node, aten.view.default, copied, [b * h * w, c * kh * kw])


def _matrix(editor: Editor, node: fx.Node) -> fx.Node:
    """The weight (O, C kh kw)."""
    _, c, _, _, o, kh, kw = _sizes(node)
    return editor.compute(node, aten.reshape.default, _operands(node)[1], [o, c * kh * kw])


def _forward(editor: Editor, node: fx.Node) -> fx.Node:
    b, _, h, w, o, _, _ = _sizes(node)
    rows = _rows(editor, node)
    matrix = editor.compute(node, aten.permute.default, _matrix(editor, node), [1, 0])
    if node.args[2] is None:
        product = editor.compute(node, aten.mm.default, rows, matrix)
    else:
        product = editor.compute(node, aten.addmm.default, node.args[2], rows, matrix)
    tokens = editor.compute(node, aten.view.default, product, [b, h, w, o])
    return editor.compute(node, aten.permute.default, tokens, [0, 3, 1, 2])


def _backward(editor: Editor, node: fx.Node, before: dict[fx.Node, Any]) -> None:
    b, c, h, w, o, kh, kw = _sizes(node)
    tokens = editor.compute(node, aten.permute.default, node.args[0], [0, 2, 3, 1])
    given = editor.compute(node, aten.reshape.default, tokens, [b * h * w, o])
    for part in list(node.users):
        assert part.target is operator.getitem
        if part.args[1] == 0:
            spread = editor.compute(part, aten.mm.default, given, _matrix(editor, node))
            split = editor.compute(part, aten.view.default, spread, [b, h, w, c, kh, kw])
            turned = editor.compute(part, aten.permute.default, split, [0, 3, 1, 4, 2, 5])
            copied = editor.compute(part, aten.clone.default, turned, **_DENSE)
            made = editor.compute(part, aten.view.default, copied, [b, c, h * kh, w * kw])
        elif part.args[1] == 1:
            columns = editor.compute(part, aten.permute.default, given, [1, 0])
            product = editor.compute(part, aten.mm.default, columns, _rows(editor, node))
            made = editor.compute(part, aten.view.default, product, [o, c, kh, kw])
        else:
            made = editor.compute(part, aten.sum.dim_IntList, given, [0])
        before[made] = part.meta["val"]
        editor.replace(part, made)
