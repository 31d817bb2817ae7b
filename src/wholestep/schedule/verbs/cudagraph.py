"""`cudagraph`: whether a step is recorded as a CUDA graph."""

from __future__ import annotations

from wholestep.errors import BadOption
from wholestep.schedule.modules import Modules
from wholestep.schedule.verb import AUTO, Verb, verb


@verb
class cudagraph(Verb):
    """Record the whole step as a CUDA graph and replay it, or never do.

    record: True, False, or "auto": where it measures faster. On a CPU there is nothing to record.
    Example: sch.cudagraph(False)
    """

    record: bool | str = True

    def check(self, modules: Modules) -> None:
        if self.at:
            raise BadOption(f"cudagraph at {self.at!r}", hint="a step is recorded as a whole: sch.cudagraph()")
        if not isinstance(self.record, bool) and self.record != AUTO:
            raise BadOption(f"cudagraph {self.record!r}", hint="give True, False or auto")
