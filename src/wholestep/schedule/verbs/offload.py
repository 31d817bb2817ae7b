"""`offload`: what waits outside of the card."""

from __future__ import annotations

from wholestep.errors import BadOption, NotBuiltYet
from wholestep.schedule.modules import Modules, nearest
from wholestep.schedule.verb import Verb, verb

KINDS = ("values", "state", "parameters")
TIERS = ("host", "file")


@verb
class offload(Verb):
    """Let what a module keeps wait in the host's memory, or in a file, until it is needed.

    what: "values" (kept for the backward pass) or "state" (of the optimizer, on the host only). to: "host", or "file" with
    compile(offload_path=...). A place may also be a value: layers.*.mlp/gelu, or layers.*.mlp/gelu@12 in the first 12 layers.
    It beats the memory budget, and every bit stays the same. Example: sch["layers.*"].offload("values")
    """

    what: str = "values"
    to: str = "host"

    def check(self, modules: Modules) -> None:
        for name, value, known in (("what", self.what, KINDS), ("to", self.to, TIERS)):
            if value not in known:
                hint = nearest(str(value), list(known), f"use one of {', '.join(known)}")
                raise BadOption(f"offload {name}={value!r}", hint=hint)
        if self.what == "state" and self.to == "file":
            raise BadOption("offload of state to files", hint='state may lie on the host: to="host"')
        if "/" not in self.at:
            modules.select(self.at)
        elif self.what != "values":
            raise BadOption(f"{self.at} is a value, and what={self.what!r}", hint="name a module")

    def refuse(self, line: str) -> None:
        """Weights that lie on the host would have to come for every use."""
        if self.what == "parameters":
            hint = 'offload("values") and offload("state") are carried out'
            raise NotBuiltYet(f"{line}: parameters outside of the card are not carried out yet", hint=hint)
