"""Cheap nodes move to where less is alive: later where they grow what they read, earlier where they shrink it.

In: a graph in the order of tracing. Out: the same nodes, some elsewhere.
- A value that is larger than what it lets die (a widening cast, a mask, zeros) is made right before its first reader: a tied
  embedding's partial gradient waits for the other part in bf16, and what only the backward reads is made in the backward.
- A value that is smaller than what it lets die (a narrowing cast, a comparison, the gradient of a gate) is made right behind its
  last argument.

A moved node takes the phase and module of its new neighbour, so regions stay whole; and it stays in its layer, or outside all
of them, so equal layers stay equal (the head's cast of its input would make the last layer an odd one). Nodes that read state
written in this step stay: a later read would delay the write. Should the peak of the model in `graph/liveness.py` rise all
the same, everything stays as it was.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from wholestep.graph.layers import Part, parts_of
from wholestep.graph.liveness import Storages, flat_numbers, peak_bytes, storage_bytes, storages
from wholestep.graph.training_graph import OutputKind, TrainingGraph, phase_of
from wholestep.passes.pipeline import compiler_pass

# Elementwise or filling, one result, no random numbers: as cheap in another place.
_MOVABLE = frozenset(
    f"aten::{name}"
    for name in (
        "_to_copy", "full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "arange", "eq", "ne", "lt", "le", "gt", "ge",
        "bitwise_not", "logical_not", "bitwise_and", "logical_and", "bitwise_or", "logical_or", "tril", "triu", "clone", "neg",
        "scalar_tensor", "masked_fill",
    )
)  # fmt: skip
# Elementwise gradients: what they read is a product and two values of the forward pass, which need not wait for other products.
_HOISTED = frozenset(
    f"aten::{name}_backward"
    for name in ("silu", "gelu", "threshold", "sigmoid", "tanh", "hardswish", "hardtanh", "elu", "leaky_relu", "softplus", "mish")
)  # fmt: skip


@compiler_pass(numerics="bitwise")
def order_for_peak(graph: TrainingGraph) -> TrainingGraph:
    """Each cheap node beside its first reader or its last argument, whichever holds less memory."""
    try:
        found = storages(graph)
        before = peak_bytes(graph, found=found)
    except ValueError:  # symbolic sizes: bytes are not known
        return graph
    order = [(node, node.meta.get("custom")) for node in graph.graph.nodes]
    if not _move_all(graph, found):
        return graph
    if peak_bytes(graph, found=found) > before:
        _restore(order)
    graph.module.recompile()
    return graph


def _move_all(graph: TrainingGraph, found: dict[fx.Node, Storages]) -> bool:
    lives = _Lives.of(graph, found)
    written = _written(graph, lives.found)
    changed = False
    for node in reversed(list(graph.operations())):
        if _is_one_of(_MOVABLE, node) and written.isdisjoint(lives.read(node)):
            changed |= _sink(node, lives) or _hoist(node, lives)
        elif _is_one_of(_HOISTED, node) and written.isdisjoint(lives.read(node)):
            changed |= _hoist(node, lives)
    return changed


@dataclasses.dataclass(frozen=True, slots=True)
class _Lives:
    """Who reads which storage, and where nodes belong."""

    found: dict[fx.Node, Storages]
    sizes: dict[int, int]
    """Only of what operators make: inputs live anyway."""
    readers: dict[int, list[fx.Node]]
    parts: dict[fx.Node, Part]

    @classmethod
    def of(cls, graph: TrainingGraph, found: dict[fx.Node, Storages]) -> _Lives:
        readers: dict[int, list[fx.Node]] = {}
        for node in graph.graph.nodes:
            for number in _numbers_read(node, found):
                readers.setdefault(number, []).append(node)
        return cls(found, storage_bytes(graph, found), readers, parts_of(graph.graph.nodes))

    def read(self, node: fx.Node) -> set[int]:
        return set(_numbers_read(node, self.found))

    def bytes_read_last(self, node: fx.Node, until: fx.Node) -> int:
        """Of what the node reads, the bytes that nobody else reads after `until`."""
        others = {number: [other for other in self.readers[number] if other is not node] for number in self.read(node)}
        return sum(self.sizes.get(number, 0) for number, rest in others.items() if not rest or max(rest) <= until)

    def may_stand_beside(self, node: fx.Node, neighbour: fx.Node) -> bool:
        """Whether it stays in its layer, or outside all; what the update reads is not made beside the update."""
        if neighbour not in self.parts or phase_of(neighbour) == "update":
            return False
        return self.parts[node][1] == self.parts[neighbour][1]


def _numbers_read(node: fx.Node, found: Mapping[fx.Node, Storages]) -> list[int]:
    """The storages that a node reads; who takes one of an operator's results reads that one."""
    if node.target is operator.getitem:
        return flat_numbers(found.get(node))
    return flat_numbers([found.get(entry) for entry in node.all_input_nodes])


def _sink(node: fx.Node, lives: _Lives) -> bool:
    """Right before its first reader, if that keeps fewer bytes of arguments alive than it makes."""
    reader = min(node.users)
    if node.next is reader or not lives.may_stand_beside(node, reader):
        return False
    if lives.bytes_read_last(node, reader) >= lives.sizes[lives.found[node]]:
        return False
    reader.prepend(node)
    _take_place(node, reader, lives)
    return True


def _hoist(node: fx.Node, lives: _Lives) -> bool:
    """Right behind its last argument, if that lets more bytes of arguments die than it makes."""
    if not all(entry.op == "call_function" for entry in node.all_input_nodes) or not node.all_input_nodes:
        return False
    source = max(node.all_input_nodes)
    if source.next is node or not lives.may_stand_beside(node, source):
        return False
    if lives.bytes_read_last(node, source) <= lives.sizes[lives.found[node]]:
        return False
    source.append(node)
    _take_place(node, source, lives)
    return True


def _take_place(node: fx.Node, neighbour: fx.Node, lives: _Lives) -> None:
    """The neighbour's phase and module; the source line stays the node's own, and so does the module of a gate's gradient."""
    here = neighbour.meta.get("custom") or {}
    taken = ("phase",) if _is_one_of(_HOISTED, node) else ("phase", "module")
    own = {key: value for key, value in (node.meta.get("custom") or {}).items() if key not in taken}
    node.meta["custom"] = own | {key: here[key] for key in taken if key in here}
    lives.parts[node] = lives.parts[neighbour]


def _written(graph: TrainingGraph, found: Mapping[fx.Node, Storages]) -> set[int]:
    """The storages of inputs that this step replaces."""
    placeholders = graph.placeholders
    targets = [entry.target for entry in graph.outputs if entry.kind is OutputKind.UPDATE and entry.target is not None]
    return {number for target in targets for number in flat_numbers(found[placeholders[target]])}


def _is_one_of(names: frozenset[str], node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.name not in names or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return bool(node.users) and not (node.meta.get("custom") or {}).get("direct")


def _restore(order: list[tuple[fx.Node, Any]]) -> None:
    for (before, _), (node, _) in itertools.pairwise(order):
        if before.next is not node:
            before.append(node)
    for node, custom in order:
        if custom is not None:
            node.meta["custom"] = custom
