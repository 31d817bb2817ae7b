"""Updates move to where their gradients are final, so that gradients are freed early.

In: a graph whose optimizer node, one per parameter group, waits at the end for all gradients. Out: several such nodes, each
between two layers of the backward, right behind the layer whose gradients it consumes. Of all gradients (as many bytes as the
parameters) only those of a layer or two are then alive at once. The numbers are the same: the operators treat every parameter
by itself.

What has to hold for a parameter to be updated at a border:
- its gradient is final, and nobody reads its old value later (a tied embedding is read again, or its gradient ends, last);
- nothing global stands between gradients and update: a `scale` by the global norm (clipping, `nonfinite="skip"`) needs all
  gradients first, so such a node stays whole, and a note says why. One that the forward tells is known in time.

Accumulating steps have no update here, but one addition per gradient, which also waits at the end: it moves right behind its
gradient. In their update's own graph, gradients that are divided by the summed weights are consumed a few MiB at a time.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from wholestep.graph.edit import replace_each
from wholestep.graph.layers import part_borders
from wholestep.graph.liveness import flat_numbers, storages
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import OutputKind, Role, TrainingGraph, module_of, tensors_in
from wholestep.ops import IN_PLACE
from wholestep.passes.fx_edit import sweep
from wholestep.passes.pipeline import compiler_pass

aten = torch.ops.aten

MIN_BYTES = 8 << 20
"""Of gradients per node: one launch costs about 20 us of the host, in which an H200 updates about this much."""


@compiler_pass(numerics="bitwise", for_updates=True)
def update_early(
    graph: TrainingGraph, plan: Plan | None = None, *, min_bytes: int = MIN_BYTES, clip: str = "global"
) -> TrainingGraph:
    """adamw(all parameters) => adamw(layer 11), adamw(layer 10), ..., each behind the backward of its layer.

    `clip="layer"` clips what each of these nodes updates by its own norm: not the training that clipping by the global one gives,
    asked for by name (`compile(clip_scope="layer")`), in which gradients need not wait for each other.
    """
    if plan is not None and plan.early_update is False:
        return graph
    changed = _accumulate_early(graph)
    nodes = list(graph.graph.nodes)
    updates = [node for node in nodes if node.target in IN_PLACE]
    if updates:
        places = _Places.of(graph, nodes, set(updates))
        norms: list[fx.Node] = []
        for update in updates:
            parts = _parts(update, places, min_bytes)
            if len(parts) < 2:
                continue
            clipping = _clipping(update)
            if clipping is None or clip != "layer":
                if not _known_early(_argument(update, "scale"), parts, places):
                    graph.notes.append(WAITS)
                    break
                clipping = None
            made = split_update(graph.graph, update, parts)
            norms += [] if clipping is None else [_clip_alone(graph.graph, node, clipping) for node in made]
            changed = True
        _join_norms(graph, norms)
    if changed:
        graph.module.recompile()
    return graph


WAITS = "all gradients live until the update, because clip_norm and nonfinite='skip' need every gradient first"


@dataclasses.dataclass(frozen=True, slots=True)
class _Places:
    """Where things are, and until where old values are read."""

    position: dict[fx.Node, int]
    borders: list[fx.Node]
    last_read: dict[fx.Node, int]
    """Input -> position of the last node that reads it or a view of it, other than to replace it."""

    @classmethod
    def of(cls, graph: TrainingGraph, nodes: Sequence[fx.Node], updates: set[fx.Node]) -> _Places:
        position = {node: index for index, node in enumerate(nodes)}
        numbers = storages(graph)
        read_at: dict[fx.Node, int] = {}
        for node in nodes:
            if node.op == "output":
                continue  # what is returned is copied before it is overwritten
            read_at.update(
                dict.fromkeys(update_list(node, "grads") if node in updates else node.all_input_nodes, position[node])
            )
        last: dict[Any, int] = {}
        for entry, place in read_at.items():
            for number in flat_numbers(numbers.get(entry)):
                last[number] = max(place, last.get(number, -1))
        inputs = {node: last.get(numbers[node], -1) for node in nodes if node.op == "placeholder"}
        ends = max((position[update] for update in updates), default=0)
        whole_step = any(entry.kind is OutputKind.LOSS for entry in graph.outputs)
        # an update's own graph is a list of calls without layers, so anywhere is between two of them
        borders = part_borders(nodes) if whole_step else list(graph.operations())
        borders = [node for node in borders if position[node] < ends and not _is_part_of_update(node)]
        return cls(position, borders, inputs)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Some members of an update node, by number, and the node before which they can be updated."""

    members: tuple[int, ...]
    before: fx.Node


