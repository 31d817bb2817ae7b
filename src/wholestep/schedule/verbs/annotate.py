"""`annotate`: a remark of one's own on a parameter or module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wholestep.capture.edits import Change
from wholestep.errors import BadOption
from wholestep.schedule.changes import AttributeChange
from wholestep.schedule.modules import Modules
from wholestep.schedule.verb import Verb, verb


@verb
class annotate(Verb):
    """Give a parameter, or a module, an attribute of one's own, for code that reads it.

    key, value: the attribute. param: the parameter that gets it; without it the module does. Compiled, it is there while the
    loss is called; after build() it stays.
    Example: sch["embed"].annotate("lr_scale", 0.1, param="weight")
    """

    numbers = True

    key: str = ""
    value: Any = None
    param: str | None = None

    def check(self, modules: Modules) -> None:
        if not isinstance(self.key, str) or not self.key.isidentifier():
            raise BadOption(f"annotate {self.key!r}", hint="give the name of an attribute")
        if not isinstance(self.value, str | int | float | bool):
            raise BadOption(f"annotate {self.key}={self.value!r}", hint="give a text or a number")
        for path in modules.select(self.at):
            if hasattr(self._owner(modules, path), self.key):
                raise BadOption(f"{path or 'the model'} has an attribute {self.key!r} already", hint="use another name")

    def conflict(self, earlier: Verb, modules: Modules) -> str:
        assert isinstance(earlier, annotate)
        mine, theirs = (set(modules.first_names(modules.select(line.at)).values()) for line in (self, earlier))
        both = mine & theirs
        equal = (self.key, self.param) == (earlier.key, earlier.param)
        return f"both set {self.key} of {min(both)}" if both and equal else ""

    def changes(self, modules: Modules) -> Sequence[Change]:
        owners = {id(o): o for o in (self._owner(modules, path) for path in modules.select(self.at))}
        return [AttributeChange(owner, self.key, self.value) for owner in owners.values()]

    def _owner(self, modules: Modules, path: str) -> Any:
        return modules.select(path)[path] if self.param is None else modules.parameter(path, self.param)
