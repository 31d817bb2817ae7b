"""Patterns: operators written as a plain function, `lambda x, w, b: gelu(linear(x, w, b))`, as a small graph to look for.

The parameters of the function stand for any value; one that is used twice stands for one and the same value. The function is run
once on symbols, so it may call torch functions and methods of tensors, and must not branch on them nor capture tensors.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from wholestep.errors import BadOption
from wholestep.schedule.operators import Call, call_of

HELP = "write the operators as a function of their inputs: lambda x, w, b: gelu(linear(x, w, b))"


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A function as a graph."""

    name: str
    inputs: tuple[fx.Node, ...]
    calls: dict[fx.Node, Call]
    """In order."""
    outputs: tuple[fx.Node, ...]
    several: bool
    """Whether the function returns a tuple."""

    @property
    def interior(self) -> set[fx.Node]:
        """Calls whose results only the pattern itself may read."""
        return set(self.calls) - set(self.outputs)

    def parameters(self) -> list[str]:
        return [str(node.target) for node in self.inputs]


def trace_pattern(function: Callable[..., Any]) -> Pattern:
    """The pattern of a function; one clear line for what cannot be one."""
    name = getattr(function, "__name__", type(function).__name__)
    graph = _traced(function, name)
    graph.eliminate_dead_code()
    inputs = tuple(node for node in graph.nodes if node.op == "placeholder")
    calls: dict[fx.Node, Call] = {}
    for node in graph.nodes:
        found = call_of(node)
        if node.op in ("get_attr", "call_module"):
            what = "captures a tensor" if node.op == "get_attr" else f"calls the module {node.target}"
            raise BadOption(f"the pattern {name} {what}", hint=f"make it a parameter; {HELP}")
        if found is not None:
            if found.name == "builtins.getattr":
                what = f"reads the attribute {node.args[1]!r} of a value"
                raise BadOption(f"the pattern {name} {what}", hint="write what it is as a number, or call a method")
            if found.writes:
                raise BadOption(f"the pattern {name} writes in place ({found.name})", hint="use the form that does not")
            calls[node] = found
    returned = next(node for node in graph.nodes if node.op == "output").args[0]
    several = isinstance(returned, tuple | list)
    outputs = tuple(returned) if several else (returned,)
    if not calls or not all(isinstance(node, fx.Node) and node in calls for node in outputs):
        raise BadOption(f"the pattern {name} must return what its operators compute", hint=HELP)
    if len(set(outputs)) != len(outputs):
        raise BadOption(f"the pattern {name} returns one value twice", hint="return it once")
    found_pattern = Pattern(name, inputs, calls, outputs, several)
    _refuse_parts(found_pattern)
    return found_pattern


def _traced(function: Callable[..., Any], name: str) -> fx.Graph:
    if isinstance(function, nn.Module) or not callable(function):
        raise BadOption(f"{type(function).__name__} is no pattern", hint=HELP)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise BadOption(f"the parameters of {name} cannot be read", hint=HELP) from None
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
        raise BadOption(f"the pattern {name} takes *args, **kwargs or keywords", hint="name its inputs one by one")
    if captured_tensors(function):
        raise BadOption(f"the pattern {name} captures a tensor", hint=f"make it a parameter; {HELP}")
    try:
        return fx.Tracer().trace(function)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        hint = "it may call torch functions and methods of tensors, and branch on nothing"
        raise BadOption(f"{name} cannot be read as a pattern: {reason}", hint=hint) from None


def captured_tensors(function: Any) -> bool:
    """Whether a function has tensors or modules in its closure, or names ones of its module."""
    code = getattr(function, "__code__", None)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _filled(cell)]
    names = () if code is None else code.co_names
    held = [function.__globals__.get(name) for name in names] if code is not None else []
    return any(isinstance(value, torch.Tensor | nn.Module) for value in (*cells, *held))


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _refuse_parts(pattern: Pattern) -> None:
    """Outputs that share nothing are several patterns: which of their matches belong together, nobody could say."""
    groups = [_behind(node) for node in pattern.outputs]
    joined = groups[0]
    for _ in groups:
        for group in groups:
            if joined & group:
                joined = joined | group
    if any(not group <= joined for group in groups):
        hint = "let its outputs share an input, or look for each by itself"
        raise BadOption(f"the pattern {pattern.name} has parts that share nothing", hint=hint)


def _behind(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        one = stack.pop()
        if one not in found:
            found.add(one)
            stack += one.all_input_nodes
    return found