def _parts(update: fx.Node, places: _Places, min_bytes: int) -> list[Part]:
    """Members by the border at which they are ready; small ones wait for the next border."""
    parameters, gradients = update_list(update, "params"), update_list(update, "grads")
    written = written_lists(update)
    if not is_separable(update, len(parameters)) or any(
        node not in places.last_read for entry in written for node in entry
    ):
        return []
    ready = [
        max(places.position[gradient], *(places.last_read[entry[i]] for entry in written))
        for i, gradient in enumerate(gradients)
    ]
    waiting = set(range(len(parameters)))
    parts: list[Part] = []
    for border in places.borders:
        if places.position[border] >= places.position[update]:
            break
        due = sorted(i for i in waiting if ready[i] < places.position[border])
        if due and sum(_bytes(gradients[i]) for i in due) >= min_bytes:
            parts.append(Part(tuple(due), border))
            waiting -= set(due)
    if waiting:
        parts.append(Part(tuple(sorted(waiting)), update))
    return parts


def split_update(graph: fx.Graph, update: fx.Node, parts: list[Part]) -> list[fx.Node]:
    """One node per part in place of `update`, and the results of `update` taken from them."""
    made = []
    count = len(update_list(update, "params"))
    replaced: dict[fx.Node, fx.Node] = {}
    results: dict[int, list[fx.Node]] = {}
    for user in update.users:
        results.setdefault(int(user.args[1]), []).append(user)  # type: ignore[arg-type]
    for part in parts:
        with graph.inserting_before(part.before):
            node = graph.call_function(
                update.target,  # type: ignore[arg-type]
                tuple(_chosen(value, part.members) for value in update.args),
                {key: _chosen(value, part.members) for key, value in update.kwargs.items()},
            )
            made.append(node)
            order = [kind * count + i for kind in range(len(written_lists(update))) for i in part.members]
            node.meta = dict(update.meta, val=[update.meta["val"][old] for old in order])
            node.meta["custom"] = dict(update.meta["custom"])
            for index, old in enumerate(order):
                for user in results.get(old, ()):
                    replaced[user] = graph.call_function(operator.getitem, (node, index))
                    replaced[user].meta = dict(user.meta)
    replace_each(graph, replaced)
    graph.erase_node(update)
    return made


def _known_early(scale: Any, parts: Sequence[Part], places: _Places) -> bool:
    """Whether no update has to wait for its factor: there is none, or the forward tells it (an assumption about data)."""
    return scale is None or all(places.position[scale] < places.position[part.before] for part in parts)


def _clipping(update: fx.Node) -> fx.Node | None:
    """The `ws::clip` whose scale the update takes as it is."""
    scale = _argument(update, "scale")
    source = scale.args[0] if isinstance(scale, fx.Node) and scale.target is operator.getitem else None
    return source if isinstance(source, fx.Node) and source.target is torch.ops.ws.clip.default else None


