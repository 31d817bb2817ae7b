"""Which module paths are repeated layers: the borders where a graph is cut so that equal parts compile once.

In goes a graph whose nodes know their phase and module path; out comes node -> the path of the layer it belongs to
(`transformer.h.3`), or None. A layer is a child with an integer name (ModuleList, Sequential) that has at least one
sibling with the same forward operators and enough of them to be worth a region of its own. The outermost such path
wins: `stages.2.blocks.1` when stages differ, `encoder.layer.11` rather than `encoder.layer.11.mlp.0`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from torch import fx

from wholestep.graph.training_graph import module_of, phase_of

# Below this a region costs more in calls and lost fusions than its compile time is worth.
MIN_LAYER_OPERATIONS = 8


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


def _integer_prefixes(path: str | None) -> list[str]:
    """`encoder.layer.3.mlp.0` -> [`encoder.layer.3`, `encoder.layer.3.mlp.0`], outermost first."""
    if not path:
        return []
    parts = path.split(".")
    return [".".join(parts[: index + 1]) for index, part in enumerate(parts) if part.partition("#")[0].isdigit()]


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
