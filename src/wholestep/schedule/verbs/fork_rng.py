"""`fork_rng`: what dropout draws on the ranks of a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import fx

from wholestep.capture.edits import Rewrite
from wholestep.capture.front.replay import path_of
from wholestep.graph.mesh import FORKED
from wholestep.schedule.modules import Modules, check_axis, within
from wholestep.schedule.verb import Verb, verb


@verb
class fork_rng(Verb):
    """Let each rank of a mesh axis draw a module's random numbers by itself, where it has a part of the values.

    over: the mesh axis. Without it a part gets the very numbers that it has in the whole, so that a mesh trains what one
    rank does; with it a step is no longer comparable with one rank. Values that are the same on all ranks stay so: a module that
    draws for such values is an error. Example: sch["layers.*.attn"].fork_rng()
    """

    numbers = True

    over: str = "tp"

    def check(self, modules: Modules) -> None:
        modules.select(self.at)
        check_axis(self.name, self.over)

    def rewrite(self) -> Rewrite:
        return _Forked(self.at, self.over)


@dataclasses.dataclass(frozen=True)
class _Forked:
    """Marks what the modules compute."""

    at: str
    over: str

    def __call__(self, module: fx.GraphModule, paths: Mapping[int, str]) -> None:
        for node in module.graph.nodes:
            if within(path_of(node.meta.get("nn_module_stack") or {}, paths), self.at):
                node.meta[FORKED] = self.over
