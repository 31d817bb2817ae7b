"""`offload`: what waits outside of the card."""

from __future__ import annotations

from wholestep.errors import BadOption
from wholestep.schedule.modules import Modules, nearest
from wholestep.schedule.verb import NoEngineYet, verb

KINDS = ("values", "state", "parameters")
TIERS = ("host", "file")


@verb
class offload(NoEngineYet):
    """Let what a module keeps wait in the host's memory, or in a file, until it is needed.

    what: "values" (kept for the backward pass), "state" (of the optimizer) or "parameters". to: "host" or "file".
    Example: sch["layers.*"].offload("values")
    """

    what: str = "values"
    to: str = "host"

    def check(self, modules: Modules) -> None:
        modules.select(self.at)
        for name, value, known in (("what", self.what, KINDS), ("to", self.to, TIERS)):
            if value not in known:
                hint = nearest(str(value), list(known), f"use one of {', '.join(known)}")
                raise BadOption(f"offload {name}={value!r}", hint=hint)
