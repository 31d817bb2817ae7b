"""A chunked loss and its backward become one operator, so that every chunk of logits is made once.

In: a graph with `ws::linear_cross_entropy` and its backward. Out: `ws::linear_cross_entropy_and_gradients` where the forward
one was, with the gradient of the loss computed before it. That needs a gradient that does not depend on the loss's value: the
1 that autograd starts from, times whatever the user scales the loss by. Three matrix products remain of four.

Bitwise: the fused operator runs the same code on the same chunks, and the backward read the lse that the forward computed.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

import wholestep.ops  # noqa: F401  registers the operators named below
from wholestep.graph.training_graph import TrainingGraph
from wholestep.passes.pipeline import compiler_pass

aten = torch.ops.aten
ws = torch.ops.ws

_FORWARD = ws.linear_cross_entropy.default
_BACKWARD = ws.linear_cross_entropy_backward.default
_FUSED = ws.linear_cross_entropy_and_gradients.default
_SAME_ARGUMENTS = 4
"""x, weight, bias, target: first in the forward, after the gradient in the backward; lse follows them there."""
_ONLY_SHAPE = {aten.ones_like.default: 1.0, aten.zeros_like.default: 0.0}
"""Operators that lend the shape of their argument, and the number they fill it with."""


@compiler_pass(numerics="bitwise")
def fuse_loss(graph: TrainingGraph) -> TrainingGraph:
    """linear_cross_entropy(...) and linear_cross_entropy_backward(grad, ...) => linear_cross_entropy_and_gradients(grad, ...)."""
    changed = False
    for node in list(graph.operations()):
        if node.target is _FORWARD:
            backward = _its_backward(node)
            if backward is not None and _move_gradient(graph, node, backward.args[0]):
                _fuse(graph, node, backward)
                changed = True
    if changed:
        graph.module.recompile()
    return graph


def _its_backward(forward: fx.Node) -> fx.Node | None:
    """The one backward of this forward, when nothing else reads the lse."""
    readers = [user for part in forward.users if _is_part(part, 1) for user in part.users]
    if len(readers) != 1 or readers[0].target is not _BACKWARD or not all(_is_part(u, 0, 1) for u in forward.users):
        return None
    backward = readers[0]
    same = tuple(backward.args[1 : 1 + _SAME_ARGUMENTS]) == tuple(forward.args[:_SAME_ARGUMENTS])
    rule = tuple(backward.args[2 + _SAME_ARGUMENTS : -1]) == tuple(forward.args[_SAME_ARGUMENTS:])
    return backward if same and rule and all(_is_part(u, 0, 1, 2) for u in backward.users) else None


def _is_part(node: fx.Node, *numbers: int) -> bool:
    return node.target is operator.getitem and node.args[1] in numbers


def _move_gradient(graph: TrainingGraph, forward: fx.Node, grad: fx.Node) -> bool:
    """Put the computation of `grad` before the forward; False, with nothing changed, when it depends on the loss."""
    order = {node: place for place, node in enumerate(graph.graph.nodes)}
    later, shapes = _after(forward, grad, order)
    if forward in later:
        return False
    for node in shapes:  # its argument is the loss, of which it reads only the shape
        value = node.meta["val"]
        with graph.graph.inserting_before(forward):
            new = graph.graph.call_function(
                aten.full.default,
                ([], _ONLY_SHAPE[node.target]),
                {"dtype": value.dtype, "device": value.device},  # type: ignore[index]
            )
        _replace(graph, node, new)
    for node in sorted(later - set(shapes), key=order.__getitem__):
        forward.prepend(node)
    return True


def _after(forward: fx.Node, grad: fx.Node, order: dict[fx.Node, int]) -> tuple[set[fx.Node], list[fx.Node]]:
    """Everything from `forward` on that `grad` is computed from, and those of them that read only the shape of a number."""
    later: set[fx.Node] = set()
    shapes: list[fx.Node] = []
    stack = [grad]
    while stack:
        node = stack.pop()
        if node in later or order[node] < order[forward]:
            continue
        later.add(node)
        if node.target in _ONLY_SHAPE and node.meta["val"].dim() == 0:
            shapes.append(node)
        else:
            stack += node.all_input_nodes
    return later, shapes


def _fuse(graph: TrainingGraph, forward: fx.Node, backward: fx.Node) -> None:
    grad, wanted = backward.args[0], backward.args[-1]
    if backward.kwargs or forward.kwargs:
        raise AssertionError(f"{forward.name}: the arguments of a captured operator are positional")
    loss = forward.meta["val"][0]
    with graph.graph.inserting_before(forward):
        fused = graph.graph.call_function(_FUSED, (grad, *forward.args, wanted))
        fused.meta.update({"val": (loss, *backward.meta["val"]), "custom": dict(forward.meta["custom"])})
        old = [(part, 0) for part in forward.users if _is_part(part, 0)]
        old += [(part, 1 + int(part.args[1])) for part in backward.users]  # type: ignore[call-overload]
        for part, number in old:
            new = graph.graph.call_function(operator.getitem, (fused, number))
            _replace(graph, part, new)
    for dead in (backward, *list(forward.users), forward):  # of the forward's parts only the lse is left
        graph.graph.erase_node(dead)


def _replace(graph: TrainingGraph, old: fx.Node, new: fx.Node) -> None:
    """`new` takes the place of `old`, its facts and its entries in the tables."""
    new.meta.update({key: value for key, value in old.meta.items() if key in ("val", "custom")})
    old.replace_all_uses_with(new)
    for table in (graph.gradients, graph.boundaries):
        table.update({key: new.name for key, name in table.items() if name == old.name})
    graph.graph.erase_node(old)