def _clip_alone(graph: fx.Graph, update: fx.Node, clipping: fx.Node) -> fx.Node:
    """Clip what `update` consumes by its own norm, which is returned."""
    with graph.inserting_before(update):
        alone = graph.call_function(
            clipping.target, (update_list(update, "grads"), *clipping.args[1:]), dict(clipping.kwargs)
        )  # type: ignore[arg-type]
        results = [graph.call_function(operator.getitem, (alone, index)) for index in (0, 1)]
    for node, value in ((alone, clipping.meta["val"]), *zip(results, clipping.meta["val"], strict=True)):
        node.meta = {"val": value, "custom": dict(update.meta["custom"])}
    index = [argument.name for argument in update.target._schema.arguments].index("scale")  # type: ignore[union-attr]
    if index < len(update.args):
        update.update_arg(index, results[1])
    else:
        update.update_kwarg("scale", results[1])
    return results[0]


def _join_norms(graph: TrainingGraph, norms: list[fx.Node]) -> None:
    """The norm the step reports: that of all gradients, from the norms of the parts."""
    if not norms:
        return
    values = list(graph.output_values)
    at = next(i for i, entry in enumerate(graph.outputs) if entry.kind is OutputKind.NORM)
    with graph.graph.inserting_before(graph.output_node):
        stacked = graph.graph.call_function(aten.stack.default, (norms,))
        total = graph.graph.call_function(aten.linalg_vector_norm.default, (stacked, 2.0))
    one = values[at].meta["val"]
    for node, value in ((stacked, one.new_empty(len(norms))), (total, one)):
        node.meta = {"val": value, "custom": dict(norms[-1].meta["custom"])}
    values[at] = total
    graph.output_node.args = (tuple(values),)
    sweep(graph)


def _chosen(value: Any, members: Sequence[int]) -> Any:
    """The members' entries of a list of tensors; anything else, and an empty list, as it is."""
    return [value[i] for i in members] if isinstance(value, list | tuple) and value else value


# ---- what an update operator's arguments are: parameters, gradients, states, each a list; numbers; perhaps a scale ----


def _argument(node: fx.Node, name: str) -> Any:
    for index, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            return node.args[index] if index < len(node.args) else node.kwargs.get(name)
    return None


def update_list(node: fx.Node, name: str) -> list[fx.Node]:
    return list(_argument(node, name) or ())


def written_lists(node: fx.Node) -> list[list[fx.Node]]:
    """The lists that are replaced, in the order of the results; empty ones have no results."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    lists = [(name, _argument(node, name)) for name in names if name != "grads"]
    return [list(value) for _, value in lists if isinstance(value, list | tuple) and value]


def is_separable(node: fx.Node, count: int) -> bool:
    """Whether every list has one tensor per parameter and every user takes one result."""
    whole = all(len(entry) == count for entry in [*written_lists(node), update_list(node, "grads")])
    return whole and all(user.target is operator.getitem for user in node.users)


def _is_part_of_update(node: fx.Node) -> bool:
    """An update, or one of its results: about to be replaced."""
    return node.target in IN_PLACE or node.target is operator.getitem


def _bytes(node: fx.Node) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(node.meta["val"]))


# ---- accumulation ----


def _accumulate_early(graph: TrainingGraph) -> bool:
    """Move every `accumulated + gradient` right behind its gradient, into the region that made it."""
    changed = False
    placeholders = graph.placeholders
    for entry, value in zip(graph.outputs, graph.output_values, strict=True):
        if entry.kind is not OutputKind.UPDATE or graph.inputs[entry.target or 0].role is not Role.GRADIENT:
            continue
        if value.target is not aten.add.Tensor or value.args[0] is not placeholders[entry.target or 0]:
            continue
        gradient = value.args[1]
        if not isinstance(gradient, fx.Node) or gradient.op != "call_function":
            continue
        after = gradient
        while after.next.target is operator.getitem:
            after = after.next
        if after.next is value:
            continue
        after.append(value)
        module = module_of(gradient)
        value.meta["custom"] = dict(gradient.meta["custom"]) if module else dict(value.meta["custom"])
        changed = True
    return changed
