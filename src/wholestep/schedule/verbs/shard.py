"""`shard`: a parameter is cut into parts, one for each rank of a mesh axis."""

from __future__ import annotations

import torch

from wholestep.errors import BadOption
from wholestep.graph.mesh import fitting_parts
from wholestep.schedule.modules import Modules, check_axis
from wholestep.schedule.verb import Verb, verb


@verb
class shard(Verb):
    """Cut a parameter into equal parts along one of its dimensions, a part for each rank of a mesh axis.

    param: its name in the module. axis: the dimension, from 0 or from the end (-1). over: the mesh axis ("tp").
    parts: into how many, where that is known already; the mesh says it otherwise.
    blocks: where the dimension is several side by side (q, k and v in one weight), how many, or a list of their sizes; each block
    is cut. It is found by itself where the model takes the output apart.

    Collectives follow from it (docs/sharding.md). A parameter is cut once; one that no line names is whole on every rank.
    Example: sch["layers.*.mlp.up"].shard("weight", 0)
    """

    param: str = "weight"
    axis: int = 0
    over: str = "tp"
    parts: int | None = None
    blocks: int | list[int] | None = None

    def check(self, modules: Modules) -> None:
        check_axis(self.name, self.over)
        for path in modules.select(self.at):
            tensor = modules.parameter(path, self.param)
            if (
                not isinstance(self.axis, int)
                or isinstance(self.axis, bool)
                or not -tensor.dim() <= self.axis < tensor.dim()
            ):
                hint = f"its shape is {tuple(tensor.shape)}"
                raise BadOption(f"{_name(path, self.param)} has no dimension {self.axis!r}", hint=hint)
            self.sizes(path, tensor)
            if self.parts is not None:
                self.check_divides(path, tensor, self.parts)

    def sizes(self, path: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """Of the blocks that the dimension has."""
        size, blocks = tensor.shape[self.axis], self.blocks
        if blocks is None:
            return (size,)
        listed = [size // blocks] * blocks if _is_count(blocks) and size % blocks == 0 else blocks  # type: ignore[operator]
        if not isinstance(listed, list | tuple) or not all(map(_is_count, listed)) or sum(listed) != size:
            hint = f"give how many equal ones, or a list of sizes whose sum is {size}"
            raise BadOption(f"blocks={blocks!r} of dimension {self.axis} of {_name(path, self.param)}", hint=hint)
        return tuple(listed)

    def check_divides(self, path: str, tensor: torch.Tensor, parts: int) -> None:
        """Raise unless the dimension, or every block of it, can be cut into so many equal parts."""
        if not _is_count(parts):
            raise BadOption(f"parts={parts!r}", hint="give a whole number, 1 or more")
        sizes = self.sizes(path, tensor)
        wrong = [size for size in sizes if size % parts]
        if wrong:
            where = f"dimension {self.axis} of {_name(path, self.param)}, of size {wrong[0]}"
            where += "" if len(sizes) == 1 else f" in each of {len(sizes)} blocks"
            raise BadOption(f"{where}, cannot be cut into {parts} equal parts", hint=fitting_parts(sizes, parts))

    def conflict(self, earlier: Verb, modules: Modules) -> str:
        """A parameter is cut once; one that has two names (tied weights) may be named twice, with one meaning."""
        assert isinstance(earlier, shard)
        before = {p: modules.parameter(p, earlier.param) for p in modules.select(earlier.at)}
        for path in modules.select(self.at):
            tensor = modules.parameter(path, self.param)
            for other, known in before.items():
                one_name = (path, self.param) == (other, earlier.param)
                alike = (self.axis % tensor.dim(), self.over) == (earlier.axis % tensor.dim(), earlier.over)
                alike = alike and self.sizes(path, tensor) == earlier.sizes(other, known)
                if tensor is known and (one_name or not alike):
                    return f"{_name(path, self.param)} is cut already"
        return ""

    def expects(self, modules: Modules) -> dict[str, str]:
        found = modules.select(self.at)
        shapes = dict.fromkeys(str(tuple(modules.parameter(path, self.param).shape)) for path in found)
        return {**super().expects(modules), f"{self.at}.{self.param}": f"{len(found)} x {', '.join(shapes)}"}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _name(path: str, param: str) -> str:
    return f"{path}.{param}" if path else param
