"""Functional graph -> imperative graph: state is written into the tensors that hold it.

In goes a TrainingGraph, whose updates leave as outputs. Out comes an FX graph of the same operators, in the same
order, where

- an optimizer node whose results are the new values of the very inputs it reads is replaced by its in-place twin
  (`ops.IN_PLACE`), so no second copy of parameters and optimizer state ever exists;
- every other update (buffers, statistics, accumulated gradients) is an `aten.copy_` right after the last reader of
  the old value;
- a value that shares memory with a written input, and is returned or copied elsewhere, is cloned before the write (two
  buffers that swap, a parameter returned as an extra output);
- a returned value that shares memory with any other input (`parameter.clone()`, once a pass took the clone out, where the update is
  not in the graph) is cloned at the end: the caller's next write would change it.

The result's outputs are the outputs that are no updates, then the watched nodes. Both lowerings start from it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from wholestep.graph.copies import copy_node
from wholestep.graph.training_graph import OutputKind, TrainingGraph, tensors_in
from wholestep.graph.views import shares_memory
from wholestep.lower.aliases import alias_roots
from wholestep.ops import IN_PLACE, record_of
from wholestep.ops.offload import copy_out_into, lies_on_host

aten = torch.ops.aten


@dataclasses.dataclass(slots=True)
class ImperativeGraph:
    """What runs: an FX graph with explicit writes. Do not eliminate dead code on it, `copy_` has no users."""

    graph: fx.Graph
    owner: torch.nn.Module
    """Where `get_attr` constants live."""
    origin: dict[fx.Node, fx.Node]
    """Node of this graph -> node of the training graph it came from."""
    num_in_place: int
    num_copies: int
    num_snapshots: int

    @property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def symbolic(self) -> bool:
        """Whether some input has a symbolic size."""
        sizes = [
            size for node in self.placeholders for tensor in tensors_in(node.meta.get("val")) for size in tensor.shape
        ]
        return any(isinstance(size, torch.SymInt) for size in sizes)

    @property
    def results(self) -> tuple[Any, ...]:
        return tuple(next(iter(reversed(self.graph.nodes))).args[0])  # type: ignore[arg-type]


@dataclasses.dataclass(slots=True)
class _Writes:
    """What the analysis decided, in terms of the training graph's nodes."""

    twins: dict[fx.Node, Callable[..., None]]
    renamed: dict[fx.Node, fx.Node]
    """Result of an in-place update -> the placeholder that holds it afterwards."""
    snapshots: set[fx.Node]
    """Values cloned as soon as they exist: their memory is overwritten before they are returned or copied."""
    own_copies: set[fx.Node]
    """Values cloned as they are returned: their memory is an input's."""
    copies: list[tuple[fx.Node, Any]]
    """(placeholder, new value)"""
    sent: dict[fx.Node, fx.Node]
    """Copy of new state that leaves the card -> the placeholder on the host that it is written to at once."""


def in_place_twins() -> dict[Any, Callable[..., None]]:
    """Functional update operator -> the function that does the same in place."""
    return IN_PLACE


def write_state_in_place(training: TrainingGraph, watch: Sequence[str] = ()) -> ImperativeGraph:
    """The imperative form of `training`; `watch` names nodes whose values are returned too."""
    values = training.output_values
    returned = [
        value for value, entry in zip(values, training.outputs, strict=True) if entry.kind is not OutputKind.UPDATE
    ]
    returned += [training.node(name) for name in watch]
    order = _needed_nodes(training, [*values, *returned])
    reads = _Reads.of(training, order)
    writes = _analyse(training, order, returned, reads)
    return _emit(training, order, writes, returned, reads)


def _needed_nodes(training: TrainingGraph, wanted: Iterable[Any]) -> list[fx.Node]:
    """Placeholders, plus whatever the wanted values depend on or has an effect; in graph order."""
    needed = {value for value in wanted if isinstance(value, fx.Node)}
    for node in reversed(training.graph.nodes):
        if node.op == "output":
            continue
        if node.op == "placeholder" or node in needed or node.is_impure():
            needed.add(node)
            needed.update(node.all_input_nodes)
    return _facts_first([node for node in training.graph.nodes if node in needed])


