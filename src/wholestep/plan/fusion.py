"""What a compiler keeps out of memory: a TrainingGraph in, the operations whose results really are written out.

A greedy model of TorchInductor over the regions that lowering will cut, so that memory can be predicted where nothing can
be compiled for the card (`wholestep plan` on a laptop). A result of elementwise work exists only if somebody outside its
region reads it, a library call reads it, or Inductor would store it rather than compute it several times. Whatever is not
stored is computed inside its readers, which therefore read what it reads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from wholestep.graph.layers import parts_of
from wholestep.graph.liveness import flat_numbers, storages
from wholestep.graph.training_graph import TrainingGraph
from wholestep.graph.views import is_cheap_view_or_entry
from wholestep.ops.flops import flops
from wholestep.ops.record import record_of

FUSABLE_KINDS = ("elementwise", "reduction", "movement")
MOST_READS, MOST_OPERATIONS = 4, 30
"""Inductor's limits for what it computes again in each of several readers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """One operation whose results are in memory, or that has none but an effect."""

    node: fx.Node
    region: int
    layer: int
    """Number of the region of the layer's first piece: kernels of several pieces read what those of one region would."""
    reads: frozenset[int]
    """Storages, also those read by what is computed inside it."""
    makes: tuple[int, ...]
    fusable: bool


def is_fusable(node: fx.Node) -> bool:
    """Whether Inductor generates code for it, rather than calling a library."""
    known = record_of(node)
    if known.fuses is not None:
        return known.fuses
    return flops(node).kind in FUSABLE_KINDS and getattr(node.target, "namespace", "") != "ws"


def written_out(graph: TrainingGraph) -> tuple[list[Work], dict[fx.Node, Any]]:
    """The operations that write memory, in order; and which storage each value lies in."""
    numbers = storages(graph)
    regions, layers = _regions(graph)
    fusable = {n: is_fusable(n) for n in regions}
    readers = _readers(graph, numbers, regions)
    lasting = {s for n, tree in numbers.items() if n.op != "call_function" for s in flat_numbers(tree)}
    returned = {s for v in graph.output_values if isinstance(v, fx.Node) for s in flat_numbers(numbers[v])}
    inside: dict[int, frozenset[int]] = {}
    """Storage that does not exist -> the storages its computation reads."""
    depth: dict[int, int] = {}
    found: list[Work] = []
    for node, region in regions.items():
        makes = tuple(s for s in dict.fromkeys(flat_numbers(numbers[node])) if s not in lasting)
        makes = () if record_of(node).on_host else makes
        direct = {s for entry in node.all_input_nodes for s in flat_numbers(numbers.get(entry))}
        reads = frozenset(t for s in direct for t in inside.get(s, (s,)))
        operations = 1 + sum(depth.get(s, 0) for s in direct)
        users = {u for s in makes for u in readers.get(s, ())}
        stored = (
            not fusable[node]
            or bool(returned.intersection(makes))
            or any(not fusable[u] or regions[u] != region for u in users)
            or flops(node).kind == "reduction"
            or (len(users) > 1 and (len(reads) > MOST_READS or operations > MOST_OPERATIONS))
        )
        if stored:
            found.append(Work(node, region, layers[node], reads, makes, fusable[node]))
        else:
            for storage in makes:
                inside[storage], depth[storage] = reads, operations
    return found, numbers


def _regions(graph: TrainingGraph) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
    """Operation (views and selections aside) -> number of its region as it will be compiled, and of its layer's first region."""
    found: dict[fx.Node, int] = {}
    layers: dict[fx.Node, int] = {}
    first: dict[tuple[str, str | None], int] = {}
    previous, number = None, 0
    for node, part in parts_of(graph.graph.nodes).items():
        number, previous = (number if part == previous else number + 1), part
        if part[2] == 0:
            first[part[:2]] = number
        if not is_cheap_view_or_entry(node):
            found[node], layers[node] = number, first.get(part[:2], number)
    return found, layers


def _readers(
    graph: TrainingGraph, numbers: dict[fx.Node, Any], regions: dict[fx.Node, int]
) -> dict[int, list[fx.Node]]:
    found: dict[int, list[fx.Node]] = {}
    for node in regions:
        for entry in node.all_input_nodes:
            for storage in flat_numbers(numbers.get(entry)):
                found.setdefault(storage, []).append(node)
    return found
