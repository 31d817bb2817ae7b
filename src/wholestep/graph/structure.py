"""Which parts of a graph are the same: runs of nodes in; keys, canonical inputs and outputs, groups of equal runs out.

Twenty-four equal layers should print once. What a run reads from outside is numbered by first use, so equal runs
(`equality.py`) are one function called with different arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from wholestep.graph.equality import equality_hash
from wholestep.graph.layers import LayerFamily, layer_families, repeated_layers
from wholestep.graph.training_graph import TrainingGraph, module_of, phase_of

FEWEST_NODES = 4
"""Of a run that is worth printing once."""


@dataclasses.dataclass(frozen=True, slots=True)
class EqualRuns:
    """Neighbouring nodes of a layer, repeated by other layers of its family."""

    family: LayerFamily
    phase: str
    layers: tuple[int, ...]
    """The layer of each run; falling in a backward phase."""
    runs: tuple[tuple[fx.Node, ...], ...]
    returned: tuple[int, ...]
    """Positions, within a run, of the values that at least one of the runs hands on."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    family: LayerFamily
    layer: int
    phase: str
    nodes: tuple[fx.Node, ...]


def external_inputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """What the run reads and does not make, each once, by first use (positional arguments first, then keywords)."""
    inside = set(nodes)
    found: dict[fx.Node, None] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in inside:
                found[source] = None
    return list(found)


def escaping_values(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """What the run makes and others read, in the order in which it is made."""
    inside = set(nodes)
    return [node for node in nodes if any(user not in inside for user in node.users)]


def structural_key(nodes: Sequence[fx.Node]) -> str:
    """A hash that equal runs share, whoever reads their results: compare `escaping_values` by position where that matters.

    Leave a get_attr node out of the run to make its tensor an input.
    """
    return equality_hash(external_inputs(nodes), nodes)


def equal_runs(graph: TrainingGraph) -> list[EqualRuns]:
    """Runs of neighbouring operations that two or more layers share, grouped, in the order of their first nodes.

    A run holds all operations of one layer and phase that follow one another, so it can be replaced by one call without
    reordering anything. Where the layers of a list are unlike (stages of different width), lists inside them are tried.
    Constants (get_attr) are not part of runs: they are inputs of them.
    """
    nodes = list(graph.operations())
    place = {node: position for position, node in enumerate(nodes)}
    groups: list[list[_Run]] = []
    _group_runs(nodes, repeated_layers(graph), place, groups)
    groups.sort(key=lambda runs: place[runs[0].nodes[0]])
    found = []
    for runs in groups:
        returned = {run.nodes.index(node) for run in runs for node in escaping_values(run.nodes)}
        layers = tuple(run.layer for run in runs)
        members = tuple(run.nodes for run in runs)
        found.append(EqualRuns(runs[0].family, runs[0].phase, layers, members, tuple(sorted(returned))))
    return found


def _group_runs(
    nodes: Sequence[fx.Node],
    families: Sequence[LayerFamily],
    place: Mapping[fx.Node, int],
    groups: list[list[_Run]],
) -> None:
    """Append the groups of equal runs; runs without an equal are searched again, for lists of layers inside them."""
    by_key: dict[tuple[str, str, str], list[_Run]] = {}
    for run in _runs(nodes, families, place):
        by_key.setdefault((run.family.prefix, run.phase, structural_key(run.nodes)), []).append(run)
    alone: dict[str, list[fx.Node]] = {}
    for runs in by_key.values():
        if len(runs) > 1 and len(runs[0].nodes) >= FEWEST_NODES:
            groups.append(runs)
            continue
        for run in runs:
            alone.setdefault(f"{run.family.prefix}.{run.layer}".lstrip("."), []).extend(run.nodes)
    for below, members in alone.items():
        inner = layer_families(map(module_of, members), below)
        if inner:
            _group_runs(sorted(members, key=place.__getitem__), inner, place, groups)


def _runs(nodes: Iterable[fx.Node], families: Sequence[LayerFamily], place: Mapping[fx.Node, int]) -> list[_Run]:
    """Maximal runs of neighbours of one layer and phase; nodes of no layer between two of the same layer join them."""
    runs: list[_Run] = []
    current: tuple[LayerFamily, int, str] | None = None
    members: list[fx.Node] = []
    between: list[fx.Node] = []
    previous = -1
    for node in nodes:
        label = _label(node, families)
        # Inside unlike layers `nodes` has holes where others were: a hole ends a run.
        follows = current is not None and place[node] == previous + 1
        previous = place[node]
        if follows and label == current:
            members += [*between, node]
            between = []
        elif follows and label is None and current is not None and phase_of(node) == current[2]:
            between.append(node)
        else:
            if current is not None:
                runs.append(_Run(*current, tuple(members)))
            current, members, between = label, [node], []
    if current is not None:
        runs.append(_Run(*current, tuple(members)))
    return runs


def _label(node: fx.Node, families: Sequence[LayerFamily]) -> tuple[LayerFamily, int, str] | None:
    for family in families:
        layer = family.layer_of(module_of(node))
        if layer is not None:
            return family, layer, phase_of(node)
    return None
