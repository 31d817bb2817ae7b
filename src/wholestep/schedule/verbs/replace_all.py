"""`replace_all`: the same for every module of a class, or every match of a pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from wholestep.capture.edits import Change, Rewrite
from wholestep.errors import BadOption
from wholestep.schedule.modules import Modules, inside
from wholestep.schedule.verb import Verb, loaded, objects, verb
from wholestep.schedule.verbs.replace import pattern_rewrite, replaced


@verb
class replace_all(Verb):
    """Compute every module of a class, or every match of a pattern, by something else.

    what: a class of modules (nn.LayerNorm), or operators as a plain function (lambda x, b: gelu(x + b)).
    by, make, params: as for `replace`.

    At least one has to be found, at or below the place. Example: sch.replace_all(nn.LayerNorm, "lean")
    """

    numbers = True

    what: Any = objects()
    by: Any = objects()
    params: Mapping[str, str] | None = None
    make: Any = objects()

    def check(self, modules: Modules) -> None:
        modules.select(self.at)
        if self.what is None or (self.by is None) == (self.make is None):
            raise BadOption("replace_all takes what, and one of by= and make=", hint='see sch.help("replace_all")')
        if isinstance(loaded(self.what), type):
            self.changes(modules)
        else:
            self.rewrite()

    def conflict(self, earlier: Verb, modules: Modules) -> str:
        return ""  # as for `replace`

    def places(self, modules: Modules) -> dict[str, nn.Module]:
        kind = loaded(self.what)
        if not isinstance(kind, type):
            return {}
        scopes = modules.select(self.at)
        found = {p: m for p, m in modules if isinstance(m, kind) and any(inside(p, at) for at in scopes)}
        if not found:
            kinds = sorted({type(m).__name__ for _, m in modules})
            raise BadOption(
                f"there is no {kind.__name__} in {self.at or 'the model'}", hint=f"it has {', '.join(kinds)}"
            )
        return found

    def changes(self, modules: Modules) -> Sequence[Change]:
        return replaced(self.places(modules), self.by, self.make, self.params)

    def rewrite(self) -> Rewrite | None:
        return None if isinstance(loaded(self.what), type) else pattern_rewrite(self, self.what, one=False)
