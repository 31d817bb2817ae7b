"""Values of the forward pass are recomputed in the backward pass instead of being kept, as the Plan says.

In: a graph and the keys of values that are not to be kept. Out: the graph in which the backward pass of every layer reads
copies of them, computed from what is kept. A copy is made once per layer's backward, right before its first reader, and
never shared between layers: it would live as long as what it replaces. What a copy needs and is not kept is copied as well.

The copies do the same operations on the same values (dropout draws by key), so every bit stays the same. After this pass no
other may merge equal nodes: that would undo it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from wholestep.errors import BadOption, did_you_mean
from wholestep.graph.keys import layer_ranks, remember_keys, split_key, value_keys
from wholestep.graph.layers import layers_of
from wholestep.graph.plan import Plan
from wholestep.graph.segments import backward_segments
from wholestep.graph.training_graph import TrainingGraph, operation_of
from wholestep.graph.views import is_cheap_view
from wholestep.ops.record import may_recompute
from wholestep.passes.fx_edit import sweep
from wholestep.passes.pipeline import compiler_pass


@compiler_pass(numerics="bitwise")
def recompute(graph: TrainingGraph, plan: Plan) -> TrainingGraph:
    """saved(x) in the backward => f(kept) there, for every x in `plan.recompute`."""
    if not plan.recompute:
        return graph
    if plan.host or plan.file:  # what is removed here must not change the names that the next pass reads
        remember_keys(graph)
    return _Rewrite(graph, plan.recompute).run()


class _Rewrite:
    """One application of the pass."""

    def __init__(self, graph: TrainingGraph, chosen: tuple[str, ...]) -> None:
        self.graph = graph
        self.keys = value_keys(graph)
        self.layers = layers_of(graph.graph.nodes)
        self.chosen = dict(map(split_key, chosen))
        """Key -> in which of the equal layers; None in all."""
        self.ranks = layer_ranks(self.keys, self.layers)
        self.place = {node: index for index, node in enumerate(graph.graph.nodes)}
        self.copies: dict[tuple[str, fx.Node], fx.Node] = {}
        """(backward of which layer, node of the forward pass) -> its copy there."""
        refuse_unknown(chosen, self.ranks, "recomputes")

    def run(self) -> TrainingGraph:
        for segment, node in backward_segments(self.graph):
            wanted = [entry for entry in node.all_input_nodes if self._is_remade(entry)]
            if not wanted:
                continue
            self._copy(wanted, segment, before=node)
            known = {entry: self.copies[segment, entry] for entry in wanted}
            node.args = fx.map_arg(node.args, lambda entry, known=known: known.get(entry, entry))
            node.kwargs = fx.map_arg(node.kwargs, lambda entry, known=known: known.get(entry, entry))
        sweep(self.graph)
        return self.graph

    def _is_remade(self, value: fx.Node) -> bool:
        """Whether a backward reader gets a copy: chosen itself, or a view of one that is."""
        while value in self.keys:
            if self._is_chosen(value):
                return may_recompute(operation_of(value))
            source = value.all_input_nodes[0] if value.all_input_nodes else None
            looks = is_cheap_view(value) or (
                value.target is operator.getitem and source is not None and is_cheap_view(source)
            )
            if not looks or source is None:
                return False
            value = source
        return False

    def _is_chosen(self, value: fx.Node) -> bool:
        key = self.keys[value]
        if key not in self.chosen:
            return False
        wanted = self.chosen[key]
        return wanted is None or self.ranks[key][self.layers.get(value)] in wanted

    def _copy(self, wanted: list[fx.Node], segment: str, before: fx.Node) -> None:
        """Copies of `wanted` and of all they need that is not kept, in the order of the forward pass."""
        needed: set[fx.Node] = set()
        stack = list(wanted)
        while stack:
            value = stack.pop()
            if value in needed or (segment, value) in self.copies:
                continue
            needed.add(value)
            # a result of an operator with several comes from a second call of the operator
            sources = value.all_input_nodes
            stack += [s for s in sources if self._is_remade(s) or value.target is operator.getitem]
        for value in sorted(needed, key=self.place.__getitem__):
            with self.graph.graph.inserting_before(before):
                copy = self.graph.graph.node_copy(value, lambda entry: self.copies.get((segment, entry), entry))
            copy.meta = dict(value.meta)
            custom = dict(value.meta.get("custom") or {}, phase="backward", recomputed=True)
            if self.layers.get(value, "") != segment:
                custom["module"] = segment or None  # it is part of this backward now, and compiled with it
            copy.meta["custom"] = custom
            self.copies[segment, value] = copy


def refuse_unknown(chosen: tuple[str, ...], known: Mapping[str, Mapping[str | None, int]], verb: str) -> None:
    """An error for a key that the step does not have, with the nearest, or for more layers than there are."""
    for key in sorted(chosen):
        base, wanted = split_key(key)
        if base not in known:
            hint = did_you_mean(base, known, "the plan was made for another model or version: plan again")
            raise BadOption(f"the plan {verb} {key!r}, which the step does not compute", hint=hint)
        if wanted is not None and (not wanted or max(wanted) >= len(known[base])):
            hint = f"leave {key[len(base) :]} out"
            raise BadOption(f"the plan {verb} {key!r}, and there are {len(known[base])} such layers", hint=hint)
