"""`pipeline_cut`: where one stage of a pipeline ends."""

from __future__ import annotations

from wholestep.errors import BadOption
from wholestep.schedule.modules import Modules
from wholestep.schedule.verb import NoEngineYet, Verb, verb


@verb
class pipeline_cut(NoEngineYet):
    """End a stage of the pipeline behind a module; the next one begins with what follows.

    Example: sch["layers.11"].pipeline_cut()
    """

    def check(self, modules: Modules) -> None:
        found = modules.select(self.at)
        if "" in found:
            raise BadOption("a stage cannot end behind the whole model", hint="name a module inside of it")

    def conflict(self, earlier: Verb, modules: Modules) -> str:
        both = modules.select(self.at).keys() & modules.select(earlier.at).keys()
        return f"a stage ends behind {min(both)} already" if both else ""
