"""A program in the making: values, the space of each, and nodes that say what they do.

In: a traced message function. Out: `Program`. `lowering.py` goes through the operators, `products.py` has those that multiply rows.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.relational import spaces
from wholestep.relational.by_rows import VIEWS
from wholestep.relational.spaces import Space
from wholestep.relational.trace import Traced

HALF = (torch.bfloat16, torch.float16)
_UNTOLD = VIEWS | {spaces.tail_reshaped, spaces.one_row_each, Tensor.detach, Tensor.to, operator.getitem}


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """A product (rows @ matrices) with a matrix per relation, up to dimensions of size one."""

    rows: Value
    matrices: Value
    tail: tuple[int, ...]
    """Its sizes without edges: (k,), or (m, k) for m rows or heads."""


@dataclasses.dataclass(slots=True)
class Value:
    """A traced value in the program that is being made."""

    node: Any
    """In the new graph."""
    space: Space
    linear: Linear | None = None
    numbers: bool = False
    """The relations or types themselves: what they index is the whole table, a row each."""


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """What was made of a message function."""

    module: fx.GraphModule
    """Its nodes say in meta["told"] what they do, and in which space."""

    @property
    def steps(self) -> tuple[tuple[str, str], ...]:
        """(what, in which space), for people."""
        told = (node.meta["told"] for node in self.module.graph.nodes if "told" in node.meta)
        return tuple((what, "" if space is None else space.value) for what, space in told)


class Building:
    """The graph of a program, and what has become of every traced value."""

    message: Any
    """The traced value that is returned."""

    def __init__(self, traced: Traced, on_gpu: bool) -> None:
        self.traced, self.edges, self.on_gpu = traced, traced.edges, on_gpu
        self.graph = fx.Graph()
        self.table = self.graph.placeholder("graph")
        self.lifted: dict[tuple[Any, Space, Space], Any] = {}
        self.values: dict[fx.Node, Value] = {}

    def at(self, value: Value, space: Space) -> Any:
        """The value with the rows of a larger space."""
        if value.space in (space, Space.NONE):
            return value.node
        key = value.node, value.space, space  # one tensor may be that of sources and of destinations
        if key not in self.lifted:
            what = f"{value.space.value} to {space.value}"
            self.lifted[key] = self._node(what, spaces.lift, (self.table, value.node, value.space, space), space=space)
        return self.lifted[key]

    def _made(
        self, node: fx.Node, target: Any, args: Any, space: Space, kwargs: Any = None, *, what: str = "", told: bool = True
    ) -> Value:  # fmt: skip
        name = what or getattr(target, "_opname", getattr(target, "__name__", str(target)))
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:  # that of the trace
            kwargs["device"] = self._node("", spaces.device_of, (self.table,), told=False)
        return Value(self._node(name, target, args, kwargs, told=told and target not in _UNTOLD, space=space), space)

    def _node(
        self, what: str, target: Any, args: Any, kwargs: Any = None, *, told: bool = True, space: Space | None = None
    ) -> Any:
        node = self.graph.call_function(target, args, kwargs or {})
        if told and space is not Space.NONE:
            node.meta["told"] = what, space
        return node
