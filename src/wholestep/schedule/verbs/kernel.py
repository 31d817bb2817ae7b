"""`kernel`: which implementation of an operator is taken."""

from __future__ import annotations

from wholestep.errors import BadOption
from wholestep.schedule.modules import Modules
from wholestep.schedule.verb import AUTO, Verb, verb


@verb
class kernel(Verb):
    """Take one implementation of the operators of a module that have several, or never take one.

    take: its name, such as "flash" or "math"; "auto" measures, as without the line.
    forbid: a name that is never taken; the fastest of the others is.

    A name that does not support the call on this machine is an error. Example: sch["layers.*.attn"].kernel(forbid="flash")
    """

    take: str | None = None
    forbid: str | None = None

    def check(self, modules: Modules) -> None:
        if "/" not in self.at:
            modules.select(self.at)
        if (self.take is None) == (self.forbid is None):
            raise BadOption("kernel takes one of take= and forbid=", hint='such as take="flash"')
        for name in (self.take, self.forbid):
            if not isinstance(name, str | None):
                raise BadOption(f"kernel {name!r}", hint="give the name of an implementation")

    def conflict(self, earlier: Verb, modules: Modules) -> str:
        assert isinstance(earlier, kernel)
        both_forbid = self.forbid is not None and earlier.forbid is not None
        return "" if both_forbid or AUTO in (self.take, earlier.take) else super().conflict(earlier, modules)
