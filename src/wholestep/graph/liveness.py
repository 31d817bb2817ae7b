"""When values die and how many bytes are alive: a TrainingGraph in, last uses and a peak out.

Views share the storage of what they look at, so a storage lives until the last use of any of its aliases. Aliases are
read from the operators (`views.py`), not from the storages of the fake tensors: passes and the cache make new fake
tensors, schemas stay true.

This is a model, not a measurement. It follows the order of the graph one node at a time, knows nothing of fusion (which
never materialises most pointwise values), of workspaces inside operators, or of the rounding of an allocator.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from wholestep.graph.training_graph import OutputKind, TrainingGraph, phase_of, tensors_in
from wholestep.graph.views import declares_view, shares_memory

Storages = Any
"""A storage number, None for what is no tensor, or a list of these: the shape of a node's `meta["val"]`."""


def storages(graph: TrainingGraph) -> dict[fx.Node, Storages]:
    """Which storage each value lives in. Numbers are shared by aliases; a new number means that the node allocates."""
    found: dict[fx.Node, Storages] = {}
    count = 0
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        if node.target is operator.getitem and isinstance(found.get(node.args[0]), list):
            found[node] = found[node.args[0]][node.args[1]]
            continue
        viewed = _viewed_storage(node, found)
        found[node], count = _number_value(node.meta.get("val"), viewed, count)
    return found


def last_uses(graph: TrainingGraph) -> dict[fx.Node, list[fx.Node]]:
    """Node -> the values that die after it: those whose storage nobody, through any alias, reads later.

    Inputs, constants and outputs never die. A value that nobody reads dies where it is made.
    """
    found = storages(graph)
    nodes = list(graph.graph.nodes)
    last = _last_positions(nodes, found)
    lasting = _held_by_others(found)
    dying: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for value, tree in found.items():
        numbers = flat_numbers(tree)
        if value.op != "call_function" or not numbers or not lasting.isdisjoint(numbers):
            continue
        end = nodes[max(last[number] for number in numbers)]  # a list of tensors dies with the last of them
        if end.op != "output":
            dying[end].append(value)
    return dict(dying)


def peak_bytes(graph: TrainingGraph, *, donate: bool = True, found: dict[fx.Node, Storages] | None = None) -> int:
    """The most bytes alive at any node beyond the inputs and constants, by the model this file describes.

    With `donate`, a new parameter or state made in the update phase takes the storage of the input it replaces, as the
    lowered step does, and counts nothing; any other new value (a buffer, an accumulated gradient) is copied there after
    the last reader of the old one, and dies. `found`: the storages, where they are known; they do not depend on the order.
    """
    found = storages(graph) if found is None else found
    nodes = list(graph.graph.nodes)
    last = _last_positions(nodes, found)
    not_counted = _held_by_others(found) | (donated(graph, found) if donate else set())
    sizes = {number: size for number, size in storage_bytes(graph, found).items() if number not in not_counted}
    born: dict[int, list[int]] = defaultdict(list)
    seen: set[int] = set()
    for position, node in enumerate(nodes):
        new = [
            number for number in dict.fromkeys(flat_numbers(found.get(node))) if number in sizes and number not in seen
        ]
        born[position] = new
        seen.update(new)
    if donate:
        last |= _copied(graph, found, nodes)
    dying: dict[int, list[int]] = defaultdict(list)
    for number in sizes:
        dying[last[number]].append(number)
    alive = peak = 0
    for position in range(len(nodes)):
        alive += sum(sizes[number] for number in born[position])
        peak = max(peak, alive)
        alive -= sum(sizes[number] for number in dying[position])
    return peak


def storage_bytes(graph: TrainingGraph, found: dict[fx.Node, Storages]) -> dict[int, int]:
    """Bytes of every storage that an operator allocates; a ValueError where a size is symbolic."""
    sizes: dict[int, int] = {}
    for node in graph.operations():
        if node.target is not operator.getitem:
            for number, tensor in with_tensors(found[node], node.meta.get("val")):
                if number not in sizes:
                    sizes[number] = tensor_bytes(tensor)
    return sizes


