"""Where copies between card and host may stand: a TrainingGraph in, the four places of every value that could go and come back out.

Copies stand between regions, so that equal layers stay equal and compile once: at the borders of parts (`graph/layers.py`), which
are layers, or pieces of them (`cut_layers.py`). In a model without layers, where there is nothing to keep equal, they stand behind
every matrix product, attention and convolution. These places are stations:

    forward   ... x is made | copy_out ... | out_done, x is freed ...     not before the last reader of the forward pass
    backward  ... copy_in, y is made ... | in_done | the first reader ... the last reader, y is freed

Copies of one direction follow one another on the link. A copy is waited for at the first station at which the link had the time
for it and for those before it, and begins to come back at the last one from which it has; FLOPs of products tell the time, so that
a plan means the same copies on every machine. All are gone before the loss, and none comes back before its gradient. Where
the link has less time than all of them need, each has its share of it: memory is freed as early, and the step waits. A value that
would be asked back before it is gone stays where it is. The pass `offload` puts copies there, and the planner counts by the same
places.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from wholestep.graph.layers import layers_of, part_borders
from wholestep.graph.strides import is_dense
from wholestep.graph.training_graph import TrainingGraph, phase_of
from wholestep.graph.views import is_cheap_view
from wholestep.ops.flops import flops
from wholestep.ops.record import TENSOR_KINDS
from wholestep.passes.fx_edit import is_static

FLOPS_PER_BYTE = 15_000
"""Of products in bf16, in the time in which the link moves a byte: an H200 does 740 TFLOP/s of 990 beside 55 GB/s; other cards of
data centres do 9 to 30 thousand."""
ATTENTION_TAKES = 3
"""Times as long as a product of as many FLOPs."""
LONGEST = 4
"""Stations for one copy at most, as they are on average: where the link is slow, memory counts, and the step waits."""
MORE_TIME = 1.5
"""A step takes up to so many times as long as its products: only what is more than the link moves in that has less time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trip:
    """The nodes before which the copies of one value stand, and who reads what comes back."""

    out: fx.Node
    out_done: fx.Node
    back: fx.Node
    back_done: fx.Node
    readers: tuple[tuple[fx.Node, fx.Node], ...]
    """(reader after the forward pass, the value or the view of it that it reads)."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Way:
    """A value that could leave, by the numbers of stations."""

    first: int
    """Where it can begin to leave."""
    read: int
    """Before which it cannot be gone, since the forward pass reads it."""
    asked: int
    """Where it has to be back."""
    readers: tuple[tuple[fx.Node, fx.Node], ...]


class Trips:
    """The stations of one graph, and the trips that values could make."""

    def __init__(self, graph: TrainingGraph) -> None:
        nodes = list(graph.graph.nodes)
        self.position = {node: index for index, node in enumerate(nodes)}
        self.stations = _stations(nodes)
        self.places = [self.position[node] for node in self.stations]
        self.linked = _link_bytes(nodes, set(self.stations))
        """Bytes that the link moves until each station."""
        known = layers_of(nodes) or nodes
        forward = [self.position[n] for n in known if n.op == "call_function" and phase_of(n) == "forward"]
        self.turn = min(self._behind(max(forward, default=0)), len(self.stations) - 1)
        """The station behind the forward pass of the last layer: the loss follows."""
        self.readers: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}
        """Value of the forward pass -> (reader, what it reads of it), in order."""
        self.returned: set[fx.Node] = set()
        for node in nodes:
            for entry in node.all_input_nodes:
                if (base := base_of(entry)) is None:
                    continue
                if node.op == "output":
                    self.returned.add(base)
                elif phase_of(base) == "forward" and not (phase_of(node) == "forward" and _looks(node)):
                    self.readers.setdefault(base, []).append((node, entry))

    def of(self, value: fx.Node) -> Trip | None:
        """The trip of a value that has the link to itself; None where it stays."""
        return self.together([value]).get(value)

    def together(self, values: Iterable[fx.Node]) -> dict[fx.Node, Trip]:
        """The trips of values that share the link. Absent is what stays: it would turn round at once, the step returns it, or there
        are gaps in it."""
        ways = {value: way for value in values if (way := self._way(value)) is not None}
        longest = LONGEST * self.linked[self.turn] / max(1, self.turn) if ways else 0.0
        sizes = {value: min(float(value.meta["val"].nbytes), longest) for value in ways}
        gone, back = self._gone(ways, sizes), self._back(ways, sizes)
        at = self.stations
        return {
            value: Trip(at[way.first], at[gone[value]], at[back[value]], at[way.asked], way.readers)
            for value, way in ways.items()
            if gone[value] < min(back[value], len(at))
        }

    def _gone(self, ways: Mapping[fx.Node, _Way], sizes: Mapping[fx.Node, float]) -> dict[fx.Node, int]:
        """Value -> the station at which its copy is waited for."""
        order = sorted(ways, key=lambda value: ways[value].first)
        hurry = _hurry(sizes.values(), self.linked[self.turn] - self.linked[ways[order[0]].first]) if order else 1.0
        found: dict[fx.Node, int] = {}
        over = 0.0
        for value in order:
            way = ways[value]
            over = max(over, self.linked[way.first]) + sizes[value] / hurry
            in_time = bisect.bisect_left(self.linked, over, lo=way.first + 1)
            found[value] = max(min(in_time, self.turn), way.first + 1, way.read)
        return found

    def _back(self, ways: Mapping[fx.Node, _Way], sizes: Mapping[fx.Node, float]) -> dict[fx.Node, int]:
        """Value -> the station at which it begins to come back: the same from the end."""
        order = sorted(ways, key=lambda value: -ways[value].asked)
        hurry = _hurry(sizes.values(), self.linked[ways[order[0]].asked] - self.linked[self.turn]) if order else 1.0
        found: dict[fx.Node, int] = {}
        begin = math.inf
        for value in order:
            asked = ways[value].asked
            begin = min(begin, self.linked[asked]) - sizes[value] / hurry
            in_time = bisect.bisect_right(self.linked, begin, hi=asked) - 1
            found[value] = min(max(in_time, self.turn + 1), asked - 1)
        return found

    def _way(self, value: fx.Node) -> _Way | None:
        found = value.meta.get("val")
        if self.why_not(value) is not None or value in self.returned or not is_static(found) or not is_dense(found):
            return None
        readers = self.readers[value]
        forward = [self.position[reader] for reader, _ in readers if phase_of(reader) == "forward"]
        backward = [pair for pair in readers if phase_of(pair[0]) != "forward"]
        first = self._behind(self.position[value])
        asked = self._behind(self.position[backward[0][0]]) - 1
        if asked <= first:
            return None
        return _Way(first, self._behind(max(forward, default=-1)), asked, tuple(backward))

    def why_not(self, value: fx.Node) -> str | None:
        """Why it makes no sense to ask for a value, or None."""
        found = value.meta.get("val")
        if not isinstance(found, torch.Tensor):
            return "is no single tensor: name one of its results, such as .0"
        if base_of(value) is not value:
            return "is a view: name the value that it looks at"
        if not any(phase_of(reader) != "forward" for reader, _ in self.readers.get(value, ())):
            return "is not read by the backward pass"
        return None

    def _behind(self, position: int) -> int:
        """Number of the first station after a place."""
        return bisect.bisect_right(self.places, position)


def base_of(value: fx.Node) -> fx.Node | None:
    """The operation whose memory a value is, through views; None for inputs and constants."""
    while value.op == "call_function" and _looks(value):
        value = value.all_input_nodes[0]
    return value if value.op == "call_function" else None


def _looks(node: fx.Node) -> bool:
    """A view, or an entry of a list of views."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_cheap_view(node.args[0])
    return is_cheap_view(node)


