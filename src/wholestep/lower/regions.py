"""Imperative graph -> pieces: regions to compile, and calls the driver makes itself.

In goes the graph of `in_place.py`. Out comes an ordered list of pieces. A region is a run of nodes with one phase and
one layer, as a small FX graph of its own whose names do not depend on where it came from, plus the values of the
whole graph it reads and defines. Equal regions (same operators, constants, shapes, strides, devices, and returned
values) have equal `signature`s, so 24 equal layers compile once. Optimizer updates and clipping are never put in a
region.

Three rules keep regions equal and cheap:
- a view that would cross a border is recomputed on the other side, so only its base crosses;
- results of one node stay with it (`getitem`), so what crosses is always a tensor;
- constants enter as inputs.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from wholestep import compat
from wholestep.graph.equality import equality_hash
from wholestep.graph.layers import Part, layers_of, part_of
from wholestep.graph.training_graph import phase_of
from wholestep.graph.views import is_cheap_view, is_partial_view
from wholestep.lower.in_place import ImperativeGraph, looks_at_sizes
from wholestep.ops import record_of

aten = torch.ops.aten
_COPIES = (aten.copy_.default, aten.fill_.Scalar)

# Updates written out as arithmetic are hundreds of kernels, some per parameter: minutes to compile, little to fuse.
MAX_UPDATE_OPERATIONS = 32
# A region this small has next to nothing to fuse, yet costs about a second to compile.
MIN_REGION_OPERATIONS = 3


@dataclasses.dataclass(slots=True)
class Region:
    """A run of nodes that becomes one compiled function."""

    title: str
    body: tuple[fx.Node, ...]
    """The nodes, in order, writes of state last."""
    reads: tuple[fx.Node, ...]
    """What comes from outside, by first use."""
    defines: tuple[fx.Node, ...]
    """What goes out, in order of definition."""
    owner: torch.nn.Module
    signature: str

    def build_module(self) -> fx.GraphModule:
        """The region as a graph of its own: placeholders are `reads`, the output tuple is `defines`, names are
        canonical."""
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        for index, node in enumerate(self.reads):
            new[node] = graph.placeholder(f"a{index}")
        for node in self.body:
            args, kwargs = fx.map_arg((node.args, node.kwargs), new.__getitem__)
            new[node] = graph.create_node(node.op, node.target, args, kwargs)
        for node, copy in new.items():
            copy.meta["val"] = node.meta.get("val")
        graph.output(tuple(new[node] for node in self.defines))
        return compat.GraphModule(self.owner, graph)


Piece: TypeAlias = Region | fx.Node
"""A region, or a node of the imperative graph that the driver calls directly."""


def split_regions(imperative: ImperativeGraph) -> list[Piece]:
    """Cut the graph into pieces, in an order that can be executed."""
    groups: dict[int, list[fx.Node]] = {}
    _look_at_sizes(imperative.graph)
    layers = layers_of(imperative.graph.nodes)
    for node, number in _assign(imperative, layers).items():
        groups.setdefault(number, []).append(node)
    symbols = _symbol_sources(imperative.graph)
    wanted = {value for value in imperative.results if isinstance(value, fx.Node)}
    pieces: list[Piece] = []
    # From the end, so that what a piece must hand on is known when it is built.
    for number in sorted(groups, reverse=True):
        if _is_direct_number(number):
            kept = _without_unread(groups[number], wanted)
            wanted.update(entry for node in kept for entry in node.all_input_nodes)
            pieces.extend(reversed(kept))
            continue
        own = set(groups[number])
        body = _without_unread(_with_views(groups[number], imperative), wanted)
        if not _is_worth_compiling(body):
            wanted.update(entry for node in body for entry in node.all_input_nodes if entry not in body)
            pieces.extend(reversed(body))
        else:
            defines = [node for node in body if node in own and node in wanted]
            region = _build(imperative, _title(groups[number], layers), body, defines, symbols)
            wanted.update(region.reads)
            pieces.append(region)
    return pieces[::-1]


def _look_at_sizes(graph: fx.Graph) -> None:
    """What `ws::require` looks at is computed by the driver, from real sizes: a compiler takes for granted what it is to find."""
    for node in looks_at_sizes(graph.nodes):
        node.meta["custom"] = {**(node.meta.get("custom") or {}), "direct": True}


def _is_worth_compiling(body: list[fx.Node]) -> bool:
    work = [node for node in body if not is_cheap_view(node)]
    if len(work) > MAX_UPDATE_OPERATIONS and all(phase_of(node) == "update" for node in work):
        return False
    if any((node.meta.get("custom") or {}).get("region") for node in work):  # asked for
        return True
    # An operator with a decomposition is a dozen operators that want to be one kernel.
    return len(work) >= MIN_REGION_OPERATIONS or any(record_of(node).decomposition for node in work)


def _is_direct_number(number: int) -> bool:
    return number % 2 == 1


def _without_unread(body: list[fx.Node], wanted: set[fx.Node]) -> list[fx.Node]:
    """The nodes that matter: wanted outside, read by one that matters, or with an effect."""
    needed: set[fx.Node] = set()
    for node in reversed(body):
        effect = node.target in _COPIES or (node.op == "call_function" and (_is_direct(node) or node.is_impure()))
        if effect or node in wanted or node in needed:
            needed.add(node)
            needed.update(node.all_input_nodes)
    return [node for node in body if node in needed]


def _assign(imperative: ImperativeGraph, layers: dict[fx.Node, str]) -> dict[fx.Node, int]:
    """Node -> number of its piece: even for regions, odd for direct calls; numbers follow the order of execution."""
    calls = [node for node in imperative.graph.nodes if node.op == "call_function"]
    returned = {value for value in imperative.results if isinstance(value, fx.Node)}
    assigned: dict[fx.Node, int] = {}
    scalars: set[fx.Node] = set()
    previous: Part | None = None
    number, last = 0, 2 * len(calls) + 1
    for node in calls:
        if _is_scalar(node) and all(entry.op == "placeholder" or entry in scalars for entry in node.all_input_nodes):
            scalars.add(node)
            assigned[node] = -1  # sizes of the batch: computed once, first of all
        elif node.target is operator.getitem and node.args[0] in assigned:
            assigned[node] = assigned[node.args[0]]  # type: ignore[index]
        elif node.target in _COPIES and (node.args[1] in returned or not _is_read_for_itself(node)):
            # Inside a region the compiler could return the state's own memory, which the next step overwrites; and where others
            # read the old value, it has been seen to write the new one first.
            assigned[node] = last
        elif _is_direct(node) or _is_snapshot(node, returned):
            number += 1 if number % 2 == 0 else 0
            assigned[node] = number
            previous = None
        else:
            key = _key(node, layers, previous)
            if key != previous or number % 2:
                number += 1 if number % 2 else 2
                previous = key
            assigned[node] = number
    return assigned


def _is_read_for_itself(write: fx.Node) -> bool:
    """Whether the state that is written is read for nothing but its own new value, a running mean for one."""
    reader: Any = write.args[0]
    readers = [user for user in reader.users if user is not write]
    while readers:
        if len(readers) > 1:
            return False
        reader = readers[0]
        if "batch_norm" in str(reader.target):  # its other results do not read what it replaces
            return True
        readers = [user for user in reader.users if user is not write]
    return reader is write.args[0] or write in reader.users


def _key(node: fx.Node, layers: dict[fx.Node, str], previous: Part | None) -> Part:
    """(phase, layer); a write of state stays where it is."""
    if previous is not None and node.target in _COPIES:
        return previous
    return part_of(node, layers, previous)


def _is_snapshot(node: fx.Node, returned: set[fx.Node]) -> bool:
    """A clone of state for the caller, which a compiler might take for a view it need not make."""
    if node.target is not aten.clone.default or node not in returned:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and (source.op == "placeholder" or is_cheap_view(source))


def _is_direct(node: fx.Node) -> bool:
    """Whether the driver calls it: in-place updates (plain functions), clipping and functional updates, operators that are not
    to be compiled, and whatever a pass marked with meta["custom"]["direct"] (transfers whose place in the step matters)."""
    if (node.meta.get("custom") or {}).get("direct"):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return not _is_traceable(node.target)
    return not record_of(node).compiled or (node.target.namespace == "ws" and phase_of(node) == "update")


def _is_traceable(target: Any) -> bool:
    """Python operators on sizes, and higher-order operators, can be part of a region; other functions cannot."""
    return isinstance(target, torch._ops.HigherOrderOperator) or getattr(target, "__module__", "") in (
        "_operator",
        "math",
        "torch",
    )


def _is_scalar(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)


def _with_views(nodes: list[fx.Node], imperative: ImperativeGraph) -> list[fx.Node]:
    """The region's nodes, with the views of outside values (and subgraphs of higher-order operators) recomputed
    inside."""
    inside = set(nodes)
    body: list[fx.Node] = []

    def bring(value: fx.Node) -> None:
        if value in inside:
            return
        if is_cheap_view(value) and _base_is_whole(value):
            for entry in value.all_input_nodes:
                bring(entry)
        elif value.op != "get_attr" or not isinstance(
            getattr(imperative.owner, str(value.target), None), torch.nn.Module
        ):
            return
        inside.add(value)
        body.append(value)

    for node in nodes:
        for entry in node.all_input_nodes:
            bring(entry)
        body.append(node)
    return body


def _base_is_whole(view: fx.Node) -> bool:
    """Whether passing the base instead of the view pins no memory the view would not pin."""
    base = view
    partial = False
    while is_cheap_view(base):
        partial = partial or is_partial_view(base)
        base = base.all_input_nodes[0]
    return not partial or base.op in ("placeholder", "get_attr")


def _symbol_sources(graph: fx.Graph) -> dict[Any, fx.Node]:
    """Symbol of a size -> the node that computes it, for graphs with symbolic shapes."""
    found: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr.is_symbol:
            found.setdefault(value.node.expr, node)
    return found


def _build(
    imperative: ImperativeGraph, title: str, body: list[fx.Node], defines: list[fx.Node], symbols: dict[Any, fx.Node]
) -> Region:
    body.sort(key=lambda node: node.target in _COPIES)  # stable: writes go last, the rest keeps its order
    inside = set(body)
    reads = list(dict.fromkeys(entry for node in body for entry in node.all_input_nodes if entry not in inside))
    if symbols:
        reads = _with_symbols(reads, body, symbols)
    signature = equality_hash(reads, body, defines)
    return Region(title, tuple(body), tuple(reads), tuple(defines), imperative.owner, signature)


def _with_symbols(reads: list[fx.Node], body: list[fx.Node], symbols: dict[Any, fx.Node]) -> list[fx.Node]:
    """Add the sizes that occur in shapes but are no input: compiled code must be able to compute every shape.

    One that only data tells, and that nothing which is read has, comes to be inside.
    """
    free: set[Any] = set()
    for node in [*reads, *body]:
        for size in _sizes(node.meta.get("val")):
            made = free_unbacked_symbols(size) if node in body else ()
            free.update(symbol for symbol in size.node.expr.free_symbols if symbol not in made)
    inside = set(body)
    missing = [symbols[s] for s in sorted(free, key=str) if s in symbols and symbols[s] not in inside]
    return [*reads, *(node for node in missing if node not in reads)]


def _sizes(value: Any) -> Iterable[torch.SymInt]:
    if isinstance(value, torch.SymInt):
        yield value
    elif isinstance(value, torch.Tensor):
        yield from (size for size in (*value.shape, *value.stride()) if isinstance(size, torch.SymInt))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _sizes(entry)


def _title(body: list[fx.Node], layers: dict[fx.Node, str]) -> str:
    """`layer forward`, `forward and backward`, `update`: what progress and reports call the region."""
    known = [node for node in body if node.meta.get("custom")]
    phases = [phase for phase in ("forward", "backward", "update") if any(phase_of(node) == phase for node in known)]
    if any(node in layers for node in body) and len(phases) == 1:
        return f"layer {phases[0]}"
    return " and ".join(phases) or "forward"
