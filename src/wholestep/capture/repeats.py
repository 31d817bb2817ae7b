"""Equal layers of a loss, found in Dynamo's graph: a run of them is traced by four, and written out afterwards.

In: a LossGraph. Out: a `Run`: consecutive layers whose nodes are equal but for the parameters that they own, each of which
takes one value with a gradient from the layer before it. `Replay` then runs the first three and the last, and lets values of
the third stand for those between (`write_out.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Container
from typing import Any

import torch
from torch import fx

from wholestep.capture.front import traced as marks

KEPT = 3
"""Layers at the beginning of a run that are traced: the first may differ in what it is given; the next two are compared."""
LEAST = 6
"""Layers of a run: with fewer nothing is gained."""
_LAYER = re.compile(r"^(.*?\.\d+)(?:\.|$)")
_MARKS = {value for name, value in vars(marks).items() if name.startswith("mark_")}
_STATEFUL = re.compile(
    r"autocast|set_grad|inference_mode|_assert|_check|^item$|set_rng|checkpoint|inline_asm|cond|while_loop"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a run."""

    module: int
    """Its id."""
    nodes: tuple[fx.Node, ...]
    own: tuple[fx.Node, ...]
    """Inputs of the graph that nobody else reads, by their first reader."""
    out: fx.Node
    """The one value that is read outside of the layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Equal layers, one after the other."""

    layers: tuple[Layer, ...]

    @property
    def left_out(self) -> tuple[Layer, ...]:
        return self.layers[KEPT:-1]

    def twins(self) -> dict[fx.Node, fx.Node]:
        """Node of a layer that is left out -> the same node of the one that stands for it."""
        kept = self.layers[KEPT - 1]
        return {node: twin for layer in self.left_out for node, twin in zip(layer.nodes, kept.nodes, strict=True)}


def longest_run(graph: fx.Graph, known: Container[int]) -> Run | None:
    """The most equal layers in a row, if they are enough. `known`: ids of the modules that are trained; a teacher's are not."""
    groups: list[tuple[str, list[fx.Node]]] = []
    for path, nodes in itertools.groupby((n for n in graph.nodes if n.op not in ("placeholder", "output")), _layer_of):
        groups.append((path, list(nodes)))
    counted = Counter(path for path, _ in groups)
    layers = [_layer(path, nodes) if path and counted[path] == 1 else None for path, nodes in groups]
    layers = [layer if layer is not None and layer.module in known else None for layer in layers]
    runs: list[list[Layer]] = [[]]
    described: Any = None
    for layer in layers:
        before = runs[-1][-1] if runs[-1] else None
        text = None if layer is None else _described(layer, before)
        if layer is None or text is None or (before is not None and len(runs[-1]) > 1 and text != described):
            runs.append([] if layer is None else [layer])
        elif before is not None and not _follows(before, layer):
            runs.append([layer])
        else:
            runs[-1].append(layer)
        described = text
    best = max(runs, key=len)
    return Run(tuple(best)) if len(best) >= LEAST else None


def _layer_of(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).items())
    found = _LAYER.match(stack[-1][1][0]) if stack else None
    return found[1] if found and not any("@" in key for key, _ in stack) else ""


def _layer(path: str, nodes: list[fx.Node]) -> Layer | None:
    inside = set(nodes)
    outs = [node for node in nodes if any(user not in inside for user in node.users)]
    if len(outs) != 1 or not _takes_gradient(outs[0]) or any(_does_more(node) for node in nodes):
        return None
    read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    own = [n for n in read if n.op == "placeholder" and all(user in inside for user in n.users)]
    keys = [key for key, (name, _) in nodes[0].meta["nn_module_stack"].items() if name == path]
    return Layer(int(keys[0]), tuple(nodes), tuple(own), outs[0]) if keys and keys[0].isdigit() else None


def _does_more(node: fx.Node) -> bool:
    if (
        node.op == "get_attr"
        or node.target in _MARKS
        or not isinstance(node.meta.get("example_value"), torch.Tensor | tuple)
    ):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return bool(_STATEFUL.search(name)) or (name.endswith("_") and not name.startswith("_"))


def _takes_gradient(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _follows(before: Layer, layer: Layer) -> bool:
    """What the one returns is read by the other alone."""
    inside = set(layer.nodes)
    return all(user in inside or user in set(before.nodes) for user in before.out.users)


def _described(layer: Layer, before: Layer | None) -> list[Any] | None:
    """Equal for layers that do the same with their own; None where a gradient would go elsewhere than along the run."""
    place: dict[fx.Node, Any] = {node: i for i, node in enumerate(layer.nodes)}
    place |= {node: ("own", i) for i, node in enumerate(layer.own)}
    if before is not None:
        place[before.out] = "before"
    for read in [n for node in layer.nodes for n in node.all_input_nodes if n not in place]:
        if not isinstance(_example(read), torch.Tensor):
            return None  # a size that varies, or another number
        if before is not None and _takes_gradient(read):
            return None
        place[read] = ("shared", read.name)

    def one(value: Any) -> Any:
        return (place[value], _kind(value)) if isinstance(value, fx.Node) else value

    return [
        (node.op, str(node.target), repr(fx.node.map_aggregate((node.args, dict(node.kwargs)), one)))
        for node in layer.nodes
    ]


def _example(node: fx.Node) -> Any:
    return node.meta["example_value"]


def _kind(node: fx.Node) -> Any:
    value = _example(node)
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return (tuple(value.shape), value.stride(), str(value.dtype), str(value.device), value.requires_grad)
