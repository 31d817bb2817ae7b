"""Optimizer state lies in the host's memory and comes to the card for its update alone, as the Plan says.

In: a graph whose updates stand where `update_early` left them, and patterns of parameters. Out: updates of a few hundred MiB of
state each; what they replace is copied in before them and out behind them:

    y = copy_in(state) ... | y = in_done(y); new = adamw(..., y); h = copy_out(new) ... | h = out_done(new, h)

While one part is updated, the next come in and those before go out; a few parts are on the card at a time. What stays on the card
is updated between them, while copies come and go. State that is an input lies on the host from step to step, and `optimizer.state`
stays its owner. The same operators on the same values: every bit stays.
"""

from __future__ import annotations

import bisect
import difflib
import fnmatch
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from wholestep.errors import BadOption
from wholestep.graph.layers import layer_pattern, part_borders
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import OutputKind, Role, TrainingGraph, tensors_in
from wholestep.ops import IN_PLACE
from wholestep.passes.offload import copy_node, said_to_be_on
from wholestep.passes.pipeline import compiler_pass
from wholestep.passes.update_early import Part, is_separable, split_update, update_list, written_lists

ws = torch.ops.ws
MOST_BYTES = 128 << 20
"""Of state per update: 3 ms of a link of 40 GB/s, long beside what a copy costs to start."""
AT_ONCE, LEAVING = 4, 2
"""Parts on the card at a time, and how many of them may be on the way out while the next is updated; the others come in."""


@compiler_pass(numerics="bitwise", for_updates=True)
def stream_state(graph: TrainingGraph, plan: Plan) -> TrainingGraph:
    """adamw(parameters, states) => adamw(some of them, copy_in(states)) and copy_out of the new ones, for states on the host."""
    if "host" not in plan.state.values():
        return graph
    away = states_on_host(graph, plan.state)
    stations = part_borders(graph.graph.nodes)
    updates = [node for node in graph.operations() if node.target in IN_PLACE]
    streamed = [part for update in updates for part in _cut(graph, update, away)]
    if not streamed:
        return graph
    _stream(graph, streamed, away, stations)
    graph.module.recompile()
    return graph


def states_on_host(graph: TrainingGraph, patterns: Mapping[str, str]) -> set[fx.Node]:
    """The inputs that lie on the host: states of parameters, numbers of no dimension left out."""
    found: dict[str, list[fx.Node]] = {}
    for entry, node in zip(graph.inputs, graph.placeholders, strict=True):
        if entry.role is Role.STATE and node.meta["val"].dim() and node.users:
            found.setdefault(entry.name.rpartition("/")[0], []).append(node)
    if found:  # the graph of a micro-batch has none: its update is a graph of its own
        refuse_unknown_parameters(patterns, found)
    return {node for name, nodes in found.items() if place_of(name, patterns) == "host" for node in nodes}


