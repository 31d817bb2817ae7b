"""`fuse`: a module, or matched operators, are compiled as one region."""

from __future__ import annotations

from typing import Any

from wholestep.capture.edits import Rewrite
from wholestep.schedule import rewrite
from wholestep.schedule.modules import Modules
from wholestep.schedule.pattern import trace_pattern
from wholestep.schedule.verb import Verb, loaded, objects, verb


@verb
class fuse(Verb):
    """Compile a module, or the operators that match a pattern in it, as one region of its own.

    pattern: operators as a plain function; without it, all that the module computes.

    Forward and backward are a region each. Without the verb a region is a layer, or all that lies between layers.
    Example: sch["layers.*.mlp"].fuse()
    """

    pattern: Any = objects()

    def check(self, modules: Modules) -> None:
        modules.select(self.at)
        if self.pattern is not None:
            trace_pattern(loaded(self.pattern))

    def rewrite(self) -> Rewrite | None:
        if self.pattern is None:
            return None
        pattern = trace_pattern(loaded(self.pattern))
        return rewrite.PatternRewrite(str(self), pattern, self.at, rewrite.marker(str(self)))
