"""Layers: modules with a number for a name (in a ModuleList or Sequential), and which of them count as layers.

In go module paths, or a graph whose nodes know their phase and module path. Three answers come out, by what is asked:

- the borders at which a graph is cut so that equal parts compile once (`layers_of`): node -> the path of its layer
  (`transformer.h.3`), and the parts that follow one another (`layer 3, backward`). Lowering cuts there; passes that place
  something between layers must mean the same borders. Such a layer has at least one sibling with the same forward operators, and
  enough of them to be worth a region of its own. The outermost such path wins: `stages.2.blocks.1` when stages differ,
  `encoder.layer.11` rather than `encoder.layer.11.mlp.0`.
- the lists of modules of a model (`layer_families`), in which a printed graph looks for equal runs of nodes. Their members need
  not be alike, nor large: whether they are equal is seen run by run.
- the outermost numbered module around a node, sibling or not (`numbered_module`): what is shared across it would make modules
  that are equal unequal.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TypeAlias

from torch import fx

from wholestep.graph.training_graph import TrainingGraph, module_of, phase_of

# Below this a region costs more in calls and lost fusions than its compile time is worth.
MIN_LAYER_OPERATIONS = 8

Part: TypeAlias = tuple[str, str | None, int]
"""(phase, layer, piece of the layer); outside layers forward and backward are one phase, `step`."""


def layers_of(nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """Node -> path of its layer; nodes that belong to none are absent."""
    calls = [node for node in nodes if node.op == "call_function"]
    operations: dict[str, list[str]] = defaultdict(list)
    for node in calls:
        if phase_of(node) == "forward":
            for prefix in numbered_prefixes(module_of(node)):
                operations[prefix].append(str(node.target))
    repeated = _repeated(operations)
    found: dict[fx.Node, str] = {}
    for node in calls:
        outermost = next((prefix for prefix in numbered_prefixes(module_of(node)) if prefix in repeated), None)
        if outermost is not None:
            found[node] = outermost
    return found


def part_of(node: fx.Node, layers: dict[fx.Node, str], previous: Part | None) -> Part:
    """The part a node belongs to, given that of the node before it; a node that does not know its module stays there.

    Outside layers forward and backward are one: the loss and its gradient fuse. What is marked as a region (passes/mark_regions.py)
    is a part of its own, and so is a piece of a layer, which goes on until the next begins (passes/cut_layers.py).
    """
    region = (node.meta.get("custom") or {}).get("region")
    if region is not None:
        return phase_of(node), region, 0
    phase = "update" if phase_of(node) == "update" else "step" if node not in layers else phase_of(node)
    if previous is not None and module_of(node) is None and _same_phase(previous[0], phase_of(node)):
        return previous
    layer = layers.get(node)
    goes_on = previous[2] if previous is not None and previous[:2] == (phase, layer) else 0
    return phase, layer, (node.meta.get("custom") or {}).get("piece", goes_on)


def _same_phase(key: str, phase: str) -> bool:
    return key == phase or (key == "step" and phase != "update")


def parts_of(nodes: Iterable[fx.Node]) -> dict[fx.Node, Part]:
    """Node -> its part; the results of an operator (`getitem`) belong to its part."""
    calls = [node for node in nodes if node.op == "call_function"]
    layers = layers_of(calls)
    found: dict[fx.Node, Part] = {}
    previous: Part | None = None
    for node in calls:
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source in found:
            found[node] = found[source]
        else:
            found[node] = previous = part_of(node, layers, previous)
    return found


def part_borders(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The first node of every part but the first: a call placed before it cuts no part in two."""
    parts = [(node, part) for node, part in parts_of(nodes).items() if node.target is not operator.getitem]
    return [node for (_, before), (node, part) in itertools.pairwise(parts) if part != before]


