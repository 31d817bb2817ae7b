"""What a layer does over a graph, for people: space, rows and bytes of every step, and the floor.

In: a Program, a graph and tensors. Out: text, of a layer as it is on a GPU. The program is run on tensors without data, and every
operator's operands and results are counted: read once, written once. The floor is what must move whatever the order of work: what
is given, and which nodes an edge connects, read once, and the result written once. It is told in ms at the bandwidth that one
H200 reaches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wholestep.ops.relational.linear_sum import bytes_between
from wholestep.ops.relational.products import product_bytes
from wholestep.relational import spaces
from wholestep.relational.graph import RelGraph
from wholestep.relational.program import Program
from wholestep.relational.spaces import Space, count_of

BYTES_A_MS = 4.3e9
"""4.3 TB/s."""


class _Counted(TorchDispatchMode):
    """Bytes that operators read and write; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.at_once = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not any(result.alias_info is not None for result in func._schema.returns):
            read = [
                value
                for declared, value in zip(func._schema.arguments, args, strict=False)
                if not _for_later(declared.name)
            ]
            self.bytes += _size(t for t in tree_leaves((read, kwargs, out)) if isinstance(t, Tensor))
            if func is torch.ops.ws.linear_sum.default:
                self.bytes += 2 * bytes_between(args[2], args[4])
            self.at_once |= func is torch.ops.ws.cell_mm.default
            if func is torch.ops.ws.scattered_mm.default:
                self.bytes += 2 * product_bytes(args[0], args[2])
        return out


def _for_later(name: str) -> bool:
    """Tables turned round are read by derivatives only."""
    return name.startswith("back_")


class _Measured(fx.Interpreter):
    """One entry per node: (what, space, bytes)."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.module)
        self.steps: list[tuple[str, Space | None, int]] = []

    def run_node(self, n: fx.Node) -> Any:
        with _Counted() as counted:
            out = super().run_node(n)
        if "told" in n.meta:
            told = (spaces.ALL_AT_ONCE, None) if counted.at_once else n.meta["told"]
            self.steps.append((*told, counted.bytes))
        return out


def _size(tensors: Iterable[Tensor]) -> int:
    """Each once, without the rows that an expanded one only seems to have."""
    distinct = {id(t): t for t in tensors}.values()
    return sum(
        t.element_size() * math.prod(size for size, stride in zip(t.shape, t.stride(), strict=True) if stride)
        for t in distinct
    )


def explain(program: Program, graph: RelGraph, inputs: list[Tensor]) -> str:
    """`inputs`: of nodes, edges and parameters, as the program takes them."""
    measured = _Measured(program)
    with torch.no_grad():
        out = measured.run(graph.to("meta"), *(t.detach().to("meta") for t in inputs))
    lines = [_line(graph, what, space, size) for what, space, size in measured.steps]
    moved = sum(size for *_, size in measured.steps)
    ids, given, result = _size([graph.src, graph.dst, graph.etype]), _size(inputs), _size([out])
    forward, both = given + ids + result, 3 * given + 2 * ids + 2 * result
    floor = [
        f"{'all steps':<92}{_told(moved)}",
        f"{'floor, forward: everything given and the ids of edges read, the result written':<92}{_told(forward)}",
        f"{'floor, forward and backward: also read again with the gradient, gradients written':<92}{_told(both)}",
    ]
    title = f"{'step':<60}{'space':<20}{'rows':>12}{'MB':>12}{'ms at 4.3 TB/s':>18}"
    return "\n".join([graph.report(), "", title, *lines, "", *floor])


def _line(graph: RelGraph, what: str, space: Space | None, size: int) -> str:
    if what == spaces.LINEAR_SUM:
        by_source = int(graph.rows.by_source.sum())
        where = f"{by_source} by source, {graph.num_relations - by_source} by destination"
        rows = graph.rows.gathered.ptr.shape[0] - 1
        return f"{what:<48}{where:>32}{rows:>12}{_told(size)}"
    rows = graph.num_nodes if space is None else count_of(graph, space)
    name = "destination nodes" if space is None else space.value
    return f"{what:<60}{name:<20}{rows:>12}{_told(size)}"


def _told(size: int) -> str:
    return f"{size / 1e6:>12.3f}{size / BYTES_A_MS:>18.5f}"
