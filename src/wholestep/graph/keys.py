"""Names for values that hold for all equal layers: a TrainingGraph in, node -> `model.layers.*.mlp.act_fn/silu` out.

A key is the module path with the number of its layer replaced by `*`, the operator, and from the second on a number
(`/add#1`), counted per module in forward order. Decisions about memory are made and written down in these names: 24 equal
layers share one, and a plan survives renamed nodes. `key@12` in a plan means the first 12 of the equal layers, `key@[0,4,8]`
those.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

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
        remembered = (node.meta.get("custom") or {}).get("key")
        if remembered is not None:
            found[node] = remembered
            continue
        if node.target is operator.getitem and node.args[0] in found:
            found[node] = f"{found[node.args[0]]}.{node.args[1]}"  # type: ignore[index]
            continue
        module, name = module_of(node) or "", operator_name(node)
        number = seen[module, name]
        seen[module, name] += 1
        found[node] = f"{starred(module, layers.get(node))}/{name}" + (f"#{number}" if number else "")
    return found


def remember_keys(graph: TrainingGraph) -> None:
    """Write the keys beside the values, so that they stay when a pass removes others."""
    for node, key in value_keys(graph).items():
        node.meta["custom"] = {**(node.meta.get("custom") or {}), "key": key}


def split_key(key: str) -> tuple[str, Sequence[int] | None]:
    """`layers.*.mlp/gelu@12` -> (`layers.*.mlp/gelu`, range(12)), and `@[0,4]` -> (0, 4); None stands for all layers."""
    found = re.fullmatch(r"(.*)@(?:(\d+)|\[(\d+(?:, ?\d+)*)\])", key)
    if found is None:
        return key, None
    return found[1], range(int(found[2])) if found[2] else tuple(map(int, found[3].split(",")))


def joined_key(base: str, wanted: Collection[int], layers: int) -> str:
    """The other way round: the key that means these of so many equal layers."""
    chosen = sorted(wanted)
    if len(chosen) == layers:
        return base
    if chosen == list(range(len(chosen))):
        return f"{base}@{len(chosen)}"
    return f"{base}@[{','.join(map(str, chosen))}]"


def layer_ranks(keys: Mapping[fx.Node, str], layers: Mapping[fx.Node, str]) -> dict[str, dict[str | None, int]]:
    """Key -> its layers, numbered in the order of the forward pass."""
    found: dict[str, dict[str | None, int]] = {}
    for node, key in keys.items():
        numbered = found.setdefault(key, {})
        numbered.setdefault(layers.get(node), len(numbered))
    return found


def starred(module: str, layer: str | None) -> str:
    """`transformer.h.3.mlp` in layer `transformer.h.3` -> `transformer.h.*.mlp`."""
    return module if layer is None else f"{layer.rpartition('.')[0]}.*{module[len(layer) :]}".lstrip(".")


def operator_name(node: fx.Node) -> str:
    """`mm` of `aten.mm.default`."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return schema.name.partition("::")[2]
    return getattr(node.target, "__name__", str(node.target))
