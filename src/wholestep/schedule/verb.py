"""What a verb is: a frozen record of one wish about a place of the model, with its check and what it turns into.

A verb is a class of its own in `verbs/`, registered under its name. Its fields are its arguments, so a recorded line can be
printed, compared, written to a file and read back without any code of the verb's own. Nothing is applied when it is recorded.
Functions, classes and modules among the arguments go to files as `package.module:name`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import nn

from wholestep.errors import BadOption, NotBuiltYet
from wholestep.graph.counted import counted
from wholestep.schedule.modules import Modules, nearest

if TYPE_CHECKING:
    from wholestep.capture.edits import Change, Rewrite

AUTO = "auto"
"""An argument that leaves it to the budget, or to measurement: as without the line."""
VERBS: dict[str, type[Verb]] = {}
"""By name, in the order of registration."""


def objects(default: Any = None) -> Any:
    """A field that holds a function, class or module: in files `package.module:name`."""
    return dataclasses.field(default=default, metadata={"object": True})


@dataclasses.dataclass(frozen=True, eq=False)
class Verb:
    """One line of a recipe."""

    at: str
    """The place: a module path or glob."""

    name: ClassVar[str] = ""
    numbers: ClassVar[bool] = False
    """Whether such a line makes another training of it; a file has a checksum of those."""

    def check(self, modules: Modules) -> None:
        """Raise where the model has no such place, or the arguments do not fit it."""
        modules.select(self.at)

    def places(self, modules: Modules) -> dict[str, nn.Module]:
        """The modules whose forward becomes another; no other line may be about them, or about what lies inside of them."""
        return {}

    def conflict(self, earlier: Verb, modules: Modules) -> str:
        """The module about which this line and an earlier one of the same verb contradict each other, in words; or nothing."""
        if "/" in earlier.at or "/" in self.at or earlier.meaning() == self.meaning():
            return ""
        # one module may have two names
        first, second = (set(modules.first_names(modules.select(line.at)).values()) for line in (earlier, self))
        shared = first & second
        if not shared or first < second or second < first:  # the narrower one counts
            return ""
        return f"both are about {min(shared) or 'the model'}"

    def changes(self, modules: Modules) -> Sequence[Change]:
        """What becomes of modules while the captured loss is called, and after `build()`."""
        return ()

    def rewrite(self) -> Rewrite | None:
        """What becomes of the graph of the forward pass, before autodiff."""
        return None

    def eager(self, modules: Modules) -> Sequence[Change]:
        """What `build()` does about it: the changes of modules, unless only a compiled step can carry it out."""
        found = self.changes(modules)
        if not found and AUTO not in self.arguments().values():
            hint = f"leave it out, or use compile(..., recipe=...); take it back with sch.undo({self.name!r})"
            raise BadOption(f"build() cannot carry out `{self}`: it is about a compiled step", hint=hint)
        return found

    def expects(self, modules: Modules) -> dict[str, str]:
        """What the line takes for granted about the model, to be looked at again when the recipe is read."""
        if "/" in self.at or not self.at:
            return {}
        found = modules.select(self.at)
        kinds = dict.fromkeys(type(module).__name__ for module in found.values())
        return {self.at: f"{len(found)} x {', '.join(kinds)}"}

    # ---- as data ----

    def arguments(self) -> dict[str, Any]:
        """All that is not as by default, without the place. A text that was read from a file is not the very default, but equal."""
        own = {field.name: (getattr(self, field.name), _default(field)) for field in dataclasses.fields(self)[1:]}
        return {n: v for n, (v, usual) in own.items() if not (v is usual or (isinstance(v, str) and v == usual))}

    def to_table(self) -> dict[str, Any]:
        """For a file: `{recompute = "layers.*", ratio = 0.5}`."""
        of_objects = {field.name for field in dataclasses.fields(self) if field.metadata.get("object")}
        given = self.arguments().items()
        return {self.name: self.at} | {n: _written(v, self) if n in of_objects else v for n, v in given}

    def meaning(self) -> dict[str, Any]:
        """The arguments, with functions and classes by name: a line of a file is equal to the one that was written to it."""
        of_objects = {f.name for f in dataclasses.fields(self) if f.metadata.get("object")}
        return {n: (named(v) or v) if n in of_objects else v for n, v in self.arguments().items()}

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and (other.at, other.meaning()) == (self.at, self.meaning())

    def __hash__(self) -> int:
        return hash((self.name, self.at))

    def full(self) -> str:
        """As it is printed, with all that tells one function from another of its name."""
        return " ".join([self.name, self.at or "(the model)", *(f"{n}={_full(v)}" for n, v in self.meaning().items())])

    def __str__(self) -> str:
        given = [f"{name}={shown(value)}" for name, value in self.arguments().items()]
        return " ".join([self.name, self.at or "(the model)", *given])


class NoEngineYet(Verb):
    """A verb that is recorded and checked; compiling with it says that it is not built."""

    def refuse(self, line: str) -> None:
        hint = "take it out of the recipe until the engine exists"
        raise NotBuiltYet(f"{line}: the verb `{self.name}` is recorded and checked, and not carried out yet", hint=hint)

    def eager(self, modules: Modules) -> Sequence[Change]:
        self.refuse(f"`{self}`")
        return ()


Made = TypeVar("Made", bound=Verb)


def verb(cls: type[Made]) -> type[Made]:
    """Register a verb; its fields are its arguments."""
    made = dataclasses.dataclass(frozen=True, repr=False, eq=False)(cls)
    made.name = cls.__name__
    VERBS[made.name] = made
    return made


def make(name: str, at: str, *args: Any, **kwargs: Any) -> Verb:
    """A line from a call or from a table of a file; one clear error for what there is not."""
    kind = known_verb(name)
    fields = [field.name for field in dataclasses.fields(kind)[1:]]
    for given in kwargs:
        if given not in fields:
            takes = f"it takes {', '.join(fields)}" if fields else "it takes none"
            raise BadOption(f"{name} has no argument {given!r}", hint=nearest(given, fields, takes))
    if len(args) > len(fields):
        takes = f"{name} takes {counted(len(fields), 'argument')}, {len(args)} were given"
        raise BadOption(takes, hint=f"see sch.help({name!r})")
    try:
        line = kind(at, *args, **kwargs)
    except TypeError as error:
        text = str(error).replace("__init__()", f"{name}()").replace(f"{kind.__name__}.{name}", name)
        raise BadOption(f"{text}", hint=f"see sch.help({name!r})") from None
    _check_kinds(line)
    return line


def _check_kinds(line: Verb) -> None:
    """What is a name or a table by its annotation has to be one; numbers are looked at by each verb."""
    for field in dataclasses.fields(line)[1:]:
        value, kinds = getattr(line, field.name), [one.strip() for one in str(field.type).split("|")]
        missing = value is None and "None" in kinds
        if kinds[0] == "str" and not isinstance(value, str) and not missing:
            raise BadOption(f"{line.name} {field.name}={value!r}", hint=f"give a text; see sch.help({line.name!r})")
        if kinds[0].startswith("Mapping") and not isinstance(value, Mapping) and not missing:
            raise BadOption(f"{line.name} {field.name}={value!r}", hint="give a table {name: name}")


def known_verb(name: str) -> type[Verb]:
    if not isinstance(name, str) or name not in VERBS:
        raise BadOption(
            f"there is no verb {name!r}", hint=nearest(str(name), list(VERBS), f"verbs are {', '.join(VERBS)}")
        )
    return VERBS[name]


def help_of(name: str | None = None) -> str:
    """What a verb does and takes; without a name, all of them in a line each."""
    if name is None:
        width = max(map(len, VERBS))
        return "\n".join(f"{n:<{width}}  {_doc(kind).splitlines()[0]}" for n, kind in VERBS.items())
    kind = known_verb(name)
    listed = [f"{f.name}={_default(f)!r}" if _has_default(f) else f.name for f in dataclasses.fields(kind)[1:]]
    return f'sch["path"].{name}({", ".join(listed)})\n\n{_doc(kind)}'


def _doc(kind: type[Verb]) -> str:
    return inspect.cleandoc(kind.__doc__ or "")


# ---- functions, classes and modules by name ----


def named(value: Any) -> str | None:
    """`package.module:name` of what can be found again under that name; None for anything else (a lambda, a local class)."""
    if isinstance(value, str):
        return value
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not module or not name or "<" in name or module == "__main__":
        return None
    found = f"{module}:{name}"
    try:
        return found if loaded(found) is value else None
    except BadOption:
        return None


def loaded(value: Any) -> Any:
    """What a name stands for; anything but a text is that already."""
    if not isinstance(value, str):
        return value
    module, colon, name = value.partition(":")
    if not colon or not module or not name:
        raise BadOption(f"{value!r} is no name of a function or class", hint="write it as package.module:name")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise BadOption(f"{value!r} cannot be imported: {error}", hint="is its folder on PYTHONPATH?") from None
    for part in name.split("."):
        if not hasattr(found, part):
            known = [entry for entry in vars(found) if not entry.startswith("_")]
            raise BadOption(f"there is no {part!r} in {module}", hint=nearest(part, known, "look at its name"))
        found = getattr(found, part)
    return found


def _written(value: Any, line: Verb) -> str:
    name = named(value)
    if name is None:
        hint = "define it at the top level of a module that can be imported, or give its name as 'package.module:name'"
        raise BadOption(f"`{line}` cannot be written to a file: {shown(value)} has no name", hint=hint)
    return name


def shown(value: Any) -> str:
    """An argument, for people."""
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, nn.Module):
        return type(value).__name__ + "()"
    if callable(value):
        return getattr(value, "__qualname__", None) or repr(value)
    return repr(value)


def _full(value: Any) -> str:
    code = getattr(value, "__code__", None)
    return shown(value) if code is None else f"{shown(value)} (line {code.co_firstlineno} of {code.co_filename})"


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING
