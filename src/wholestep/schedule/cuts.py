"""How parameters are cut: the `shard` lines of a recipe and a mesh in, one rank's program of every graph of the loss out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import fx, nn

from wholestep.errors import BadOption
from wholestep.graph.layers import layer_pattern
from wholestep.graph.mesh import RANKS, Cut, Mesh, Ranks
from wholestep.schedule.modules import Modules
from wholestep.schedule.recipe import Recipe
from wholestep.schedule.sharding import Localised, Sync, localise
from wholestep.schedule.sharding.layout import cut_of
from wholestep.schedule.verbs.shard import shard

ON_A_MESH = ("shard", "sync", "fork_rng")
"""Verbs that mean nothing to one rank."""


def cuts_of(recipe: Recipe, modules: Modules, mesh: Mesh | None) -> dict[str, Cut]:
    """By the first name of each parameter; one that does not divide is an error with the nearest number of parts that does."""
    names = {id(parameter): name for name, parameter in modules.root.named_parameters()}
    found: dict[str, Cut] = {}
    for line in recipe:
        place = recipe.place(line)
        if mesh is None and line.name in ON_A_MESH:
            over = getattr(line, "over", "tp")
            raise BadOption(f"{place}: there is no mesh", hint=f"say how many ranks: mesh=wholestep.Mesh({over}=2)")
        if mesh is None or not isinstance(line, shard):
            continue
        parts = mesh.size(line.over)
        if line.parts not in (None, parts):
            raise BadOption(f"{place}: parts={line.parts}, and {mesh} has {parts}", hint="leave parts out")
        for path in modules.select(line.at):
            parameter = modules.parameter(path, line.param)
            try:
                line.check_divides(path, parameter, parts)
            except BadOption as error:
                raise BadOption(f"{place}: {error.what}", hint=error.hint) from None
            if parts > 1:
                blocks = cut_of(line.axis % parameter.dim(), line.sizes(path, parameter))
                sizes = () if blocks.plain else blocks.sizes
                found[names[id(parameter)]] = Cut(blocks.dim, line.over, sizes, blocks.times, place)
    return found


def shard_table(cuts: Mapping[str, Cut]) -> dict[str, str]:
    """How parameters are cut, as a Plan has it: equal layers that are cut alike have one entry."""
    groups: dict[str, dict[str, str]] = {}
    for name, cut in cuts.items():
        groups.setdefault(layer_pattern(name), {})[name] = cut.words()
    found: dict[str, str] = {}
    for pattern, members in groups.items():
        alike = len(set(members.values())) == 1
        found |= {pattern: next(iter(members.values()))} if alike else members
    return found


def syncs_of(recipe: Recipe, modules: Modules) -> list[Sync]:
    """What the `sync` lines ask of each module."""
    return [
        Sync(path, line.operation, line.when, line.axis, recipe.place(line), line.over)  # type: ignore[attr-defined]
        for line in recipe.of("sync")
        for path in modules.select(line.at)
    ]


def localised(
    ranks: Ranks, syncs: Sequence[Sync], root: nn.Module, graph: fx.GraphModule, paths: Mapping[int, str]
) -> Localised:
    """Rewrite a graph of the loss into the program of one rank, and say in its facts how parameters are cut there."""
    known = {id(parameter): name for name, parameter in root.named_parameters()}
    names: dict[fx.Node, str] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        name = known.get(id(node.meta["grapharg"].example))
        if name is not None:
            names[node] = name
    found = localise(graph, ranks.cuts, ranks.mesh, names=names, paths=paths, syncs=syncs)
    graph.meta[RANKS] = dataclasses.replace(ranks, cuts=found.cuts)
    return found
