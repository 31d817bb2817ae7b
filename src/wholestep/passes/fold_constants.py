"""Computes now what is the same number at every step. In: any TrainingGraph. Out: chains of operators that read no input and
give one number everywhere (a loss's `ones_like` divided by a count, masks that are all true) become one `full`.

Only operators that IEEE 754 rounds exactly are computed ahead, so the bits are those the device would find. Values that are not
one number throughout (aranges, triangles) stay: written out they would be data in the graph, and making them costs next to nothing.

In a step on a GPU a number that the model keeps as a tensor on the CPU (`torch.sqrt(torch.tensor(64.0))`) is computed on the CPU
either way, so any elementwise operator may be; and who divides by it divides by the number. Inductor would otherwise compile C++
for it, and look for the CPU's vector instructions first: 50 s of DeBERTa's first step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from wholestep.graph.training_graph import TrainingGraph
from wholestep.graph.views import WHOLE_VIEWS
from wholestep.passes.fx_edit import Editor, is_static, tensor_of
from wholestep.passes.pipeline import compiler_pass

aten = torch.ops.aten

MOST_ELEMENTS = 1 << 16
"""Larger values are not computed while compiling."""

# fmt: off
_SOURCES = {aten.full.default, aten.ones.default, aten.zeros.default, aten.scalar_tensor.default, aten.arange.default,
            aten.arange.start, aten.arange.start_step}
_LIKE = {aten.ones_like.default, aten.zeros_like.default, aten.full_like.default, aten.new_ones.default,
         aten.new_zeros.default, aten.new_full.default}
"""They read the shape of their argument and never its values."""
_VIEWS = WHOLE_VIEWS | {aten.slice.Tensor, aten.select.int}
_EXACT = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.rsub.Scalar,
          aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar,
          aten.eq.Tensor, aten.eq.Scalar, aten.ne.Tensor, aten.ne.Scalar, aten.lt.Tensor, aten.lt.Scalar,
          aten.le.Tensor, aten.le.Scalar, aten.gt.Tensor, aten.gt.Scalar, aten.ge.Tensor, aten.ge.Scalar,
          aten.logical_not.default, aten.logical_and.default, aten.logical_or.default,
          aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_not.default,
          aten.where.self, aten.masked_fill.Scalar, aten.clone.default, aten._to_copy.default}
_BY_NUMBER = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
# fmt: on


@compiler_pass(numerics="bitwise")
def fold_constants(graph: TrainingGraph) -> TrainingGraph:
    """f(full(a), full(b)) => full(c)."""
    edit = Editor(graph)
    known: dict[fx.Node, torch.Tensor] = {}
    for node in list(graph.operations()):
        if graph.target.is_gpu:
            _take_number(edit, node, known)
        value = _computed(node, known, on_host=graph.target.is_gpu)
        if value is None:
            continue
        known[node] = value
        number = None if node.target in _VIEWS or node.target is aten.full.default else _number(node, value)
        if number is not None:
            like = tensor_of(node)
            assert like is not None
            options = {"dtype": like.dtype, "device": like.device}
            new = edit.insert(node, aten.full.default, (list(like.shape), number), options)
            known[new] = value
            edit.replace(node, new)
    return edit.finish()


def _take_number(edit: Editor, node: fx.Node, known: dict[fx.Node, torch.Tensor]) -> None:
    """x / scalar, a tensor of no dimension on the CPU, => x / number: the same kernel gets the same number."""
    if node.target not in _BY_NUMBER or len(node.args) < 2:
        return
    left, right = tensor_of(node.args[0]), tensor_of(node.args[1])
    if left is None or right is None or not _is_host_number(right) or left.dim() == 0 or not left.is_floating_point():
        return
    value = known.get(node.args[1])  # type: ignore[arg-type]
    if value is not None and not value.is_complex() and not bool(value.isnan()):
        node.update_arg(1, value.item())
        edit.changed += 1


def _is_host_number(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and tensor.device.type == "cpu"


def _computed(node: fx.Node, known: dict[fx.Node, torch.Tensor], *, on_host: bool = False) -> torch.Tensor | None:
    """The value of a node that reads no input, on the CPU; None when it does, is too large, or need not be exact."""
    like = tensor_of(node)
    if like is None or not is_static(like) or like.numel() > MOST_ELEMENTS:
        return None
    if node.target in _LIKE:
        return _filled(node, like)
    if node.target not in _SOURCES and node.target not in _VIEWS and node.target not in _EXACT:
        tags = getattr(node.target, "tags", ())
        drawn = torch.Tag.nondeterministic_seeded in tags
        if not on_host or not _is_host_number(like) or torch.Tag.pointwise not in tags or drawn:
            return None
    if any(source not in known for source in node.all_input_nodes):
        return None
    args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), lambda a: _plain(a, known))  # type: ignore[misc]
    try:
        value = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, TypeError):  # an operator the CPU has not: left to the device
        return None
    return value if value.shape == like.shape and value.dtype == like.dtype else None


def _filled(node: fx.Node, like: torch.Tensor) -> torch.Tensor | None:
    """What `ones_like` and its kin give: their argument's values do not matter, so it may be an input."""
    schema = node.target._schema.name  # type: ignore[union-attr]
    if schema.endswith("full_like"):
        number: Any = node.args[1]
    elif schema.endswith("new_full"):
        number = node.args[2]
    else:
        number = 1 if "ones" in schema else 0
    return None if isinstance(number, fx.Node) else torch.full(like.shape, number, dtype=like.dtype)


def _plain(argument: Any, known: dict[fx.Node, torch.Tensor]) -> Any:
    if isinstance(argument, fx.Node):
        return known[argument]
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _number(node: fx.Node, value: torch.Tensor) -> Any:
    """The one number a dense value consists of, or None; -0.0 and 0.0 are different numbers, NaN is none."""
    like = tensor_of(node)
    if value.numel() == 0 or like is None or like.is_complex() or not like.is_contiguous():
        return None
    first = value.reshape(-1)[0]
    if not bool((value == first).all()) or (value.is_floating_point() and not _same_sign(value)):
        return None
    number = first.item()
    return None if isinstance(number, float) and math.isnan(number) else number


def _same_sign(value: torch.Tensor) -> bool:
    signs = value.signbit()
    return bool(signs.all()) or not bool(signs.any())
