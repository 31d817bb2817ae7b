"""Dropout computed again in the backward, with the bits of the forward, and with other ones.

Recomputing an activation saves memory and is exact only when random operators repeat what they drew.
torch.compile with an activation memory budget below 1 draws anew: every gradient behind the dropout belongs to another
mask than the loss does (https://github.com/pytorch/pytorch/issues/190758).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from wholestep.graph.training_graph import TrainingGraph, phase_of
from wholestep.passes.pipeline import compiler_pass

from .splice import insert, replace

aten, ws = torch.ops.aten, torch.ops.ws


def _recomputed(graph: TrainingGraph, key_again: Callable[[torch.Tensor], torch.Tensor]) -> TrainingGraph:
    """Where the backward reads a dropout's output, or drops the gradient alike, it computes the mask itself."""
    for node in [n for n in graph.operations() if n.target is ws.dropout.default]:
        x, p, key = node.args
        if phase_of(node) == "backward":
            replace(graph, node, functools.partial(_dropped, p=p, key_again=key_again, shape=None), x, key)
            continue
        for kept in [node, *(user for user in node.users if user.target is aten.view.default)]:
            readers = [user for user in kept.users if phase_of(user) == "backward"]
            if readers:
                first = min(readers, key=list(graph.graph.nodes).index)
                shape = tuple(kept.meta["val"].shape)
                again = functools.partial(_dropped, p=p, key_again=key_again, shape=shape)
                copy = insert(graph, first, again, x, key)
                kept.replace_all_uses_with(copy, delete_user_cb=lambda user, readers=readers: user in readers)
    graph.module.recompile()
    return graph


def _dropped(x: torch.Tensor, key: torch.Tensor, *, p: float, key_again: Callable, shape: Any) -> torch.Tensor:
    dropped = ws.dropout(x, p, key_again(key))
    return dropped if shape is None else dropped.view(shape)


@compiler_pass(numerics="bitwise")
def recompute_dropout(graph: TrainingGraph) -> TrainingGraph:
    """dropout(x, key), kept for the backward => dropout(x, key), computed again there."""
    return _recomputed(graph, lambda key: key)


@compiler_pass(numerics="bitwise")
def recompute_dropout_with_new_bits(graph: TrainingGraph) -> TrainingGraph:
    """The same, drawn anew."""
    return _recomputed(graph, lambda key: key + 1)
