"""What a TrainingGraph says about the memory of each of its values: a graph in, name of a value -> Facts out.

The graph knows more than any measurement can: in which module and phase a value is made, who reads it in the backward
pass (that is why it is saved), which values are gradients, which grow with the batch, and which a cheap operator could
recompute from what is kept anyway.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from wholestep.graph.liveness import storages
from wholestep.graph.training_graph import OutputKind, Role, TrainingGraph, module_of, phase_of, tensors_in
from wholestep.lower.footprint.blocks import BATCH, BUFFERS, GRADIENTS, OTHER, SAVED, STATE, TEMPORARIES, WEIGHTS, Block

CATEGORY_OF_ROLE = {
    Role.PARAMETER: WEIGHTS, Role.BUFFER: BUFFERS, Role.STATE: STATE, Role.HYPER: OTHER, Role.BATCH: BATCH,
    Role.KEY: OTHER, Role.CONSTANT: OTHER, Role.GRADIENT: GRADIENTS, Role.SCALE: OTHER,
}  # fmt: skip

_EXPENSIVE = (
    "mm", "conv", "attention", "sort", "topk", "svd", "fft", "rnn", "lstm", "gru", "einsum", "rand", "bernoulli",
    "native_dropout",
)  # fmt: skip
"""Parts of the names of operators that are not worth computing twice, or that would draw other numbers."""


@dataclasses.dataclass(slots=True)
class Facts:
    """About one storage."""

    category: str = TEMPORARIES
    name: str = ""
    module: str = ""
    phase: str = "forward"
    operator: str = ""
    why: str = ""
    scales: bool = False
    recomputable: bool = False
    readers: list[fx.Node] = dataclasses.field(default_factory=list)
    """Those that compute with it, in order; views are no readers."""

    def describe(self, block: Block) -> Block:
        """The block with these facts."""
        for field in dataclasses.fields(self):
            if field.name != "readers":
                setattr(block, field.name, getattr(self, field.name))
        return block


def short_name(target: Any) -> str:
    """`addmm` of aten.addmm.default or of "aten::addmm"."""
    name = (
        target._schema.name if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    )
    return name.rsplit("::", 1)[-1]


def is_expensive(name: str) -> bool:
    """Whether an operator of this name should not be run again only to save memory."""
    return any(part in name for part in _EXPENSIVE)


def batch_size(tensors: Iterable[torch.Tensor]) -> int:
    """Rows of the batch: the leading size that most of its tensors have; 1 when there is none."""
    leading = [int(tensor.shape[0]) for tensor in tensors if tensor.dim()]
    return max(leading, key=leading.count, default=1)


def grows_with_batch(shape: Iterable[int], rows: int, fixed: set[tuple[int, ...]]) -> bool:
    """Whether some size is the batch's (or a product with it) and the whole is not the shape of a parameter."""
    sizes = tuple(int(size) for size in shape)
    return rows > 1 and sizes not in fixed and any(size and size % rows == 0 for size in sizes)


def facts_of(graph: TrainingGraph) -> dict[str, Facts]:
    """Name of every value that is a tensor -> Facts of its storage; `name[2]` for the entries of a list."""
    numbers = storages(graph)
    facts: dict[int, Facts] = {}
    roles = {node: entry for entry, node in zip(graph.inputs, graph.placeholders, strict=True)}
    sizes = _Sizes.of(graph)
    dependent: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        of_batch = node in roles and roles[node].role is Role.BATCH
        if of_batch or any(entry in dependent for entry in node.all_input_nodes):
            dependent.add(node)
        own = flat(numbers.get(node))
        for number, tensor in zip(own, tensors_in(node.meta.get("val")), strict=False):
            if number not in facts:
                facts[number] = _new(node, roles.get(node), tensor, sizes if node in dependent else None)
        for entry in node.all_input_nodes:
            for number in set(flat(numbers.get(entry))) - set(own):  # a view shares its storage: it reads nothing
                facts[number].readers.append(node)
    _settle(graph, numbers, facts)
    named: dict[str, Facts] = {}
    for node, tree in numbers.items():
        if isinstance(tree, int):
            named[node.name] = facts[tree]
        elif isinstance(tree, list):
            entries = ((f"{node.name}[{index}]", number) for index, number in enumerate(tree))
            named.update((name, facts[number]) for name, number in entries if isinstance(number, int))
    return named


