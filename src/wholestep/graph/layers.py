"""Which module paths are repeated layers: the borders where a graph is cut so that equal parts compile once.

In goes a graph whose nodes know their phase and module path; out comes node -> the path of the layer it belongs to
(`transformer.h.3`), or None, and the parts that follow one another (`layer 3, backward`). Lowering cuts there; passes
that place something between layers must mean the same borders, hence one definition here. A layer is a child with an
integer name (ModuleList, Sequential) that has at least one sibling with the same forward operators and enough of them
to be worth a region of its own. The outermost such path wins: `stages.2.blocks.1` when stages differ,
`encoder.layer.11` rather than `encoder.layer.11.mlp.0`.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TypeAlias

from torch import fx

from wholestep.graph.training_graph import module_of, phase_of

# Below this a region costs more in calls and lost fusions than its compile time is worth.
MIN_LAYER_OPERATIONS = 8

Part: TypeAlias = tuple[str, str | None]
"""(phase, layer); outside layers forward and backward are one phase, `step`."""


def layers_of(nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """Node -> path of its layer; nodes that belong to none are absent."""
    calls = [node for node in nodes if node.op == "call_function"]
    operations: dict[str, list[str]] = defaultdict(list)
    for node in calls:
        if phase_of(node) == "forward":
            for prefix in _integer_prefixes(module_of(node)):
                operations[prefix].append(str(node.target))
    repeated = _repeated(operations)
    found: dict[fx.Node, str] = {}
    for node in calls:
        outermost = next((prefix for prefix in _integer_prefixes(module_of(node)) if prefix in repeated), None)
        if outermost is not None:
            found[node] = outermost
    return found


def part_of(node: fx.Node, layers: dict[fx.Node, str], previous: Part | None) -> Part:
    """The part a node belongs to, given that of the node before it; a node that does not know its module stays there.

    Outside layers forward and backward are one: the loss and its gradient fuse.
    """
    phase = "update" if phase_of(node) == "update" else "step" if node not in layers else phase_of(node)
    if previous is not None and module_of(node) is None and _same_phase(previous[0], phase_of(node)):
        return previous
    return phase, layers.get(node)


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


@functools.cache
def _integer_prefixes(path: str | None) -> tuple[str, ...]:
    """`encoder.layer.3.mlp.0` -> (`encoder.layer.3`, `encoder.layer.3.mlp.0`), outermost first."""
    if not path:
        return ()
    parts = path.split(".")
    return tuple(".".join(parts[: index + 1]) for index, part in enumerate(parts) if part.partition("#")[0].isdigit())


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
