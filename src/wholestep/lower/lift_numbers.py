"""Numbers in which equal layers differ enter their regions as inputs, so that the layers still compile once.

Stochastic depth drops each layer with a probability of its own; two layers that are equal but for such a number would be two
regions, and a model of 24 layers would compile 48. In goes the imperative graph: layers with the same operators in the same order
are laid side by side; where a Python number differs between them it becomes a constant (a 0-d tensor on the layer's own device:
on the CPU, beside a GPU's tensors, it would bring a C++ compiler into the region). Numbers that are equal in all of them stay in
the code.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from wholestep.graph.layers import Part, parts_of
from wholestep.lower.in_place import ImperativeGraph

aten = torch.ops.aten

LIFTED = {
    aten.add.Tensor: aten.add.Tensor, aten.sub.Tensor: aten.sub.Tensor,
    aten.mul.Tensor: aten.mul.Tensor, aten.div.Tensor: aten.div.Tensor,
    aten.add.Scalar: aten.add.Tensor, aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor, aten.div.Scalar: aten.div.Tensor,
    aten.lt.Scalar: aten.lt.Tensor, aten.le.Scalar: aten.le.Tensor, aten.gt.Scalar: aten.gt.Tensor, aten.ge.Scalar: aten.ge.Tensor,
}  # fmt: skip
"""Operator with a number as its second argument -> the one that takes a tensor there."""


def lift_numbers(imperative: ImperativeGraph) -> int:
    """Make constants of the numbers in which layers differ; how many."""
    layers: dict[Part, list[fx.Node]] = defaultdict(list)
    for node, part in parts_of(imperative.graph.nodes).items():
        if part[1] is not None:
            layers[part].append(node)
    families: dict[Any, list[list[fx.Node]]] = defaultdict(list)
    for (phase, _, piece), nodes in layers.items():
        families[phase, piece, tuple(str(node.target) for node in nodes)].append(nodes)
    lifted = 0
    for family in families.values():
        for side_by_side in zip(*family, strict=True) if len(family) > 1 else ():
            if all(map(_liftable, side_by_side)) and len({node.args[1] for node in side_by_side}) > 1:
                for node in side_by_side:
                    _lift(imperative, node, f"_number{lifted}")
                    lifted += 1
    return lifted


def _liftable(node: fx.Node) -> bool:
    """Whether a 0-d tensor in the number's place gives the same bits."""
    if node.target not in LIFTED or len(node.args) != 2 or type(node.args[1]) is not float or node.kwargs:
        return False
    value = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() == 0:  # beside a 0-d tensor it would decide the result's type
        return False
    exact = (torch.float32, torch.float64)
    return value.dtype in exact or (value.is_cuda and value.dtype in (torch.bfloat16, torch.float16))


def _lift(imperative: ImperativeGraph, node: fx.Node, name: str) -> None:
    beside: torch.Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
    value = torch.tensor(node.args[1], dtype=torch.float64, device=beside.device)
    imperative.owner.register_buffer(name, value, persistent=False)
    with imperative.graph.inserting_before(next(iter(imperative.graph.nodes))):
        constant = imperative.graph.get_attr(name)
    constant.meta["val"] = beside.fake_mode.from_tensor(value)  # type: ignore[attr-defined]
    node.target = LIFTED[node.target]  # type: ignore[index]
    node.update_arg(1, constant)
