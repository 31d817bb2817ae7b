"""Which operators have several implementations: a graph in, the calls of it that ask, each with its question and its name, out.

A call is named by its value (graph/keys.py); an attention's backward has the name of its forward, whose kernel it must share. A
plan names implementations in these names (`passes/take_kernels.py`), lowering measures them (`lower/tune.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import fx
from torch._ops import OpOverload

from wholestep.graph.keys import operator_name, starred, value_keys
from wholestep.graph.layers import holds_module, layers_of, without_calls
from wholestep.graph.training_graph import TrainingGraph, module_of
from wholestep.ops import linear_cross_entropy
from wholestep.ops.attention import choice
from wholestep.ops.call import Call, read_call
from wholestep.ops.tuner import Question, refuse_unusable

ws = torch.ops.ws
ASKS: dict[OpOverload, Callable[[Call], Question | None]] = {
    ws.attention.default: choice.asked,
    ws.attention_backward.default: choice.asked,
    ws.linear_cross_entropy_backward.default: linear_cross_entropy.asked,
    ws.linear_cross_entropy_and_gradients.default: linear_cross_entropy.asked,
}
"""Operator -> the question of a call of it. Each has a keyword `implementation`, the name of the one to take."""
_LOGSUMEXP = 6
"""The argument of attention's backward that comes from its forward."""


@dataclasses.dataclass(frozen=True, slots=True)
class Asking:
    """One call that asks."""

    node: fx.Node
    key: str
    module: str
    question: Question
    kernel: str
    """That it names already, or nothing."""

    def fits(self, place: str) -> bool:
        """Whether a place of a plan is the call's own key, or its module, a pattern of it, or a module that holds it."""
        return self.key == place or holds_module(place, without_calls(self.module))

    def refuse_unusable(self, kernel: str, by: str = "the plan") -> None:
        """An error where the call has no such implementation, or it does not support the call."""
        reasons = {candidate.name: candidate.supports() for candidate in self.question.candidates}
        refuse_unusable(kernel, self.question.what, f"in {self.key}, {self.question.call}", reasons, by)


def calls_that_ask(graph: TrainingGraph) -> Iterator[Asking]:
    """In the order of the graph; calls whose sizes are symbols only where the answer does not depend on them."""
    calls = [node for node in graph.operations() if node.target in ASKS]
    if not calls:
        return
    keys, layers = value_keys(graph), layers_of(graph.graph.nodes)
    for node in calls:
        owner = _forward_of(node)
        if (owner.meta.get("custom") or {}).get("recomputed"):  # it asks what the call that it repeats asks
            continue
        key = keys.get(owner) or f"{starred(module_of(owner) or '', layers.get(owner))}/{operator_name(owner)}"
        question = ASKS[node.target](read_call(node))  # type: ignore[index]
        if question is not None:
            yield Asking(node, key, module_of(owner) or "", question, str(node.kwargs.get("implementation", "")))


def _forward_of(node: fx.Node) -> fx.Node:
    if node.target is not ws.attention_backward.default:
        return node
    value = node.args[_LOGSUMEXP]
    while isinstance(value, fx.Node) and value.target is not ws.attention.default and value.all_input_nodes:
        value = value.all_input_nodes[0]
    return value if isinstance(value, fx.Node) and value.target is ws.attention.default else node
