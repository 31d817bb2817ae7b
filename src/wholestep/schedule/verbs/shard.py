"""`shard`: a parameter is cut into parts, one for each rank of a mesh axis."""

from __future__ import annotations

import torch

from wholestep.errors import BadOption
from wholestep.schedule.modules import Modules
from wholestep.schedule.verb import Verb, verb


@verb
class shard(Verb):
    """Cut a parameter into equal parts along one of its dimensions, a part for each rank of a mesh axis.

    param: its name in the module. axis: the dimension, from 0 or from the end (-1). over: the mesh axis ("tp").
    parts: into how many, where that is known already; the mesh says it otherwise.

    Collectives follow from it. A parameter is cut once. Example: sch["layers.*.mlp.up"].shard("weight", 0)
    """

    param: str = "weight"
    axis: int = 0
    over: str = "tp"
    parts: int | None = None

    def check(self, modules: Modules) -> None:
        for path in modules.select(self.at):
            tensor = modules.parameter(path, self.param)
            if (
                not isinstance(self.axis, int)
                or isinstance(self.axis, bool)
                or not -tensor.dim() <= self.axis < tensor.dim()
            ):
                hint = f"its shape is {tuple(tensor.shape)}"
                raise BadOption(f"{_name(path, self.param)} has no dimension {self.axis!r}", hint=hint)
            if self.parts is not None:
                self.check_divides(path, tensor, self.parts)

    def check_divides(self, path: str, tensor: torch.Tensor, parts: int) -> None:
        """Raise unless the dimension can be cut into so many equal parts."""
        if not isinstance(parts, int) or parts < 1:
            raise BadOption(f"parts={parts!r}", hint="give a whole number, 1 or more")
        size = tensor.shape[self.axis]
        if size % parts:
            fitting = [n for n in range(parts, 0, -1) if size % n == 0]
            where = f"dimension {self.axis} of {_name(path, self.param)}, of size {size}"
            raise BadOption(f"{where}, cannot be cut into {parts} equal parts", hint=f"{fitting[0]} would do")

    def conflict(self, earlier: Verb, modules: Modules) -> str:
        """A parameter is cut once; one that has two names (tied weights) may be named twice, with one meaning."""
        assert isinstance(earlier, shard)
        before = {p: modules.parameter(p, earlier.param) for p in modules.select(earlier.at)}
        for path in modules.select(self.at):
            tensor = modules.parameter(path, self.param)
            for other, known in before.items():
                one_name = (path, self.param) == (other, earlier.param)
                alike = (self.axis % tensor.dim(), self.over) == (earlier.axis % tensor.dim(), earlier.over)
                if tensor is known and (one_name or not alike):
                    return f"{_name(path, self.param)} is cut already"
        return ""

    def expects(self, modules: Modules) -> dict[str, str]:
        found = modules.select(self.at)
        shapes = dict.fromkeys(str(tuple(modules.parameter(path, self.param).shape)) for path in found)
        return {**super().expects(modules), f"{self.at}.{self.param}": f"{len(found)} x {', '.join(shapes)}"}


def _name(path: str, param: str) -> str:
    return f"{path}.{param}" if path else param
