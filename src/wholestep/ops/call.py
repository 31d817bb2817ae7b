"""Call: one node of a graph read against its operator's schema.

In: an fx node with `meta["val"]`. Out: the operator's name, its arguments by the names of the schema with defaults filled in and
every node replaced by the tensor without data that it stands for, and the result. Formulas read nothing else, so they
need not know positions, keywords or fx.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from wholestep.graph.training_graph import constant_of, tensors_in
from wholestep.graph.views import UNDECLARED_VIEWS
from wholestep.ops.amounts import Amount, numel, product, shape


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """An operator applied to values that have shapes and no data."""

    name: str
    """`aten::mm`; `python::getitem` for what is no torch operator. In-place forms carry the functional name."""
    overload: str
    arguments: dict[str, Any]
    result: Any
    schema: Any
    """The torch schema, or None."""

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    def get(self, argument: str, otherwise: Any = None) -> Any:
        return self.arguments.get(argument, otherwise)

    def tensor(self, *names: str) -> torch.Tensor:
        """The first of these arguments that is a tensor (operators of one family name theirs differently)."""
        for name in names:
            if isinstance(self.arguments.get(name), torch.Tensor):
                return self.arguments[name]
        raise KeyError(f"{self.name} has no tensor argument {' or '.join(names)}; it has {', '.join(self.arguments)}")

    def shape(self, *names: str) -> tuple[Amount, ...]:
        return shape(self.tensor(*names))

    def tensors(self, argument: str) -> list[torch.Tensor]:
        """The tensors of a list argument."""
        return tensors_in(self.arguments.get(argument))

    @property
    def inputs(self) -> list[torch.Tensor]:
        return [tensor for value in self.arguments.values() for tensor in tensors_in(value)]

    @property
    def outputs(self) -> list[torch.Tensor]:
        return tensors_in(self.result)

    @property
    def first(self) -> torch.Tensor:
        """The first tensor that goes in."""
        return self.inputs[0]

    @property
    def is_view(self) -> bool:
        """Whether the results share the memory of an argument, so that nothing is computed or moved."""
        if self.name in UNDECLARED_VIEWS:
            return True
        return self.schema is not None and not self.schema.is_mutable and any(r.alias_info for r in self.schema.returns)

    def has_tag(self, tag: str) -> bool:
        """Whether torch tags the operator so; tags differ between versions, so nothing rests on one alone."""
        wanted = getattr(torch.Tag, tag, None)
        packet = getattr(getattr(torch.ops, self.name.split("::")[0], None), self.name.split("::")[-1], None)
        operator = getattr(packet, self.overload or "default", None)
        return wanted is not None and wanted in getattr(operator, "tags", ())


def read_call(node: fx.Node) -> Call:
    """The call a `call_function` node makes."""
    schema = getattr(node.target, "_schema", None)
    values = fx.map_arg(node.args, value_of), fx.map_arg(dict(node.kwargs), value_of)
    if schema is None:
        name = getattr(node.target, "__name__", str(node.target))
        given = {str(position): value for position, value in enumerate(values[0])}
        return Call(f"python::{name}", "", given | values[1], node.meta.get("val"), None)
    arguments = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(values[0]) and not argument.kwarg_only:
            arguments[argument.name] = values[0][position]
        elif argument.name in values[1]:
            arguments[argument.name] = values[1][argument.name]
        elif argument.has_default_value():
            arguments[argument.name] = argument.default_value
    return Call(_functional(schema.name), schema.overload_name, arguments, node.meta.get("val"), schema)


def value_of(node: fx.Node) -> Any:
    """What a node stands for: its tensor without data; the attribute itself for a constant of the module."""
    if "val" in node.meta or node.op != "get_attr":
        return node.meta.get("val")
    return constant_of(node.graph.owning_module, node)


def elements(tensors: list[torch.Tensor]) -> Amount:
    return sum((numel(tensor) for tensor in tensors), 0)


def window(call: Call, argument: str, dimensions: int) -> Amount:
    """Elements of a pooling window, given as one number or one per dimension."""
    sizes = call[argument]
    sizes = [sizes] if isinstance(sizes, int) else list(sizes)
    return product(sizes * dimensions if len(sizes) == 1 else sizes)


def _functional(name: str) -> str:
    """`aten::add_` computes what `aten::add` does."""
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name