@dataclasses.dataclass(slots=True)
class _Sizes:
    rows: int
    fixed: set[tuple[int, ...]]

    @classmethod
    def of(cls, graph: TrainingGraph) -> _Sizes:
        values = {node: entry.role for entry, node in zip(graph.inputs, graph.placeholders, strict=True)}
        batch = [t for node, role in values.items() if role is Role.BATCH for t in tensors_in(node.meta.get("val"))]
        fixed = {
            tuple(t.shape) for node, role in values.items() if role in (Role.PARAMETER, Role.BUFFER, Role.STATE)
            for t in tensors_in(node.meta.get("val"))
        }  # fmt: skip
        return cls(batch_size(batch), fixed)


def _new(node: fx.Node, entry: Any, tensor: torch.Tensor, sizes: _Sizes | None) -> Facts:
    if entry is not None:
        category = CATEGORY_OF_ROLE[entry.role]
        module = entry.name.split("/")[0].rpartition(".")[0] if category in (WEIGHTS, BUFFERS, STATE, GRADIENTS) else ""
        return Facts(category, entry.name, module, "before", "", str(entry), category == BATCH)
    if node.op == "get_attr":
        return Facts(OTHER, str(node.target), "", "before", "", "a constant of the graph")
    # in the backward pass a parameter's shape means its gradient; in the forward pass it is a coincidence
    fixed = sizes.fixed if sizes is not None and phase_of(node) != "forward" else set()
    grows = sizes is not None and grows_with_batch(tensor.shape, sizes.rows, fixed)
    return Facts(TEMPORARIES, node.name, module_of(node) or "", phase_of(node), short_name(node.target), "", grows)


def _settle(graph: TrainingGraph, numbers: dict[fx.Node, Any], facts: dict[int, Facts]) -> None:
    """Categories that need the readers: saved activations, gradients, what is returned."""
    for found in facts.values():
        backward = [node for node in found.readers if phase_of(node) == "backward"]
        if found.phase == "forward" and found.category == TEMPORARIES and backward:
            found.category = SAVED
            found.why = _reader(backward[0])
        elif found.category == TEMPORARIES and found.readers:
            found.why = f"until {_reader(found.readers[-1])}"
    by_name = {node.name: node for node in graph.graph.nodes}
    gradients = {by_name[name]: parameter for parameter, name in graph.gradients.items() if name in by_name}
    for entry, value in zip(graph.outputs, graph.output_values, strict=True):
        if isinstance(value, fx.Node) and entry.kind is OutputKind.GRADIENT:
            gradients.setdefault(value, entry.name)
        elif isinstance(value, fx.Node) and entry.kind is not OutputKind.UPDATE:
            for number in flat(numbers[value]):
                if facts[number].category == TEMPORARIES:
                    facts[number].category, facts[number].why = OTHER, f"returned as {entry.name}"
    for node, parameter in gradients.items():
        for number in flat(numbers[node]):
            if facts[number].category in (TEMPORARIES, OTHER) and facts[number].phase != "before":
                facts[number].category, facts[number].why = GRADIENTS, f"gradient of {parameter}"
                facts[number].module, facts[number].scales = parameter.rpartition(".")[0], False
    _mark_recomputable(graph, numbers, facts)


def _mark_recomputable(graph: TrainingGraph, numbers: dict[fx.Node, Any], facts: dict[int, Facts]) -> None:
    """Saved, made by a cheap operator, from inputs of the step, kept values, or values that can be recomputed too."""
    available: dict[int, bool] = defaultdict(bool)
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        own = set(flat(numbers.get(node)))
        read = {number for entry in node.all_input_nodes for number in flat(numbers.get(entry))}
        cheap = node.target is not operator.getitem and not is_expensive(short_name(node.target))
        again = node.op == "call_function" and cheap and all(available[number] for number in read - own)
        for number in own - read:
            found = facts[number]
            found.recomputable = found.category == SAVED and again
            available[number] = found.phase == "before" or found.category == SAVED or again


def _reader(node: fx.Node) -> str:
    where = module_of(node)
    return f"{short_name(node.target)} in {phase_of(node)}" + (f" of {where}" if where else "")


def flat(tree: Any) -> list[int]:
    if isinstance(tree, list):
        return [number for entry in tree for number in flat(entry)]
    return [] if tree is None else [tree]
