"""What a rule is given and what it returns: values of the rank's program with their layouts, and calls of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from wholestep.schedule.sharding.layout import Cut, Layout, Partial, Whole


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """One tensor of the rank's program."""

    node: fx.Node
    layout: Layout
    shape: tuple[int, ...]
    """As in the model, before anything was cut."""
    by: frozenset[str] = frozenset()
    """Parameters whose cut it has, or that it is a partial sum by."""
    kept: frozenset[str] = frozenset()
    """Parameters that were to be cut, stay whole, and reach it."""

    @property
    def is_whole(self) -> bool:
        return isinstance(self.layout, Whole)

    @property
    def is_partial(self) -> bool:
        return isinstance(self.layout, Partial)

    @property
    def cut(self) -> Cut | None:
        return self.layout if isinstance(self.layout, Cut) else None

    @property
    def example(self) -> Any:
        """A tensor without data, of the shape that one rank has."""
        return self.node.meta.get("example_value")

    @property
    def dim(self) -> int:
        return len(self.shape)

    @property
    def learns(self) -> bool:
        """Whether a gradient flows through it."""
        return isinstance(self.example, torch.Tensor) and self.example.requires_grad

    @property
    def is_float(self) -> bool:
        return isinstance(self.example, torch.Tensor) and self.example.is_floating_point()


@dataclasses.dataclass(slots=True)
class Called:
    """A call of the loss, with values in the place of nodes."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    """As `schedule/operators.py` names it, in place or not."""
    arguments: dict[str, Any]
    """By name, without those that are as by default."""
    writes: bool
    result: tuple[int, ...] | None
    """The shape of the result in the model; None where it has several, or is composed."""
    varies: bool = False
    """Whether that has sizes that vary."""

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    @property
    def first(self) -> Any:
        """What the call is about: its first argument."""
        return self.at(0)

    def at(self, place: int) -> Any:
        """An argument by its place, wherever it was written."""
        return self.args[place] if len(self.args) > place else list(self.kwargs.values())[place - len(self.args)]

    @property
    def values(self) -> list[Value]:
        return list(values_in((self.args, self.kwargs)))


def mapped(value: Any, change: Callable[[Value], Any]) -> Any:
    """A structure of arguments with its values replaced."""
    if isinstance(value, Value):
        return change(value)
    if isinstance(value, tuple):
        return tuple(mapped(one, change) for one in value)
    if isinstance(value, list):
        return [mapped(one, change) for one in value]
    if isinstance(value, dict):
        return {key: mapped(one, change) for key, one in value.items()}
    if isinstance(value, slice):
        return slice(mapped(value.start, change), mapped(value.stop, change), mapped(value.step, change))
    return value


def values_in(value: Any) -> Iterator[Value]:
    if isinstance(value, Value):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from values_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from values_in(one)
    elif isinstance(value, slice):
        yield from values_in((value.start, value.stop, value.step))


def plain_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Sizes as numbers; one that varies, as it was when the graph was captured."""
    return tuple(size if isinstance(size, int) else int(size.node.hint) for size in tensor.shape)
