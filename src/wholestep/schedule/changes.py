"""Changes of modules: a module computes another forward, and stays the module it is.

A module is not rebuilt: its class becomes a subclass whose forward is another, as `nn/swap.py` does it. So its parameters, its
keys in the state_dict, its hooks, what `isinstance` says and every reference to it are what they were, and taking it back is
exact. A module that takes the place of another holds the very parameters of that one (`carried`): it brings none of its own.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from wholestep.errors import BadOption
from wholestep.schedule.modules import nearest

Forward = Callable[..., Any]


class Edited:
    """What changed classes share."""


@dataclasses.dataclass(eq=False)
class ClassChange:
    """A module whose class is another meanwhile."""

    module: nn.Module
    forward: Callable[[type[nn.Module]], Forward]
    """The class that it has -> the forward that it gets."""
    what: str
    """The beginning of the class's name."""
    wraps: bool = False
    """Whether it calls the forward that it takes the place of: such changes come last."""
    becomes: type[nn.Module] | None = None
    """A class that is there already."""
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Put into the module's own dict meanwhile."""
    methods: Mapping[str, Callable[[type[nn.Module]], Any]] = dataclasses.field(default_factory=dict)
    """Others than forward, made from the new class."""
    before: Callable[[], None] = lambda: None
    """Called each time the change is made."""
    after: Callable[[], None] = lambda: None
    """Called when a call with the change is over."""
    was: list[type[nn.Module]] = dataclasses.field(default_factory=list)
    made: dict[type[nn.Module], type[nn.Module]] = dataclasses.field(default_factory=dict)
    """Class -> the one it becomes, always the same: guards of captured graphs ask for it."""

    def apply(self) -> None:
        self.before()
        was = type(self.module)
        if was not in self.made:
            self.made[was] = self._class(was)
        self.was.append(was)
        self.module.__dict__.update(self.attributes)
        self.module.__class__ = self.made[was]

    def _class(self, original: type[nn.Module]) -> type[nn.Module]:
        if self.becomes is not None:
            return self.becomes
        name = f"{self.what}{original.__name__}"
        members = {"forward": self.forward(original), "__module__": original.__module__, "__qualname__": name}
        bases = (original,) if issubclass(original, Edited) else (Edited, original)  # of one that is changed already
        made: type[nn.Module] = type(name, bases, members)
        for method, of in self.methods.items():
            setattr(made, method, of(made))
        return made

    def undo(self) -> None:
        self.module.__class__ = self.was.pop()
        for name in self.attributes:
            self.module.__dict__.pop(name, None)

    def told(self) -> None:
        self.after()


@dataclasses.dataclass(eq=False)
class AttributeChange:
    """An attribute that a tensor or module has meanwhile."""

    owner: Any
    name: str
    value: Any
    wraps: bool = True

    def apply(self) -> None:
        setattr(self.owner, self.name, self.value)

    def undo(self) -> None:
        delattr(self.owner, self.name)

    def told(self) -> None:
        pass


def refuse_edited(path: str, module: nn.Module) -> None:
    """A model that `build()` has changed already would be changed twice; a forward of the instance's own would hide the change."""
    if "forward" in module.__dict__ or isinstance(module, torch.jit.ScriptModule):
        what = (
            "has a forward that was put on the instance" if "forward" in module.__dict__ else "is a TorchScript module"
        )
        hint = "undo that patch (a hook of accelerate, for one), or leave this module out"
        raise BadOption(f"{path or 'the model'} {what}, which a changed class would not reach", hint=hint)
    if isinstance(module, Edited):
        hint = "compile it without recipe=, or call sch.restore() first"
        raise BadOption(f"{path or 'the model'} is changed by build() already", hint=hint)


# ---- another module in the place of one ----

INNER = "_wholestep_in_place"
"""Attribute under which the module that computes lies; not registered, so that no key changes."""


def module_change(path: str, module: nn.Module, new: nn.Module, params: Mapping[str, str] | None) -> ClassChange:
    """`new` computes in the place of `module`, on its parameters and buffers."""
    refuse_edited(path, module)
    pairs = carried(path, module, new, params)
    refuse_lost_arguments(path, module.forward, new.forward, type(new).__name__)
    _refuse_inner_hooks(path, module)

    def tie() -> None:
        """Parameters may have been put in the place of others; so may the flag."""
        for new_name, old_name in pairs.items():
            _put(new, new_name, _get(module, old_name))
        new.train(module.training)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._wholestep_in_place(*args, **kwargs)

    def train_of(made: type[nn.Module]) -> Any:
        def train(self: Any, mode: bool = True) -> Any:
            self._wholestep_in_place.train(mode)
            return super(made, self).train(mode)  # type: ignore[misc]

        return train

    tie()
    what = f"{type(new).__name__}For"
    return ClassChange(
        module, lambda original: forward, what, attributes={INNER: new}, methods={"train": train_of}, before=tie
    )


