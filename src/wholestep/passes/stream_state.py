"""Optimizer state lies in the host's memory and comes to the card for its update alone, as the Plan says.

In: a graph whose updates stand where `update_early` left them, and patterns of parameters. Out: updates of a few hundred MiB of
state each; what they replace is copied in before them and out behind them:

    y = copy_in(state) ... | y = in_done(y); new = adamw(..., y); h = copy_out(new) ... | h = out_done(new, h)

Where layers are updated behind their backward passes, the state of one comes while that of the one before leaves, beside the
backward pass between them. Where all updates stand together, a few parts are on the card at a time: some come while those before
go, and what stays on the card is updated between them. State that is an input lies on the host from step to step, and
`optimizer.state` stays its owner. The same operators on the same values: every bit stays.
"""

from __future__ import annotations

import bisect
import fnmatch
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from wholestep.errors import BadOption, did_you_mean
from wholestep.graph.layers import layer_pattern, part_borders
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import OutputKind, Role, TrainingGraph, phase_of, tensors_in
from wholestep.ops import IN_PLACE
from wholestep.passes.offload import copy_node, said_to_be_on
from wholestep.passes.pipeline import compiler_pass
from wholestep.passes.update_early import Part, is_separable, split_update, update_list, written_lists

ws = torch.ops.ws
MOST_BYTES = 128 << 20
"""Of state per update: 3 ms of a link of 40 GB/s, long beside what a copy costs to start."""
AT_ONCE = 4
"""Parts on the card at a time where nothing but updates runs meanwhile: half of them come while the others leave."""


@compiler_pass(numerics="bitwise", for_updates=True)
def stream_state(graph: TrainingGraph, plan: Plan) -> TrainingGraph:
    """adamw(parameters, states) => adamw(some of them, copy_in(states)) and copy_out of the new ones, for states on the host."""
    if "host" not in plan.state.values():
        return graph
    away = states_on_host(graph, plan.state)
    updates = [node for node in graph.operations() if node.target in IN_PLACE]
    streamed = [part for update in updates for part in _cut(graph, update, away)]
    if not streamed:
        return graph
    _stream(graph, streamed, away)
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
            what = f"the plan places the state of {pattern!r}, and no parameter with state has that name"
            raise BadOption(what, hint=did_you_mean(pattern, known, f"such as {known[0]}"))


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


