"""`replace`: another module or function computes what one does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from wholestep.capture.edits import Change, Rewrite
from wholestep.errors import BadOption
from wholestep.nn.known import recognise
from wholestep.nn.styles import MARK
from wholestep.schedule import rewrite
from wholestep.schedule.changes import (
    ClassChange,
    copied,
    function_change,
    module_change,
    refuse_edited,
    refuse_lost_arguments,
)
from wholestep.schedule.modules import Modules, nearest, once
from wholestep.schedule.pattern import trace_pattern
from wholestep.schedule.verb import Verb, loaded, objects, verb

LEAN = "lean"
"""As `by`: the form of the layer that keeps less for the backward (`wholestep.nn`), bit for bit the same."""


@verb
class replace(Verb):
    """Compute a module, or the operators that match a pattern in it, by something else.

    by: a Module, which takes over every parameter and buffer of the old one, by equal name or as `params` says
        ({"its name": "the old one's"}), of equal shape, none left over; or a function (module, *args) that takes the place of
        forward; or a subclass of the module's class; or "lean", the layer of wholestep.nn that keeps less.
    make: instead of `by`, a function (path, module) that makes such a Module for each place.
    pattern: operators as a plain function, such as lambda x, w, b: gelu(linear(x, w, b)), of which there must be one match;
        `by` is then a function of the same inputs, or a Module whose parameters are inputs of the pattern (`params`).

    The module stays the object it is: keys, parameters, hooks, isinstance and references are what they were.
    Example: sch["layers.*.mlp"].replace(FastMLP(64), params={"up.weight": "fc1.weight", "down.weight": "fc2.weight"})
    """

    numbers = True

    by: Any = objects()
    params: Mapping[str, str] | None = None
    make: Any = objects()
    pattern: Any = objects()

    def check(self, modules: Modules) -> None:
        modules.select(self.at)
        _one_of(self.by, self.make)
        if self.pattern is not None:
            self.rewrite()
        else:
            self.changes(modules)

    def conflict(self, earlier: Verb, modules: Modules) -> str:
        return ""  # of two lines about one module as of any others; matched operators are looked for in order

    def places(self, modules: Modules) -> dict[str, nn.Module]:
        """The modules that are replaced."""
        return modules.select(self.at) if self.pattern is None else {}

    def changes(self, modules: Modules) -> Sequence[Change]:
        return replaced(self.places(modules), self.by, self.make, self.params)

    def rewrite(self) -> Rewrite | None:
        return pattern_rewrite(self, self.pattern, one=True) if self.pattern is not None else None


def _one_of(by: Any, make: Any) -> None:
    if (by is None) == (make is None):
        raise BadOption("replace takes one of by= and make=", hint='see sch.help("replace")')


def replaced(
    places: Mapping[str, nn.Module], by: Any, make: Any, params: Mapping[str, str] | None
) -> list[ClassChange]:
    """The change of every place; a module that has two names is changed once."""
    places = once(places)
    if by == LEAN:
        return [_lean(path, module) for path, module in places.items()]
    if isinstance(by, str) and ":" not in by:
        raise BadOption(f"by={by!r}", hint=nearest(by, [LEAN], 'give "lean", or a name as package.module:name'))
    new, maker = loaded(by), loaded(make)
    if maker is not None and not callable(maker):
        raise BadOption(f"make={make!r}", hint="give a function (path, module) that makes a Module")
    found = []
    for path, module in places.items():
        if maker is not None:
            found.append(module_change(path, module, _made(maker, path, module), params))
        elif isinstance(new, nn.Module):
            found.append(module_change(path, module, copied(new, path), params))
        elif isinstance(new, type):
            found.append(_subclass(path, module, new))
        elif callable(new):
            refuse_lost_arguments(path, module.forward, _without_module(new), getattr(new, "__name__", "the function"))
            found.append(function_change(path, module, new))
        else:
            raise BadOption(f"by={new!r}", hint='give a Module, a function (module, *args), a subclass, or "lean"')
    return found


def _made(maker: Callable[[str, nn.Module], Any], path: str, module: nn.Module) -> nn.Module:
    """What the user's function makes for one place."""
    try:
        made = maker(path, module)
    except Exception as error:
        hint = "it is called with the path and the module"
        raise BadOption(f"{path}: make fails: {type(error).__name__}: {error}", hint=hint) from error
    if not isinstance(made, nn.Module):
        raise BadOption(f"{path}: make returned a {type(made).__name__}", hint="return a torch.nn.Module")
    if any(part is module for part in made.modules()):
        raise BadOption(f"{path}: what make returned holds the module that it replaces", hint="build a new module")
    return made


def _without_module(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same signature without its first parameter."""
    signature = inspect.signature(function)

    def rest(*args: Any, **kwargs: Any) -> None: ...

    listed = list(signature.parameters.values())
    if listed and listed[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        listed = listed[1:]
    rest.__signature__ = signature.replace(parameters=listed)  # type: ignore[attr-defined]
    return rest


def _subclass(path: str, module: nn.Module, kind: type) -> ClassChange:
    if not issubclass(kind, type(module)):
        hint = f"give a subclass of {type(module).__name__}, or a Module with params="
        raise BadOption(f"{path}: {kind.__name__} is no subclass of {type(module).__name__}", hint=hint)
    return function_change(path, module, kind.forward, kind.__name__)  # type: ignore[attr-defined]


def _lean(path: str, module: nn.Module) -> ClassChange:
    refuse_edited(path, module)
    found = recognise(module, planned=True)
    if found is None or isinstance(found, str):
        reason = found or f"no lean form of {type(module).__name__} is known"
        raise BadOption(f"{path}: {reason}", hint="see docs/lean-layers.md")
    kind = type(module)  # what the lean forms of other libraries' layers call
    return ClassChange(
        module, lambda original: original.forward, "Lean", becomes=found.becomes, attributes={MARK: kind}
    )


# ---- matched operators ----


def pattern_rewrite(line: Any, pattern: Any, *, one: bool) -> Rewrite:
    """The rewrite that puts `line.by` in the place of a pattern's matches."""
    traced, new = trace_pattern(loaded(pattern)), loaded(line.by)
    if line.make is not None or new is None:
        raise BadOption("matched operators are replaced by=, a function or a Module", hint='see sch.help("replace")')
    if isinstance(new, nn.Module):
        function = rewrite.with_module(str(line), traced, new, line.params or {})
    elif callable(new) and not isinstance(new, type):
        takes = [p for p in inspect.signature(new).parameters.values() if p.kind is not p.KEYWORD_ONLY]
        least = sum(p.default is p.empty and p.kind is not p.VAR_POSITIONAL for p in takes)
        any_number = any(p.kind is p.VAR_POSITIONAL for p in takes)
        if not least <= len(traced.inputs) <= (len(traced.inputs) if any_number else len(takes)):
            inputs = ", ".join(traced.parameters())
            raise BadOption(f"by= must take the inputs of the pattern: {inputs}", hint="in their order")
        function = new
    else:
        raise BadOption(f"by={new!r} cannot take the place of operators", hint="give a function or a Module")
    return rewrite.PatternRewrite(str(line), traced, line.at, rewrite.replacer(str(line), traced, function), one)
