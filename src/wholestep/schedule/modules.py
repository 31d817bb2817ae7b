"""Addresses: a path or a glob in, the modules of one model that it names out.

`layers.3.mlp` is one module, `layers.*.mlp` one in every layer (`*` stands for one part of a path, or for some of its letters),
`**.norm` at any depth, and the empty path is the model. `layers.*.mlp/gelu@12` is a value of a module (graph/keys.py). What there
is not is one line with the nearest name.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from wholestep.errors import BadOption
from wholestep.graph.layers import layer_pattern
from wholestep.graph.mesh import AXES


def fits(path: str, glob: str) -> bool:
    """Whether a module path fits a path or glob, part by part."""
    return _fits(tuple(path.split(".")) if path else (), tuple(glob.split(".")) if glob else ())


@functools.lru_cache(maxsize=65536)
def _fits(path: tuple[str, ...], glob: tuple[str, ...]) -> bool:
    if not glob:
        return not path
    if glob[0] == "**":
        return any(_fits(path[i:], glob[1:]) for i in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], glob[0]) and _fits(path[1:], glob[1:])


def inside(path: str, module: str) -> bool:
    """Whether a path is a module or lies below it."""
    return not module or path == module or path.startswith(module + ".")


def within(path: str, glob: str) -> bool:
    """Whether a path is, or lies below, a module that a path or glob names."""
    parts = path.split(".")
    return any(fits(".".join(parts[:count]), glob) for count in range(len(parts) + 1))


def joined(scope: str, path: str) -> str:
    """A path below a scope."""
    return ".".join(part for part in (scope, path) if part)


def address(given: Any) -> str:
    """A path as text; the number of a layer is one too: sch["layers"][0]."""
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return str(given)
    if not isinstance(given, str):
        raise BadOption(f"{given!r} is no address of modules", hint='give a path or a glob: sch["layers.[01]"]')
    return given


def check_axis(line: str, over: Any) -> None:
    """Raise unless a mesh has such an axis."""
    if over not in AXES:
        raise BadOption(f"{line} over={over!r}", hint=nearest(str(over), list(AXES), f"axes: {', '.join(AXES)}"))


def nearest(name: str, known: list[str] | dict[str, nn.Module], otherwise: str) -> str:
    """The end of an error message about a name that there is not."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else otherwise


def once(places: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Each module by the first of its names."""
    seen: set[int] = set()
    return {path: module for path, module in places.items() if not (id(module) in seen or seen.add(id(module)))}  # type: ignore[func-returns-value]


class Modules:
    """The modules of a model by path; one that has two names has two entries."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root

    def __iter__(self) -> Iterator[tuple[str, nn.Module]]:
        return iter(self.root.named_modules(remove_duplicate=False))

    def select(self, at: str) -> dict[str, nn.Module]:
        """The modules that a path or glob names, in the order of the model; at least one."""
        path = at.partition("/")[0]
        found = {name: module for name, module in self if fits(name, path)}
        if not found:
            raise BadOption(f"there is no module {path!r} in {type(self.root).__name__}", hint=self.near(path))
        return found

    def first_names(self, paths: Iterable[str]) -> dict[str, str]:
        """Path -> the first name of its module, by which graphs know one that has two."""
        first = {id(module): name for name, module in self.root.named_modules()}
        everyone = dict(self)
        return {path: first[id(everyone[path])] for path in paths}

    def near(self, path: str) -> str:
        """What may have been meant by a path that names nothing."""
        names = [name for name, _ in self if name]
        known = [*names, *dict.fromkeys(layer_pattern(name) for name in names)]
        first = ", ".join(known[:3])
        return nearest(path, known, f"paths look like {first}" if first else "the model has no modules inside")

    def parameter(self, path: str, name: str) -> nn.Parameter:
        """A parameter of one module, by its name there."""
        module = self.select(path)[path]
        own = dict(module.named_parameters(remove_duplicate=False))
        if name not in own:
            hint = nearest(name, list(own), f"it has {', '.join(own)}" if own else "it has none")
            raise BadOption(f"{path or 'the model'} has no parameter {name!r}", hint=hint)
        found = own[name]
        assert isinstance(found, torch.Tensor)
        return found