def refuse_unknown_parameters(patterns: Mapping[str, str], names: Mapping[str, object]) -> None:
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            known = sorted({layer_pattern(name) for name in names} | set(names))
            near = difflib.get_close_matches(pattern, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"such as {known[0]}"
            raise BadOption(
                f"the plan places the state of {pattern!r}, and no parameter with state has that name", hint=hint
            )


def place_of(name: str, patterns: Mapping[str, str]) -> str:
    """`card` or `host`, by the last pattern that matches."""
    return next(
        (place for pattern, place in reversed(list(patterns.items())) if fnmatch.fnmatchcase(name, pattern)), "card"
    )


def _cut(graph: TrainingGraph, update: fx.Node, away: set[fx.Node]) -> list[fx.Node]:
    """The update as several: one of what stays on the card, and parts of what does not, which are returned."""
    states = written_lists(update)[1:]
    count = len(update_list(update, "params"))
    moved = [i for i in range(count) if any(entry[i] in away for entry in states if len(entry) == count)]
    if not moved:
        return []
    if not is_separable(update, count):
        name = str(update.target).removeprefix("ws.").partition(".")[0]
        raise BadOption(
            f"state on the host with {name}, which updates its parameters together", hint="leave `state` out"
        )
    parts: list[list[int]] = []
    held = 0
    for i in moved:
        size = sum(tensor.nbytes for entry in states for tensor in tensors_in(entry[i].meta["val"]))
        if not parts or held + size > MOST_BYTES:
            parts.append([])
            held = 0
        parts[-1].append(i)
        held += size
    beside = _shared_out([i for i in range(count) if i not in set(moved)], update, len(parts) + 1)
    groups = [group for number, part in enumerate(parts) for group in (beside[number], part)] + [beside[-1]]
    made = iter(split_update(graph.graph, update, [Part(tuple(group), update) for group in groups if group]))
    nodes = [next(made) if group else None for group in groups]
    return [node for node in nodes[1::2] if node is not None]


def _shared_out(stays: Sequence[int], update: fx.Node, count: int) -> list[list[int]]:
    """What stays on the card in so many groups of about as many bytes: they are updated while copies come and go."""
    sizes = [entry.meta["val"].nbytes for entry in update_list(update, "params")]
    whole = sum(sizes[i] for i in stays) or 1
    groups: list[list[int]] = [[] for _ in range(count)]
    passed = 0
    for i in stays:
        groups[min(count - 1, count * passed // whole)].append(i)
        passed += sizes[i]
    return groups


def _stream(graph: TrainingGraph, updates: Sequence[fx.Node], away: set[fx.Node], stations: Sequence[fx.Node]) -> None:
    """Before an update: an earlier part has left, a later one begins to come, its own is there."""
    states = [[entry for entries in written_lists(u)[1:] for entry in entries if entry in away] for u in updates]
    coming: dict[fx.Node, fx.Node] = {}
    going: list[list[tuple[fx.Node, fx.Node]]] = []
    """(new state, its copy on the way out) of every update so far."""
    final: dict[fx.Node, fx.Node] = {}

    def come(part: int, before: fx.Node) -> None:
        device = next(t.device for entry in update_list(updates[part], "params") for t in tensors_in(entry.meta["val"]))
        for entry in states[part]:
            coming[entry] = copy_node(graph.graph, before, ws.copy_in.default, (entry, device), "update")

    for part in range(min(AT_ONCE, len(updates))):
        come(part, _ahead(graph, updates, stations))
    for index, update in enumerate(updates):
        if index >= LEAVING:
            final |= _done(graph.graph, going[index - LEAVING], before=update)
            if index - LEAVING + AT_ONCE < len(updates):
                come(index - LEAVING + AT_ONCE, update)
        here = {
            entry: copy_node(graph.graph, update, ws.in_done.default, (coming[entry],), "update")
            for entry in states[index]
        }
        news = _results(update, here)
        update.args = fx.map_arg(update.args, lambda entry, here=here: here.get(entry, entry))
        update.kwargs = fx.map_arg(update.kwargs, lambda entry, here=here: here.get(entry, entry))
        after = update.next
        while after.target is operator.getitem:
            after = after.next
        going.append([(new, copy_node(graph.graph, after, ws.copy_out.default, (new,), "update")) for new in news])
    for left in going[max(0, len(updates) - LEAVING) :]:
        final |= _done(graph.graph, left, before=graph.output_node)
    _return(graph, final)
    for state in away:
        state.meta["val"] = said_to_be_on(state.meta["val"], torch.device("cpu"))


def _ahead(graph: TrainingGraph, updates: Sequence[fx.Node], stations: Sequence[fx.Node]) -> fx.Node:
    """Where the first parts begin to come: a station before the first update. Where all updates stand at the end, not before the
    station behind the backward pass: until then all gradients wait, and memory is scarcest."""
    position = {node: index for index, node in enumerate(graph.graph.nodes)}
    known = [node for node in stations if node in position]  # an update that was cut may have been one
    places = [position[node] for node in known]
    first, last = (bisect.bisect_right(places, position[update]) - 1 for update in (updates[0], updates[-1]))
    ahead = first - int(first != last)
    return known[ahead] if ahead >= 0 else updates[0]


def _results(update: fx.Node, states: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """The new states, in the order of the old ones."""
    flat = [entry for entries in written_lists(update) for entry in entries]
    by_index = {user.args[1]: user for user in update.users}
    return [by_index[i] for i, entry in enumerate(flat) if entry in states]


def _done(graph: fx.Graph, going: Sequence[tuple[fx.Node, fx.Node]], before: fx.Node) -> dict[fx.Node, fx.Node]:
    """New state -> the same when it has left the card."""
    return {new: copy_node(graph, before, ws.out_done.default, (new, copy), "update") for new, copy in going}


def _return(graph: TrainingGraph, final: Mapping[fx.Node, fx.Node]) -> None:
    """The step returns what lies on the host."""
    values = [
        final.get(value, value) if entry.kind is OutputKind.UPDATE and isinstance(value, fx.Node) else value
        for entry, value in zip(graph.outputs, graph.output_values, strict=True)
    ]
    graph.output_node.args = (tuple(values),)