def looks_at_sizes(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that look at a fact about sizes (`ws::require`), and those that compute what it looks at from sizes."""
    seen: set[fx.Node] = set()
    ways = [node for node in nodes if record_of(node).guards]
    while ways:
        node = ways.pop()
        if node not in seen:
            seen.add(node)
            ways += [e for e in node.all_input_nodes if e.op == "call_function" and not tensors_in(e.meta.get("val"))]
    return seen


def _facts_first(order: list[fx.Node]) -> list[fx.Node]:
    """What may end the step is looked at as soon as it can be: before anything is computed with it, or written."""
    facts = looks_at_sizes(order)
    if not facts:
        return order
    made: dict[fx.Node, None] = {}
    waiting = [node for node in order if node in facts]
    for node in order:
        if node in facts:
            continue
        made[node] = None
        while ready := [fact for fact in waiting if all(entry in made for entry in fact.all_input_nodes)]:
            made.update(dict.fromkeys(ready))
            waiting = [fact for fact in waiting if fact not in made]
    return list(made)


@dataclasses.dataclass(frozen=True, slots=True)
class _Reads:
    """Who reads whose memory, until when."""

    position: dict[fx.Node, int]
    roots: dict[fx.Node, frozenset[fx.Node]]
    last: dict[fx.Node, int]
    """Root -> position of the last node that reads it or one of its views."""

    @staticmethod
    def of(training: TrainingGraph, order: list[fx.Node]) -> _Reads:
        position = {node: index for index, node in enumerate(order)}
        roots = alias_roots(training.graph)
        return _Reads(position, roots, _last_reads(order, position, roots))


def _analyse(training: TrainingGraph, order: list[fx.Node], returned: list[Any], reads: _Reads) -> _Writes:
    placeholders = training.placeholders
    updates = {
        placeholders[entry.target]: value
        for value, entry in zip(training.output_values, training.outputs, strict=True)
        if entry.kind is OutputKind.UPDATE and entry.target is not None and value is not placeholders[entry.target]
    }
    twins: dict[fx.Node, Callable[..., None]] = {}
    renamed: dict[fx.Node, fx.Node] = {}
    table = in_place_twins()
    for node in order:
        if node.op == "call_function" and node.target in table:
            names = _in_place_names(node, updates, reads.roots, reads.last, reads.position)
            if names is not None:
                twins[node] = table[node.target]
                renamed.update(names)
    sent = _sent(updates)
    renamed |= {
        value: target
        for target, value in updates.items()
        if record_of(value).trip == "out_done" and value.args[1] in sent
    }
    # After its update a renamed result lives in the placeholder, which is not written again in this step.
    copies = [(target, value) for target, value in updates.items() if renamed.get(value) is not target]
    snapshots = {
        value
        for value in [*returned, *(value for _, value in copies)]
        if isinstance(value, fx.Node) and value not in renamed and reads.roots[value] & updates.keys()
    }
    # A returned alias of live state would change under the caller's hands at the next step.
    snapshots.update(value for value in returned if isinstance(value, fx.Node) and _lives_in_state(value, renamed))
    own_copies = {value for value in returned if isinstance(value, fx.Node) and reads.roots[value]} - snapshots
    return _Writes(twins, renamed, snapshots, own_copies, copies, sent)


def _sent(updates: dict[fx.Node, Any]) -> dict[fx.Node, fx.Node]:
    """Copies of new state that end on the host, where the old one lies: what was read of that has come in before."""
    done = {
        value: target
        for target, value in updates.items()
        if isinstance(value, fx.Node) and record_of(value).trip == "out_done"
    }
    return {value.args[1]: target for value, target in done.items() if lies_on_host(target)}  # type: ignore[misc]


def _lives_in_state(value: fx.Node, renamed: dict[fx.Node, fx.Node]) -> bool:
    """Whether the value is the result of an in-place update, or a view of one."""
    while value not in renamed:
        if value.op != "call_function" or not shares_memory(value.target) or not value.all_input_nodes:
            return False
        value = value.all_input_nodes[0]
    return True


def _last_reads(
    order: list[fx.Node], position: dict[fx.Node, int], roots: dict[fx.Node, frozenset[fx.Node]]
) -> dict[fx.Node, int]:
    """Root -> position of the last node that reads it or one of its views (making a view counts); -1 when nobody
    does."""
    last: dict[fx.Node, int] = defaultdict(lambda: -1)
    for node in order:
        for source in node.all_input_nodes:
            for root in roots[source]:
                last[root] = position[node]
    return last


def _in_place_names(
    node: fx.Node,
    updates: dict[fx.Node, Any],
    roots: dict[fx.Node, frozenset[fx.Node]],
    last_read: dict[fx.Node, int],
    position: dict[fx.Node, int],
) -> dict[fx.Node, fx.Node] | None:
    """Result -> placeholder for an update node that may run in place, or None with its reasons listed here.

    Every list argument but the gradients is written, and the results are those lists one after the other.
    """
    written, read = _written_and_read(node)
    if not all(
        isinstance(entry, fx.Node) and (entry.op == "placeholder" or _is_fresh(entry, node)) for entry in written
    ):
        return None
    if len(set(written)) != len(written):
        return None
    results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if len(results) != len(node.users):
        return None
    if any(
        updates.get(target) is not results.get(index, node)
        for index, target in enumerate(written)
        if target.op == "placeholder"
    ):
        return None
    if any(roots[entry] & set(written) for entry in read):
        return None
    if any(last_read[target] > position[node] for target in written):
        return None
    return {results[index]: target for index, target in enumerate(written) if index in results}


def _is_fresh(value: fx.Node, update: fx.Node) -> bool:
    """State that came from the host for this update alone: nobody else has it."""
    return record_of(value).trip == "in_done" and set(value.users) == {update} and set(value.args[0].users) == {value}  # type: ignore[union-attr]


def _written_and_read(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The tensors an update operator replaces, in the order of its results; and the ones it only reads."""
    written: list[fx.Node] = []
    read: list[fx.Node] = []
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    for index, argument in enumerate(arguments):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        if isinstance(value, list | tuple) and argument.name != "grads":
            written.extend(value)  # type: ignore[arg-type]
        elif isinstance(value, list | tuple):
            read.extend(entry for entry in value if isinstance(entry, fx.Node))
        elif isinstance(value, fx.Node):
            read.append(value)
    return written, read


def _emit(
    training: TrainingGraph, order: list[fx.Node], writes: _Writes, returned: list[Any], reads: _Reads
) -> ImperativeGraph:
    """Copy the needed nodes to a new graph, putting clones and copies at their places."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    saved: dict[fx.Node, fx.Node] = {}
    due: dict[int, list[tuple[fx.Node, Any]]] = defaultdict(list)
    for target, value in writes.copies:
        made = reads.position[value] if isinstance(value, fx.Node) else -1
        due[max(made, reads.last[target], reads.position[target])].append((target, value))
    placeholders = [node for node in order if node.op == "placeholder"]
    for node in placeholders:
        new[node] = copy_node(graph, node, new)
    for index, node in enumerate(order):
        if node in writes.twins:
            twin = graph.call_function(writes.twins[node], *_mapped(node, new))
            twin.meta = dict(node.meta, val=None)
            new[node] = twin
        elif node in writes.sent:
            _call(graph, copy_out_into, (new[node.args[0]], new[writes.sent[node]]), node, None)  # type: ignore[index]
            new[node] = new[writes.sent[node]]
        elif record_of(node).trip == "out_done" and node.args[1] in writes.sent:
            new[node] = copy_node(graph, node, new)
        elif node in writes.renamed:
            new[node] = new[writes.renamed[node]]
        elif node.op != "placeholder":
            new[node] = copy_node(graph, node, new)
        if node in writes.snapshots:
            saved[node] = _call(graph, aten.clone.default, (new[node],), node, node.meta.get("val"))
        for target, value in due.get(index, ()):
            source = saved.get(value) or new[value] if isinstance(value, fx.Node) else value
            operation = aten.copy_.default if isinstance(source, fx.Node) else aten.fill_.Scalar
            _call(
                graph,
                operation,
                (new[target], source),
                value if isinstance(value, fx.Node) else node,
                target.meta.get("val"),
            )
    for value in dict.fromkeys(value for value in returned if value in writes.own_copies):
        saved[value] = _call(graph, aten.clone.default, (new[value],), value, value.meta.get("val"))
    graph.output(tuple(saved.get(value) or new[value] if isinstance(value, fx.Node) else value for value in returned))
    origin = {copy: node for node, copy in new.items() if node not in writes.renamed and node not in writes.sent}
    return ImperativeGraph(graph, training.module, origin, len(writes.twins), len(writes.copies), len(writes.snapshots))


def _mapped(node: fx.Node, new: dict[fx.Node, fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return fx.map_arg(node.args, new.__getitem__), fx.map_arg(node.kwargs, new.__getitem__)


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, value: Any) -> fx.Node:
    """A node that carries the provenance of `like`."""
    node = graph.call_function(target, args)
    node.meta = {"custom": dict(like.meta.get("custom") or {}), "val": value}
    return node
