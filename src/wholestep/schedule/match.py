"""The matcher: a graph of torch calls and a Pattern in, every place where the graph computes the pattern out.

It follows data, not the order of lines. A match maps every call of the pattern to a call of its own whose arguments are those
of the pattern: values that the pattern computes are the matched ones, parameters stand for any value (a repeated one for the
same), constants are equal, and the two operands of a commutative call may come in either order. A match is one computation that
could be taken out and another put in its place, so besides:

- what it computes on the way is read by nobody else (single use), and no result feeds an input of it;
- nothing writes, between its first and its last call, to memory that it reads or makes, nor later to a result that shares memory
  with what it reads;
- no autocast, gradient mode or the like begins or ends in the midst of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from wholestep.schedule.operators import Call, call_of, same
from wholestep.schedule.pattern import Pattern

_VIEWS = frozenset(
    ("view", "reshape", "transpose", "permute", "t", "expand", "squeeze", "unsqueeze", "flatten", "getitem", "narrow", "select",
     "chunk", "split", "unbind", "detach", "contiguous", "to", "view_as", "movedim", "swapaxes", "unflatten", "expand_as", "mT",
     "T", "H", "mH", "diagonal", "slice", "type_as", "float", "real", "imag", "as_strided", "broadcast_to", "tensor_split",
     "unfold")
)  # fmt: skip
"""Calls whose results may share memory with their input, for graphs that do not know."""


@dataclasses.dataclass(frozen=True)
class Match:
    """One place."""

    inputs: tuple[Any, ...]
    """What the parameters of the pattern are there: nodes or constants."""
    nodes: tuple[fx.Node, ...]
    """The calls, in the order of the pattern."""
    outputs: tuple[fx.Node, ...]


Binding = dict[fx.Node, Any]
"""Node of the pattern -> node of the graph, or a constant."""


def matches(graph: fx.Graph, pattern: Pattern) -> list[Match]:
    """All of them, in the order of the graph; two may share calls."""
    facts = Facts(graph)
    found: dict[frozenset[fx.Node], Match] = {}
    for binding in _bindings(pattern, facts):
        match = Match(
            tuple(binding.get(node) for node in pattern.inputs),
            tuple(binding[node] for node in pattern.calls),
            tuple(binding[node] for node in pattern.outputs),
        )
        key = frozenset(match.nodes)
        if key not in found and facts.can_be_taken_out(match, {binding[node] for node in pattern.interior}):
            found[key] = match
    return sorted(found.values(), key=lambda match: sorted(facts.place[node] for node in match.nodes))


def apart(found: Sequence[Match]) -> list[Match]:
    """The first of every two that share a call."""
    taken: set[fx.Node] = set()
    kept = []
    for match in found:
        if not taken & set(match.nodes):
            kept.append(match)
            taken |= set(match.nodes)
    return kept


# ---- binding ----


def _bindings(pattern: Pattern, facts: Facts) -> Iterator[Binding]:
    """Every way to map the pattern's calls to calls of the graph, edge by edge, from its outputs on."""

    def outputs(index: int, binding: Binding) -> Iterator[Binding]:
        if index == len(pattern.outputs):
            yield binding
            return
        wanted = pattern.outputs[index]
        if wanted in binding:
            yield from outputs(index + 1, binding)
            return
        for node in facts.by_name.get(pattern.calls[wanted].name, ()):
            for bound in _unify(wanted, node, binding, pattern, facts):
                yield from outputs(index + 1, bound)

    yield from outputs(0, {})


def _unify(wanted: Any, value: Any, binding: Binding, pattern: Pattern, facts: Facts) -> Iterator[Binding]:
    """Bindings under which an argument of the pattern is this argument of the graph."""
    if isinstance(wanted, fx.Node):
        if wanted in binding:
            if same(binding[wanted], value):
                yield binding
        elif wanted not in pattern.calls:
            yield {**binding, wanted: value}
        elif isinstance(value, fx.Node) and value in facts.calls:
            taken = any(node in pattern.calls and bound is value for node, bound in binding.items())
            if not taken:
                yield from _unify_calls(wanted, value, binding, pattern, facts)
    elif isinstance(wanted, tuple) and isinstance(value, tuple):
        if len(wanted) == len(value):
            yield from _unify_all(list(zip(wanted, value)), binding, pattern, facts)
    elif isinstance(wanted, slice) and isinstance(value, slice):
        pairs = [(wanted.start, value.start), (wanted.stop, value.stop), (wanted.step, value.step)]
        yield from _unify_all(pairs, binding, pattern, facts)
    elif same(wanted, value):
        yield binding


