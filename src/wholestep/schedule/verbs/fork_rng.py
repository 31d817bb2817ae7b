"""`fork_rng`: what dropout draws on the ranks of a mesh."""

from __future__ import annotations

from wholestep.schedule.modules import Modules
from wholestep.schedule.verb import NoEngineYet, verb


@verb
class fork_rng(NoEngineYet):
    """Let the random numbers of a module differ between the ranks of a mesh axis, where each has a part of the values.

    over: the mesh axis. Without it all ranks draw alike. Example: sch["layers.*.attn"].fork_rng()
    """

    over: str = "tp"

    def check(self, modules: Modules) -> None:
        modules.select(self.at)
