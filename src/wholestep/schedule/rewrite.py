"""Rewrites of the forward pass: Dynamo's graph of the loss in, the same with matched operators replaced or marked.

This is the graph before autodiff: a replacement brings its own backward, and a value that only the pattern reads has no readers
in a backward pass yet. A match belongs to the innermost module that all its calls lie in; a scope takes those of its modules.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from wholestep.capture.front.replay import MATCHED, path_of, user_line
from wholestep.errors import BadOption, WholestepWarning
from wholestep.schedule.match import Match, apart, matches
from wholestep.schedule.modules import nearest, within
from wholestep.schedule.operators import call_of
from wholestep.schedule.pattern import Pattern

Act: TypeAlias = Callable[[fx.GraphModule, "Found", dict[fx.Node, fx.Node]], None]
"""What is done with one match; the last argument knows by what earlier matches of the graph were replaced."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A match in a model: where it is."""

    module: str
    source: str | None
    match: Match

    def __str__(self) -> str:
        names = ", ".join(node.name for node in self.match.nodes)
        place = f" ({self.source})" if self.source else ""
        return f"{self.module or '(the model)'}: {names}{place}"


def found_in(graph: fx.Graph, pattern: Pattern, paths: Mapping[int, str], scope: Callable[[str], bool]) -> list[Found]:
    """Matches of a pattern that share no call, within the modules of a scope."""
    placed = [Found(*_place(match, paths), match) for match in matches(graph, pattern)]
    wanted = {id(found.match): found for found in placed if scope(found.module)}
    return [wanted[id(match)] for match in apart([found.match for found in wanted.values()])]


def _place(match: Match, paths: Mapping[int, str]) -> tuple[str, str | None]:
    """The innermost module that all calls of a match lie in, and the user's line of its last call."""
    stacks = [path_of(node.meta.get("nn_module_stack") or {}, paths).split(".") for node in match.nodes]
    shared = [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*stacks))]
    return ".".join(shared), user_line(match.outputs[-1].meta.get("stack_trace") or "")


@dataclasses.dataclass(eq=False)
class PatternRewrite:
    """One line of a recipe that is about matched operators, carried out on every graph of a loss."""

    line: str
    """For people."""
    pattern: Pattern
    at: str
    """The place: a module path or glob."""
    act: Act
    one: bool = False
    """Whether there may be one match only."""
    met: bool = False
    """Whether it ever matched: a graph in eval mode need not have it."""

    def __call__(self, module: fx.GraphModule, paths: Mapping[int, str]) -> None:
        graph = module.graph
        found = found_in(graph, self.pattern, paths, lambda path: within(path, self.at))
        if not found and not self.met:
            raise BadOption(f"{self.line}: nothing in the forward pass matches", hint=_why_not(graph, self.pattern))
        if self.one and len(found) > 1:
            hint = "name a narrower place, or use replace_all"
            raise BadOption(f"{self.line}: {len(found)} places match, {found[0]} and {found[1]} among them", hint=hint)
        if not found:
            text = f"{self.line}: nothing matches in a graph that was captured anew, which runs as it was written"
            warnings.warn(text, WholestepWarning, stacklevel=2)
        self.met = self.met or bool(found)
        renamed: dict[fx.Node, fx.Node] = {}
        for one in found:
            self.act(module, one, renamed)
        module.recompile()


def _why_not(graph: fx.Graph, pattern: Pattern) -> str:
    """Which operator of a pattern a graph does not have, or what else may be the reason."""
    known = {call.name for node in graph.nodes if (call := call_of(node)) is not None}
    lacking = [call.name for call in pattern.calls.values() if call.name not in known]
    if lacking:
        return f"it has no {lacking[0]}: " + nearest(lacking[0], sorted(known), f"there are {', '.join(sorted(known))}")
    return "its operators are there, connected otherwise, with other constants, or their results are read elsewhere too"


# ---- what is done with a match ----


def marker(number: str) -> Act:
    """Marks the matched calls; what autodiff and the passes make of them keeps the mark."""

    def act(module: fx.GraphModule, found: Found, renamed: dict[fx.Node, fx.Node]) -> None:
        for node in found.match.nodes:
            before = node.meta.get(MATCHED)  # another line may be about it too
            node.meta[MATCHED] = number if before is None else f"{before}\n{number}"

    return act


