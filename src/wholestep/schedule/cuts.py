"""How parameters are cut: the `shard` lines of a recipe and a mesh in, parameter -> Cut out, checked against each other."""

from __future__ import annotations

from wholestep.errors import BadOption
from wholestep.graph.mesh import Cut, Mesh
from wholestep.schedule.modules import Modules
from wholestep.schedule.recipe import Recipe
from wholestep.schedule.sharding import Sync
from wholestep.schedule.sharding.layout import cut_of
from wholestep.schedule.verbs.shard import shard
from wholestep.schedule.verbs.sync import sync


def cuts_of(recipe: Recipe, modules: Modules, mesh: Mesh | None) -> dict[str, Cut]:
    """By the first name of each parameter; one that does not divide is an error with the nearest number of parts that does."""
    names = {id(parameter): name for name, parameter in modules.root.named_parameters()}
    found: dict[str, Cut] = {}
    for line in recipe:
        if not isinstance(line, shard):
            continue
        place = recipe.place(line)
        if mesh is None:
            raise BadOption(
                f"{place}: there is no mesh", hint=f"say how many ranks: mesh=wholestep.Mesh({line.over}=2)"
            )
        parts = mesh.size(line.over)
        if line.parts not in (None, parts):
            raise BadOption(f"{place}: parts={line.parts}, and {mesh} has {parts}", hint="leave parts out")
        for path in modules.select(line.at):
            parameter = modules.parameter(path, line.param)
            try:
                line.check_divides(path, parameter, parts)
            except BadOption as error:
                raise BadOption(f"{place}: {error.what}", hint=error.hint) from None
            blocks = cut_of(line.axis % parameter.dim(), line.sizes(path, parameter))
            sizes = () if blocks.plain else blocks.sizes
            found[names[id(parameter)]] = Cut(blocks.dim, line.over, sizes, blocks.times, place)
    return found if mesh is not None and mesh.num_ranks > 1 else {}


def syncs_of(recipe: Recipe, modules: Modules, mesh: Mesh | None) -> list[Sync]:
    """What explicit `sync` lines ask of each module; one without a mesh, or without anything that is cut, is an error."""
    found: list[Sync] = []
    for line in recipe:
        if not isinstance(line, sync):
            continue
        place = recipe.place(line)
        if mesh is None:
            raise BadOption(
                f"{place}: there is no mesh", hint=f"say how many ranks: mesh=wholestep.Mesh({line.over}=2)"
            )
        if mesh.size(line.over) > 1 and not recipe.shardings:
            raise BadOption(f"{place}: nothing is cut", hint="shard a parameter, or leave the line out")
        if mesh.size(line.over) > 1:
            found += [Sync(path, line.operation, line.when, line.axis, place) for path in modules.select(line.at)]
    return found
