"""How parameters are cut: the `shard` lines of a recipe and a mesh in, parameter -> Cut out, checked against each other."""

from __future__ import annotations

from wholestep.errors import BadOption
from wholestep.graph.mesh import Cut, Mesh
from wholestep.schedule.modules import Modules
from wholestep.schedule.recipe import Recipe
from wholestep.schedule.verbs.shard import shard


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
            found[names[id(parameter)]] = Cut(line.axis % parameter.dim(), line.over, line=place)
    return found if mesh is not None and mesh.num_ranks > 1 else {}