def replacer(line: str, pattern: Pattern, function: Callable[..., Any]) -> Act:
    """Puts `function`, of the pattern's inputs, in the place of the matched calls."""

    def act(module: fx.GraphModule, found: Found, renamed: dict[fx.Node, fx.Node]) -> None:
        match, graph = found.match, module.graph
        inputs = fx.map_arg(match.inputs, lambda value: renamed.get(value, value))  # what another match computed before
        order = {node: index for index, node in enumerate(graph.nodes)}
        last = max(match.nodes, key=order.__getitem__)
        with graph.inserting_after(last):
            made = graph.call_function(function, inputs)
        _describe(made, match.outputs[-1])
        _check_result(line, function, match, pattern.several)
        results = [made]
        if pattern.several:
            after = made
            results = []
            for index, output in enumerate(match.outputs):
                with graph.inserting_after(after):
                    after = graph.call_function(_item, (made, index))
                _describe(after, output)
                results.append(after)
        _move_readers(match, results[-1], order)
        renamed.update(zip(match.outputs, results, strict=True))
        for output, result in zip(match.outputs, results, strict=True):
            output.replace_all_uses_with(result, delete_user_cb=lambda user: user is not made)
        for node in sorted(match.nodes, key=order.__getitem__, reverse=True):
            if not node.users:
                graph.erase_node(node)

    return act


def _item(values: Any, index: int) -> Any:
    return values[index]


def _describe(node: fx.Node, like: fx.Node) -> None:
    node.meta = {key: like.meta[key] for key in ("nn_module_stack", "stack_trace", "example_value") if key in like.meta}


def _move_readers(match: Match, behind: fx.Node, order: Mapping[fx.Node, int]) -> None:
    """What reads a result and stands before the last call of the match goes behind it, in its order."""
    nodes, place = set(match.nodes), max(order[node] for node in match.nodes)
    early: set[fx.Node] = set()
    stack = [user for out in match.outputs for user in out.users]
    while stack:
        node = stack.pop()
        if node in order and node not in nodes and node not in early and order[node] < place:
            early.add(node)
            stack += list(node.users)
    for node in sorted(early, key=order.__getitem__, reverse=True):
        behind.append(node)


def _check_result(line: str, function: Callable[..., Any], match: Match, several: bool) -> None:
    """Run the replacement on tensors without data: its results must have the shapes and types of what it replaces."""
    values = [one.meta.get("example_value") if isinstance(one, fx.Node) else one for one in match.inputs]
    wanted = [out.meta.get("example_value") for out in match.outputs]
    mode = next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)
    if mode is None:
        return
    try:
        with mode, torch.no_grad():
            found = function(*values)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0][:160]
        hint = "it is called with the inputs of the pattern, in their order"
        raise BadOption(f"{line}: the replacement fails: {type(error).__name__}: {reason}", hint=hint) from None
    results = list(found) if several and isinstance(found, tuple | list) else [found]
    shown = [_kind(value) for value in results], [_kind(value) for value in wanted]
    if shown[0] != shown[1]:
        raise BadOption(f"{line}: the replacement returns {shown[0]} where the model computes {shown[1]}")


def _kind(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__


def with_module(line: str, pattern: Pattern, module: torch.nn.Module, params: Mapping[str, str]) -> Callable[..., Any]:
    """A module as a function of a pattern's inputs: those that `params` names are its parameters, the others its arguments."""
    flagged = [name for name, inner in module.named_modules() if isinstance(inner, _DropoutNd | _NormBase)]
    if flagged:
        hint = "compute the same with functions that take the flag, or replace a whole module"
        raise BadOption(f"{line}: {type(module).__name__}.{flagged[0]} computes otherwise in eval mode", hint=hint)
    inputs, own = pattern.parameters(), [name for name, _ in module.named_parameters()]
    for name in own:
        if name not in params:
            hint = f"say which input of the pattern it is: params={{{name!r}: ...}}"
            raise BadOption(f"{line}: {type(module).__name__} has a parameter {name!r} of its own", hint=hint)
    for name, source in params.items():
        if name not in own:
            raise BadOption(f"{line}: {type(module).__name__} has no parameter {name!r}", hint=nearest(name, own, ""))
        if source not in inputs:
            hint = nearest(source, inputs, f"they are {', '.join(inputs)}")
            raise BadOption(f"{line}: the pattern has no input {source!r}", hint=hint)
    arguments = [i for i, name in enumerate(inputs) if name not in params.values()]
    places = {name: inputs.index(source) for name, source in params.items()}

    def called(*values: Any) -> Any:
        return functional_call(module, {n: values[i] for n, i in places.items()}, tuple(values[i] for i in arguments))

    return called
