"""Names for values that hold for all equal layers: a TrainingGraph in, node -> `model.layers.*.mlp.act_fn/silu` out.

A key is the module path with the number of its layer replaced by `*`, the operator, and from the second on a number
(`/add#1`), counted per module in forward order. Decisions about memory are made and written down in these names: 24 equal
layers share one, and a plan survives renamed nodes. `key@12` in a plan means the first 12 of the equal layers.
"""

from __future__ import annotations

import operator
import re
from collections import Counter

from torch import fx

from wholestep.graph.layers import layers_of
from wholestep.graph.training_graph import TrainingGraph, module_of, phase_of


def value_keys(graph: TrainingGraph) -> dict[fx.Node, str]:
    """Every operation of the forward pass -> its key; results of an operator with several add `.0`, `.1`."""
    layers = layers_of(graph.graph.nodes)
    seen: Counter[tuple[str, str]] = Counter()
    found: dict[fx.Node, str] = {}
    for node in graph.operations():
        if phase_of(node) != "forward":
            continue
        if node.target is operator.getitem and node.args[0] in found:
            found[node] = f"{found[node.args[0]]}.{node.args[1]}"  # type: ignore[index]
            continue
        module, name = module_of(node) or "", operator_name(node)
        number = seen[module, name]
        seen[module, name] += 1
        found[node] = f"{starred(module, layers.get(node))}/{name}" + (f"#{number}" if number else "")
    return found


def split_key(key: str) -> tuple[str, int | None]:
    """`layers.*.mlp/gelu@12` -> (`layers.*.mlp/gelu`, 12); None stands for all layers."""
    found = re.fullmatch(r"(.*)@(\d+)", key)
    return (key, None) if found is None else (found[1], int(found[2]))


def starred(module: str, layer: str | None) -> str:
    """`transformer.h.3.mlp` in layer `transformer.h.3` -> `transformer.h.*.mlp`."""
    return module if layer is None else f"{layer.rpartition('.')[0]}.*{module[len(layer) :]}".lstrip(".")


def operator_name(node: fx.Node) -> str:
    """`mm` of `aten.mm.default`."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return schema.name.partition("::")[2]
    return getattr(node.target, "__name__", str(node.target))
