"""Few large layers are cut in pieces where a plan moves values, so that copies may stand within a layer too.

In: a graph, and a Plan. Out: the graph in which the first node of every piece but a layer's first has the number of the piece
(`graph/layers.py`: each is a part, and so a region, of its own). Pieces take about equal FLOPs, forward and backward apart, and
equal layers are cut alike, so they still compile once.

A cut tears nothing that one kernel would compute: it stands where no arithmetic behind it shares operands with arithmetic before
it, unless a matrix product, an attention or a convolution separates the two. Those are borders of kernels anyway.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from torch import fx

from wholestep.graph.layers import layers_of, parts_of
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph, tensors_in
from wholestep.graph.views import is_cheap_view_or_entry
from wholestep.ops.amounts import numel
from wholestep.passes.pipeline import compiler_pass
from wholestep.passes.trips import product_flops

ENOUGH = 16
"""Pieces of a forward pass: with so many, what is on the way is an eighth of what waits."""
MOST = 4
"""Pieces of a layer: each costs a compilation, and a call in every layer."""
TORN_SHARE = 1 / 64
"""Of a layer's largest tensor: what one kernel may share with another across a cut (sizes of a bias, statistics of a norm)."""


@compiler_pass(numerics="bitwise")
def cut_layers(graph: TrainingGraph, plan: Plan) -> TrainingGraph:
    """layer => piece 0, piece 1, ..., where values move and layers are few."""
    if plan.cut_layers is False or not (plan.cut_layers or plan.host or plan.file):
        return graph
    layers = set(layers_of(graph.graph.nodes).values())
    pieces = min(MOST, -(-ENOUGH // max(1, len(layers))))
    for (phase, layer, _), run in itertools.groupby(parts_of(graph.graph.nodes).items(), key=lambda pair: pair[1]):
        if pieces > 1 and layer in layers and phase != "update":
            _cut([node for node, _ in run], pieces)
    return graph


def _cut(nodes: Sequence[fx.Node], pieces: int) -> None:
    """Mark the first node of every piece of a part."""
    done = list(itertools.accumulate(map(product_flops, nodes), initial=0.0))
    whole, places = done[-1], _whole_places(nodes)
    able = [place for place in places if 0 < done[place] < whole]
    wanted = [whole * number / pieces for number in range(1, pieces)]
    chosen = {min(able, key=lambda place: abs(done[place] - flops)) for flops in wanted if able}
    for number, place in enumerate(sorted(chosen), start=1):
        nodes[place].meta["custom"] = {**(nodes[place].meta.get("custom") or {}), "piece": number}


def _whole_places(nodes: Sequence[fx.Node]) -> list[int]:
    """Where a cut tears next to nothing: places of operations that know their module."""
    spans, largest = _shared(nodes), max((_elements(node) for node in nodes), default=0)
    torn: Counter[int] = Counter()
    for value, begin, end in spans:
        torn.update(dict.fromkeys(range(begin + 1, end + 1), _elements(value)))
    return [
        place
        for place, node in enumerate(nodes)
        if not is_cheap_view_or_entry(node) and torn[place] <= TORN_SHARE * largest
    ]


def _shared(nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, int, int]]:
    """(value, place of the first, place of the last) for arithmetic that makes or reads a value with no product in between."""
    products: dict[fx.Node, int] = {}
    """Node -> the most products on a way to it."""
    ends: dict[tuple[fx.Node, int], tuple[int, int]] = {}
    for place, node in enumerate(nodes):
        before = [products[entry] + (product_flops(entry) > 0) for entry in node.all_input_nodes if entry in products]
        products[node] = max(before, default=0)
        if product_flops(node) or is_cheap_view_or_entry(node):
            continue
        for value in {_looked_at(entry) for entry in (node, *node.all_input_nodes)}:
            first, _ = ends.get((value, products[node]), (place, place))
            ends[value, products[node]] = first, place
    return [(value, first, last) for (value, _), (first, last) in ends.items()]


def _looked_at(value: fx.Node) -> fx.Node:
    while value.op == "call_function" and is_cheap_view_or_entry(value):
        value = value.all_input_nodes[0]
    return value


def _elements(value: fx.Node) -> int:
    """Nothing where sizes are symbolic."""
    counts = [numel(tensor) for tensor in tensors_in(value.meta.get("val"))]
    return sum(count for count in counts if isinstance(count, int))
