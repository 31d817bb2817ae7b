"""Where copies between card and host may stand: a TrainingGraph in, the four places of every value that could go and come back out.

Copies stand between regions, so that equal layers stay equal and compile once: at the borders of parts (`graph/layers.py`). In a
model without layers, where there is nothing to keep equal, they stand behind every matrix product, attention and convolution.
From such a station to the next a copy has its time:

    forward   ... x is made | copy_out ... | out_done, x is freed ...     not before the last reader of the forward pass
    backward  ... copy_in, y is made ... | in_done | the first reader ... the last reader, y is freed

A value that would be asked back before it is gone stays where it is. The pass `offload` puts copies there, and the planner
counts by the same places.
"""

from __future__ import annotations

import bisect
import dataclasses
import operator

import torch
from torch import fx

from wholestep.graph.layers import layers_of, part_borders
from wholestep.graph.strides import is_dense
from wholestep.graph.training_graph import TrainingGraph, phase_of
from wholestep.graph.views import is_cheap_view
from wholestep.ops.flops import flops
from wholestep.ops.record import TENSOR_KINDS
from wholestep.passes.fx_edit import is_static

LAG = 1
"""Stations between the start of a copy and the wait for it. With one, two layers' values are on the way at any time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trip:
    """The nodes before which the copies of one value stand, and who reads what comes back."""

    out: fx.Node
    out_done: fx.Node
    back: fx.Node
    back_done: fx.Node
    readers: tuple[tuple[fx.Node, fx.Node], ...]
    """(reader after the forward pass, the value or the view of it that it reads)."""


class Trips:
    """The stations of one graph, and the trips that values could make."""

    def __init__(self, graph: TrainingGraph, lag: int = LAG) -> None:
        self.lag = lag
        nodes = list(graph.graph.nodes)
        self.position = {node: index for index, node in enumerate(nodes)}
        self.stations = _stations(nodes)
        self.places = [self.position[node] for node in self.stations]
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
        """The trip of a value; None where it stays: it would turn round at once, the step returns it, or there are gaps in it."""
        found = value.meta.get("val")
        if self.why_not(value) is not None or value in self.returned or not is_static(found) or not is_dense(found):
            return None
        readers = self.readers[value]
        forward = [self.position[reader] for reader, _ in readers if phase_of(reader) == "forward"]
        backward = [pair for pair in readers if phase_of(pair[0]) != "forward"]
        first = self._behind(self.position[value])
        gone = max(first + self.lag, self._behind(max(forward, default=-1)))
        asked = bisect.bisect_right(self.places, self.position[backward[0][0]]) - 1
        back = asked - self.lag
        if gone >= len(self.stations) or back <= gone:
            return None
        where = self.stations
        return Trip(where[first], where[gone], where[back], where[asked], tuple(backward))

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