def _repeated(operations: dict[str, list[str]]) -> set[str]:
    """The prefixes whose parent holds at least two children with equal operators; odd siblings join them."""
    families: dict[str, list[str]] = defaultdict(list)
    for prefix, targets in operations.items():
        if len(targets) >= MIN_LAYER_OPERATIONS:
            families[prefix.rpartition(".")[0]].append(prefix)
    repeated: set[str] = set()
    for children in families.values():
        counts = Counter(tuple(operations[child]) for child in children)
        if max(counts.values()) >= 2:
            repeated.update(children)
    return repeated


# ---- lists of modules ----


@dataclasses.dataclass(frozen=True, slots=True)
class LayerFamily:
    """Modules of one list: `transformer.h` with the indices 0..11."""

    prefix: str
    indices: tuple[int, ...]

    def layer_of(self, module: str | None) -> int | None:
        """The index of the layer that holds `module`, or None when it is outside the family."""
        start = f"{self.prefix}." if self.prefix else ""
        if module is None or not module.startswith(start):
            return None
        head = module[len(start) :].partition(".")[0].partition("#")[0]
        return int(head) if head.isdecimal() and int(head) in self.indices else None


def repeated_layers(graph: TrainingGraph) -> list[LayerFamily]:
    """The outermost lists of modules, from the module paths of the nodes, in the order in which they appear.

    Indices need not be equal layers: a Sequential of unlike modules is a family too, and `structural_key` tells them
    apart. A list of which only one index occurs is no family, and the search goes on below it.
    """
    return layer_families(module_of(node) for node in graph.operations())


def layer_families(modules: Iterable[str | None], below: str | None = None) -> list[LayerFamily]:
    """The outermost families among module paths; with `below`, only lists inside that path (`stages.0`)."""
    numbered = {module: _numbered_in_lists(module, below) for module in modules if module is not None}
    indices: dict[str, set[int]] = {}
    for prefixes in numbered.values():
        for prefix, index in prefixes:
            indices.setdefault(prefix, set()).add(index)
    chosen: dict[str, None] = {}
    for prefixes in numbered.values():
        outermost = next((prefix for prefix, _ in prefixes if len(indices[prefix]) > 1), None)
        if outermost is not None:
            chosen[outermost] = None
    return [LayerFamily(prefix, tuple(sorted(indices[prefix]))) for prefix in chosen]


def _numbered_in_lists(module: str, below: str | None) -> list[tuple[str, int]]:
    """`a.3.b.1.c` -> [("a", 3), ("a.3.b", 1)]; of these, the ones whose list lies below the given path."""
    lists = [prefix.rpartition(".") for prefix in numbered_prefixes(without_calls(module))]
    return [(path, int(index)) for path, _, index in lists if below is None or f"{path}.".startswith(f"{below}.")]


# ---- paths ----


@functools.cache
def numbered_prefixes(path: str | None) -> tuple[str, ...]:
    """`encoder.layer.3.mlp.0` -> (`encoder.layer.3`, `encoder.layer.3.mlp.0`), outermost first."""
    parts = (path or "").split(".")
    return tuple(".".join(parts[: index + 1]) for index, part in enumerate(parts) if is_number(part))


def numbered_module(node: fx.Node) -> str | None:
    """The path up to the first number in it (`encoder.layer.3`), or None for a node outside all numbered modules."""
    return next(iter(numbered_prefixes(module_of(node))), None)


def is_number(part: str) -> bool:
    """Whether a part of a path is a place in a list; `3#2` is the second call of what lies there."""
    return part.partition("#")[0].isdecimal()


def without_calls(path: str) -> str:
    """`h.3#2.mlp` -> `h.3.mlp`."""
    return ".".join(part.partition("#")[0] for part in path.split("."))


def layer_pattern(path: str) -> str:
    """`blocks.3.mlp.0` -> `blocks.*.mlp.*`: what modules at equal places of equal layers share."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def holds_module(place: str, path: str) -> bool:
    """Whether a path or pattern (`h.*`, `encoder`) names a module, or one that holds it; the empty path is the model."""
    parts = path.split(".")
    return not place or any(fnmatch.fnmatchcase(".".join(parts[: i + 1]), place) for i in range(len(parts)))
