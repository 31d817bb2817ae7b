"""A user's own code in the benchmark: a contender by name, passes from a file.

In: `package.module:callable`, or the path of a Python file. Out: a maker of steps, or passes; every way to get it wrong is one
clear line, told before anything is measured.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wholestep.bench.workload import Part, StepCall
from wholestep.errors import BadOption, did_you_mean, one_line
from wholestep.train.resolve import find_from_here


def own_contender(name: str) -> Callable[[Part, str], StepCall]:
    """A user's function `package.module:callable`, found from the working directory as `python -m` would."""
    module_name, _, function_name = name.partition(":")
    find_from_here()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # anything may happen while somebody's module is imported
        raise BadOption(f"contender {name!r}: {one_line(error)}", hint="run where it can be imported") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known, otherwise = (
            [n for n in vars(module) if callable(getattr(module, n))],
            "name a function (part, precision) -> step",
        )
        hint = did_you_mean(function_name, known, otherwise, shown=f"{module_name}:{{}}")
        raise BadOption(f"contender {name!r}: {module_name} has no function {function_name!r}", hint=hint)

    def make(part: Part, precision: str) -> StepCall:
        step = function(part, precision)
        if not callable(step):
            raise BadOption(f"{name} returned a {type(step).__name__}", hint="return a function: batch in, loss out")
        return step

    return make


@dataclasses.dataclass(frozen=True, slots=True)
class OwnPasses:
    """Passes or a recipe from a user's file, and what tells one version of it from another."""

    passes: tuple[Any, ...]
    digest: str
    recipe: str | None = None
    """A file of one, in the place of passes."""


def load_passes(path: str) -> OwnPasses:
    """The functions marked @compiler_pass in a file, in the order in which they stand there; or a recipe (`.toml`)."""
    file = Path(path)
    if file.suffix == ".toml":
        from wholestep.schedule.recipe_file import read_recipe

        read_recipe(file)
        return OwnPasses((), hashlib.sha256(file.read_bytes()).hexdigest()[:16], str(file))
    if not file.is_file():
        raise BadOption(
            f"--with {path}: there is no such file", hint="name a Python file with functions marked @compiler_pass"
        )
    spec = importlib.util.spec_from_file_location(f"wholestep_own_passes_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise BadOption(f"--with {path}: not a Python file", hint="its name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look modules up by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # anything may happen while somebody's file is run
        raise BadOption(f"--with {path}: {one_line(error)}", hint="run it alone with python to see where") from error
    found = tuple(
        value
        for value in vars(module).values()
        if hasattr(value, "numerics") and getattr(value, "__module__", "") == spec.name
    )
    if not found:
        raise BadOption(f"--with {path}: it holds no pass", hint="mark functions with @compiler_pass(numerics=...)")
    return OwnPasses(found, hashlib.sha256(file.read_bytes()).hexdigest()[:16])