def function_change(path: str, module: nn.Module, function: Forward, what: str = "Replaced") -> ClassChange:
    """`function(module, *args)` in the place of its forward."""
    refuse_edited(path, module)
    return ClassChange(module, lambda original: function, what)


def wrapping_change(
    path: str, module: nn.Module, wrap: Callable[[type[nn.Module]], Forward], what: str, **more: Any
) -> ClassChange:
    """A forward around the one that the module has by then."""
    refuse_edited(path, module)
    return ClassChange(module, wrap, what, wraps=True, **more)


def carried(path: str, module: nn.Module, new: nn.Module, params: Mapping[str, str] | None) -> dict[str, str]:
    """Name of every parameter and persistent buffer of `new` -> the one of `module` that it is; all of both, of equal shapes."""
    old, wanted = _state(module), _state(new)
    names = {name: name for name in wanted if name in old} | dict(params or {})
    where = path or "the model"
    for name, source in names.items():
        if name not in wanted:
            hint = nearest(name, list(wanted), f"it has {', '.join(wanted) or 'none'}")
            raise BadOption(f"{where}: params names {name!r}, which {type(new).__name__} does not have", hint=hint)
        if source not in old:
            hint = nearest(source, list(old), f"it has {', '.join(old) or 'none'}")
            raise BadOption(f"{where} has no {source!r}", hint=hint)
        mine, theirs = wanted[name], old[source]
        if mine.shape != theirs.shape:
            shapes = f"{tuple(mine.shape)} of {type(new).__name__}.{name}, {tuple(theirs.shape)} of {where}.{source}"
            raise BadOption(f"{where}: shapes differ: {shapes}", hint="build the new module with the same sizes")
    for name in wanted:
        if name not in names:
            hint = f"say which of {', '.join(old) or 'none'} it is: params={{{name!r}: ...}}"
            raise BadOption(f"{where}: {type(new).__name__} has a parameter {name!r} of its own", hint=hint)
    for name in old:
        if name not in names.values():
            hint = f"a parameter that nobody reads would not be trained: params={{...: {name!r}}}"
            raise BadOption(f"{where}: {type(new).__name__} does not take over {name!r}", hint=hint)
    return names


def refuse_lost_arguments(path: str, old: Forward, new: Forward, name: str) -> None:
    """An argument that the old forward takes and the new one does not would be an error at the call, or lost."""
    before, after = inspect.signature(old).parameters, inspect.signature(new).parameters
    if any(p.kind is p.VAR_KEYWORD for p in after.values()):
        return
    for argument, kind in before.items():
        if kind.kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD) and argument not in after:
            by_place = len(before) == len(after) == 1  # the one argument has another name in every class
            if not by_place:
                hint = f"give its forward an argument {argument!r}, or **kwargs"
                raise BadOption(f"{path or 'the model'}: {name} does not take {argument!r}", hint=hint)


def _refuse_inner_hooks(path: str, module: nn.Module) -> None:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for name, inner in module.named_modules():
        if name and any(getattr(inner, table, None) for table in tables):
            hint = "remove the hook, or replace the inner modules one by one"
            raise BadOption(f"{path}.{name} has a hook, which would no longer run", hint=hint)


def copied(new: nn.Module, path: str) -> nn.Module:
    """One of its own for every place; parameters are carried over anyway."""
    try:
        return copy.deepcopy(new)
    except Exception as error:
        hint = "give make=, a function (path, module) -> module"
        raise BadOption(f"{path}: {type(new).__name__} cannot be copied: {error}", hint=hint) from None


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, by name."""
    keys = module.state_dict(keep_vars=True)
    return {name: value for name, value in keys.items() if isinstance(value, torch.Tensor)}


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


def _get(module: nn.Module, name: str) -> torch.Tensor:
    owner, last = _owner(module, name)
    found: torch.Tensor = getattr(owner, last)
    return found


def _put(module: nn.Module, name: str, value: torch.Tensor) -> None:
    owner, last = _owner(module, name)
    if last in owner._parameters:
        owner._parameters[last] = value
    else:
        owner._buffers[last] = value