def _unify_calls(
    wanted: fx.Node, value: fx.Node, binding: Binding, pattern: Pattern, facts: Facts
) -> Iterator[Binding]:
    mine, theirs = pattern.calls[wanted], facts.calls[value]
    if mine.name != theirs.name or mine.arguments.keys() != theirs.arguments.keys():
        return
    bound = {**binding, wanted: value}
    for order in _orders(theirs):
        pairs = [(argument, order[name]) for name, argument in mine.arguments.items()]
        yield from _unify_all(pairs, bound, pattern, facts)


def _orders(call: Call) -> list[Mapping[str, Any]]:
    if not call.commutes:
        return [call.arguments]
    return [call.arguments, {"self": call.arguments["other"], "other": call.arguments["self"]}]


def _unify_all(pairs: list[tuple[Any, Any]], binding: Binding, pattern: Pattern, facts: Facts) -> Iterator[Binding]:
    if not pairs:
        yield binding
        return
    (wanted, value), *rest = pairs
    for bound in _unify(wanted, value, binding, pattern, facts):
        yield from _unify_all(rest, bound, pattern, facts)


# ---- whether a match can be taken out ----


class Facts:
    """What a graph's calls are, where they stand, what memory they share and write."""

    def __init__(self, graph: fx.Graph) -> None:
        self.place = {node: index for index, node in enumerate(graph.nodes)}
        self.calls = {node: found for node in graph.nodes if (found := call_of(node)) is not None}
        self.by_name: dict[str, list[fx.Node]] = {}
        for node, call in self.calls.items():
            if not call.writes:
                self.by_name.setdefault(call.name, []).append(node)
        self.memory = _memory(graph, self.calls)
        self.writers = [(node, self._written(node, call)) for node, call in self.calls.items() if call.writes]
        self.states = [self.place[node] for node, call in self.calls.items() if call.sets_state]

    def _written(self, node: fx.Node, call: Call) -> set[Any]:
        values = [call.arguments.get("out"), call.arguments.get("self"), *(node.args[:1])]
        values = node.all_input_nodes if call.opaque else values
        return {self.memory[value] for value in values if isinstance(value, fx.Node)}

    def can_be_taken_out(self, match: Match, interior: set[fx.Node]) -> bool:
        nodes = set(match.nodes)
        if any(self.calls[node].writes for node in nodes):
            return False
        if any(user not in nodes for node in interior for user in node.users):
            return False
        read = {value for node in nodes for value in node.all_input_nodes} - nodes
        if len(match.outputs) > 1 and self._feeds_itself(match, nodes, read):
            return False
        first, last = min(self.place[n] for n in nodes), max(self.place[n] for n in nodes)
        early = any(first < self.place[user] < last for out in match.outputs for user in out.users if user not in nodes)
        if early and any(first < self.place[writer] < last for writer, _ in self.writers):
            return False  # readers of a result would have to move behind what writes
        if any(first < place < last for place in self.states):
            return False
        touched = {self.memory[value] for value in read | nodes}
        shared = {self.memory[out] for out in match.outputs} & {
            self.memory[value] for value in read | (nodes - set(match.outputs))
        }
        for writer, written in self.writers:
            place = self.place[writer]
            if written & touched and first < place < last:
                return False
            if written & shared and place > first:
                return False
        return True

    def _feeds_itself(self, match: Match, nodes: set[fx.Node], read: set[fx.Node]) -> bool:
        """Whether a result of the match comes back to it through something outside."""
        seen: set[fx.Node] = set()
        stack = [user for out in match.outputs for user in out.users if user not in nodes]
        while stack:
            node = stack.pop()
            if node in read:
                return True
            if node not in seen:
                seen.add(node)
                stack += [user for user in node.users if user not in nodes]
        return False


def _memory(graph: fx.Graph, calls: Mapping[fx.Node, Call]) -> dict[fx.Node, Any]:
    """Node -> a name of the memory its value lies in; values that may share memory have one name."""
    found: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        value = node.meta.get("example_value")
        call = calls.get(node)
        sources = node.all_input_nodes
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            found[node] = value.untyped_storage()._cdata
        elif call is not None and sources and (call.name in _VIEWS or call.writes):
            found[node] = found[sources[0]]  # an opaque call may return any of them: such graphs know their memory
        else:
            found[node] = node
    return found