def _last_positions(nodes: list[fx.Node], found: dict[fx.Node, Storages]) -> dict[int, int]:
    """Storage -> the position of the last node that makes or reads any value in it."""
    seen: dict[fx.Node, int] = {}
    for position, node in enumerate(nodes):
        seen.update(dict.fromkeys((node, *node.all_input_nodes), position))
    last: dict[int, int] = {}
    for value, position in seen.items():  # an update returns a thousand tensors and has a reader for each: look once
        for number in flat_numbers(found.get(value)):
            last[number] = max(position, last.get(number, 0))
    return last


def _held_by_others(found: dict[fx.Node, Storages]) -> set[int]:
    """The storages of inputs and constants: alive before and after the step, whoever looks at them."""
    return {number for node, tree in found.items() if node.op != "call_function" for number in flat_numbers(tree)}


def _viewed_storage(node: fx.Node, found: dict[fx.Node, Storages]) -> int | None:
    """The storage that the results of a view operator share, or None when it makes its own."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable or not shares_memory(node.target):
        return None
    if not declares_view(node.target):
        viewed = found[node.args[0]]
        return viewed if isinstance(viewed, int) else None
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        numbers = found.get(value) if isinstance(value, fx.Node) else None
        if isinstance(numbers, int):
            return numbers
    return None


def _number_value(value: Any, viewed: int | None, count: int) -> tuple[Storages, int]:
    if isinstance(value, torch.Tensor):
        return (viewed, count) if viewed is not None else (count, count + 1)
    if isinstance(value, list | tuple):
        entries = []
        for entry in value:
            numbers, count = _number_value(entry, viewed, count)
            entries.append(numbers)
        return entries, count
    return None, count


def flat_numbers(numbers: Storages) -> list[int]:
    """The storage numbers of a value, which may be one, a list, or none."""
    if isinstance(numbers, list):
        return [number for entry in numbers for number in flat_numbers(entry)]
    return [] if numbers is None else [numbers]


def with_tensors(numbers: Storages, value: Any) -> list[tuple[int, torch.Tensor]]:
    if isinstance(numbers, list):
        return [pair for entry, inner in zip(numbers, value, strict=True) for pair in with_tensors(entry, inner)]
    return [] if numbers is None else [(numbers, value)]


def donated(graph: TrainingGraph, found: dict[fx.Node, Storages]) -> set[int]:
    return {
        number
        for entry, value in zip(graph.outputs, graph.output_values, strict=True)
        if entry.kind is OutputKind.UPDATE and isinstance(value, fx.Node) and phase_of(value) == "update"
        for number in flat_numbers(found[value])
    }


def _copied(graph: TrainingGraph, found: dict[fx.Node, Storages], nodes: list[fx.Node]) -> dict[int, int]:
    """Storage of a new value that is copied into the input it replaces -> position after which the copy is made."""
    last = _last_positions(nodes[:-1], found)
    placeholders = graph.placeholders
    copied: dict[int, int] = {}
    returned: set[int] = set()
    for entry, value in zip(graph.outputs, graph.output_values, strict=True):
        numbers = flat_numbers(found.get(value)) if isinstance(value, fx.Node) else []
        if entry.kind is not OutputKind.UPDATE or entry.target is None:
            returned.update(numbers)
            continue
        for number in numbers:
            after = max(last[number], last.get(found[placeholders[entry.target]], 0))
            copied[number] = max(after, copied.get(number, 0))
    return {number: position for number, position in copied.items() if number not in returned}


def node_bytes(node: fx.Node) -> int:
    """Of all tensors that a node stands for."""
    return sum(tensor_bytes(tensor) for tensor in tensors_in(node.meta.get("val")))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the storage that holds the tensor: up to its last element (an expanded tensor holds one row)."""
    if not all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride())):
        raise ValueError(f"symbolic shape {tuple(tensor.shape)}: bytes are known only for fixed shapes")
    if tensor.numel() == 0:
        return 0
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return extent * tensor.element_size()