def _hurry(sizes: Iterable[float], linked: float) -> float:
    """How many times as fast the link would have to be to move them beside the computation; at least as fast as it is."""
    return max(1.0, sum(sizes) / (MORE_TIME * linked)) if linked > 0 else math.inf


def _link_bytes(nodes: Sequence[fx.Node], stations: set[fx.Node]) -> list[float]:
    """Bytes that the link moves until every station."""
    found: list[float] = []
    done = 0.0
    for node in nodes:
        if node in stations:
            found.append(done / FLOPS_PER_BYTE)
        done += product_flops(node)
    return found


def product_flops(node: fx.Node) -> float:
    """Of a matrix product, a convolution or (as many as take its time) an attention; 0 for all else and for symbolic sizes."""
    if node.op != "call_function":
        return 0.0
    work = flops(node)
    if work.kind not in TENSOR_KINDS or not isinstance(work.count, int | float):
        return 0.0
    return float(work.count) * (ATTENTION_TAKES if work.kind == "attention" else 1)


def _stations(nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes before which copies may stand, in order; none in or behind the update at the end."""
    if layers_of(nodes):
        return part_borders(nodes)
    found: list[fx.Node] = []
    behind_product = False
    for node in nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            if behind_product:
                found.append(node)
            behind_product = flops(node).kind in TENSOR_KINDS
    return found