def update_rounds(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Updates by the place where they stand: between those of a round no other part of the step begins."""
    borders = {node for node in part_borders(nodes) if phase_of(node) != "update"}
    found: list[list[fx.Node]] = []
    apart = True
    for node in nodes:
        apart = apart or node in borders
        if node.target in IN_PLACE:
            if apart:
                found.append([])
            found[-1].append(node)
            apart = False
    return found


def round_trips(nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, list[fx.Node], fx.Node]]:
    """(before which its state begins to come, the updates of a round, before which it has left). It comes behind the round before
    and has left at the next one, so what runs between rounds hides it. Where all updates stand at the end, none comes in the
    backward pass: until then all gradients wait, and memory is scarcest."""
    position = {node: index for index, node in enumerate(nodes)}
    rounds, borders = update_rounds(nodes), part_borders(nodes)
    between = [node for node in borders if phase_of(node) != "update"] if len(rounds) > 1 else borders
    places = [position[node] for node in between]
    found = []
    for number, updates in enumerate(rounds):
        last = bisect.bisect_right(places, position[updates[0]]) - 1
        first = bisect.bisect_right(places, position[rounds[number - 1][-1]]) if number else last
        leaves = rounds[number + 1][0] if number + 1 < len(rounds) else nodes[-1]
        found.append((between[first] if 0 <= first <= last else updates[0], updates, leaves))
    return found


class _Stream:
    """Copies of state around the updates that read it."""

    def __init__(self, graph: TrainingGraph, updates: Sequence[fx.Node], away: set[fx.Node]) -> None:
        self.graph = graph.graph
        self.states = {u: [e for entries in written_lists(u)[1:] for e in entries if e in away] for u in updates}
        self.coming: dict[fx.Node, fx.Node] = {}
        self.going: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}
        """Update -> (new state, its copy on the way out)."""
        self.final: dict[fx.Node, fx.Node] = {}
        """New state -> the same when it has left the card."""

    def come(self, update: fx.Node, before: fx.Node) -> None:
        device = next(t.device for entry in update_list(update, "params") for t in tensors_in(entry.meta["val"]))
        for entry in self.states[update]:
            self.coming[entry] = copy_node(self.graph, before, ws.copy_in.default, (entry, device), "update")

    def update(self, update: fx.Node) -> fx.Node:
        """With what came; the node behind the copies that begin to leave."""
        here = {
            entry: copy_node(self.graph, update, ws.in_done.default, (self.coming[entry],), "update")
            for entry in self.states[update]
        }
        news = _results(update, here)
        update.args = fx.map_arg(update.args, lambda entry: here.get(entry, entry))
        update.kwargs = fx.map_arg(update.kwargs, lambda entry: here.get(entry, entry))
        after = update.next
        while after.target is operator.getitem:
            after = after.next
        self.going[update] = [
            (new, copy_node(self.graph, after, ws.copy_out.default, (new,), "update")) for new in news
        ]
        return after

    def leave(self, update: fx.Node, before: fx.Node) -> None:
        """What an update made is waited for."""
        for new, copy in self.going[update]:
            self.final[new] = copy_node(self.graph, before, ws.out_done.default, (new, copy), "update")


def _stream(graph: TrainingGraph, updates: Sequence[fx.Node], away: set[fx.Node]) -> None:
    """Before an update: its own state is there. That of a round comes as a whole, or in portions, each while the one before is
    updated, where there is no other round beside which it could."""
    stream = _Stream(graph, updates, away)
    trips = round_trips(list(graph.graph.nodes))
    for comes, members, leaves in trips:
        mine = [update for update in members if update in stream.states]
        portions = _portions(mine, stream.states) if len(trips) == 1 else [mine]
        for update in portions[0] if portions else ():
            stream.come(update, before=comes)
        for number, portion in enumerate(portions):
            for update in portions[number - 1] if number else ():
                stream.leave(update, before=portion[0])
            following = list(portions[number + 1]) if number + 1 < len(portions) else []
            for index, update in enumerate(portion):
                after = stream.update(update)
                for late in following[index:] if update is portion[-1] else following[index : index + 1]:
                    stream.come(late, before=after)
        for update in portions[-1] if portions else ():
            stream.leave(update, before=leaves)
    _return(graph, stream.final)
    for state in away:
        state.meta["val"] = said_to_be_on(state.meta["val"], torch.device("cpu"))


def _portions(updates: Sequence[fx.Node], states: Mapping[fx.Node, Sequence[fx.Node]]) -> list[list[fx.Node]]:
    """As many updates at a time as may have their state on the card together."""
    found: list[list[fx.Node]] = []
    held = 0
    for update in updates:
        size = sum(state.meta["val"].nbytes for state in states[update])
        if not found or held + size > AT_ONCE // 2 * MOST_BYTES:
            found.append([])
            held = 0
        found[-1].append(update)
        held += size
    return found


def _results(update: fx.Node, states: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """The new states, in the order of the old ones."""
    flat = [entry for entries in written_lists(update) for entry in entries]
    by_index = {user.args[1]: user for user in update.users}
    return [by_index[i] for i, entry in enumerate(flat) if entry in states]


def _return(graph: TrainingGraph, final: Mapping[fx.Node, fx.Node]) -> None:
    """The step returns what lies on the host."""
    values = [
        final.get(value, value) if entry.kind is OutputKind.UPDATE and isinstance(value, fx.Node) else value
        for entry, value in zip(graph.outputs, graph.output_values, strict=True)
    ]
    graph.output_node.args = (tuple(values),)
