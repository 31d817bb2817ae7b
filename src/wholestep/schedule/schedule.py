"""Schedule: a model and a growing recipe for it. Verbs are recorded and checked at once; nothing is applied until it is asked for.

    sch = wholestep.schedule(model)
    sch["layers.*"].recompute(ratio=0.5)
    sch.find(nn.LayerNorm).replace("lean")
    step = wholestep.compile(model, loss_fn, optimizer, batch, recipe=sch)

`build()` carries out on the model itself what eager PyTorch can do, `restore()` takes it back.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from wholestep.capture.edits import Edits, Rewrite
from wholestep.capture.front import Front, LossGraph
from wholestep.capture.subject import make_subject, root_of
from wholestep.errors import BadOption, CaptureRefused
from wholestep.graph.layers import layer_pattern
from wholestep.graph.mesh import Mesh, Ranks
from wholestep.schedule import verb as verbs_table
from wholestep.schedule import verbs  # noqa: F401 - registers them
from wholestep.schedule.cuts import cuts_of, localised, syncs_of
from wholestep.schedule.modules import Modules, address, inside, joined
from wholestep.schedule.pattern import trace_pattern
from wholestep.schedule.recipe import Recipe
from wholestep.schedule.recipe_file import (
    check_expected,
    compared,
    expectations,
    read_recipe,
    recipe_text,
    write_recipe,
)
from wholestep.schedule.rewrite import Found, found_in
from wholestep.schedule.sharding import Localised
from wholestep.schedule.verb import Verb, make


class NoSuchVerb(BadOption, AttributeError):
    """A method that is no verb: an error for the user, and for `hasattr` an attribute that is not there."""


def _verb(name: str) -> type[Verb]:
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return verbs_table.known_verb(name)
    except BadOption as error:
        raise NoSuchVerb(error.what, hint=error.hint) from None


class Place:
    """Some modules of a scheduled model, by path or glob; every verb is a method."""

    def __init__(self, schedule: Schedule, at: str) -> None:
        self.schedule, self.at = schedule, at

    def __getitem__(self, path: str | int) -> Place:
        at = joined(self.at, address(path))
        if "/" not in at:
            self.schedule.modules.select(at)
        return Place(self.schedule, at)

    def __getattr__(self, name: str) -> Callable[..., Schedule]:
        kind = _verb(name)
        record = functools.partial(self.schedule.record, name, self.at)
        record.__doc__ = kind.__doc__
        return record

    def find(self, what: Any = None, *, where: Callable[[str, nn.Module], Any] | None = None) -> Places | list[Found]:
        """See `Schedule.find`; within these modules."""
        return self.schedule.find(what, where=where, within=self.at)

    @property
    def modules(self) -> dict[str, nn.Module]:
        return self.schedule.modules.select(self.at)

    def __repr__(self) -> str:
        return f"{self.at or 'the model'}: {len(self.modules)} module(s)"


class Places(Sequence[Place]):
    """What `find` found: each is a Place, and a verb of all of them is recorded in as few lines as say it."""

    def __init__(self, schedule: Schedule, paths: Sequence[str]) -> None:
        self.schedule, self.paths = schedule, tuple(paths)

    def __getitem__(self, index: Any) -> Any:
        return Place(self.schedule, self.paths[index])

    def __len__(self) -> int:
        return len(self.paths)

    def __getattr__(self, name: str) -> Callable[..., Schedule]:
        _verb(name)

        def record(*args: Any, **kwargs: Any) -> Schedule:
            return self.schedule.add(*(make(name, at, *args, **kwargs) for at in self.globs()))

        return record

    def globs(self) -> list[str]:
        """As few addresses as mean the same modules: `layers.*.norm` where it is every one of them."""
        groups: dict[str, list[str]] = {}
        for path in self.paths:
            groups.setdefault(layer_pattern(path), []).append(path)
        whole = {glob for glob, paths in groups.items() if list(self.schedule.modules.select(glob)) == paths}
        return [at for glob, paths in groups.items() for at in ([glob] if glob in whole else paths)]

    def __repr__(self) -> str:
        return "\n".join(self.paths) or "nothing"


class Schedule(Place):
    """What `wholestep.schedule` returns."""

    def __init__(
        self,
        model: Any,
        recipe: Recipe | None = None,
        *,
        example: Any = None,
    ) -> None:
        self.given, self.model = model, root_of(model)
        self.modules_of = Modules(self.model)
        self.lines: list[Verb] = list(recipe or ())
        self.start = recipe or Recipe()
        """With what it began, for `diff`."""
        self.example = example
        self.built: Edits | None = None
        self.reasons: dict[str, str] = {}
        """Line -> why it is there, and places that have none -> why; where a recipe was not written by a person."""
        super().__init__(self, "")
        if recipe is not None:
            check_expected(recipe, model)
            recipe.check(self.modules)

    @property
    def modules(self) -> Any:
        return self.modules_of

    # ---- recording ----

    def record(self, name: str, at: str, *args: Any, **kwargs: Any) -> Schedule:
        """Add a line, checked against the model and against the lines before it."""
        return self.add(make(name, at, *args, **kwargs))

    def add(self, *lines: Verb) -> Schedule:
        Recipe((*self.lines, *lines), source="the schedule").check(self.modules)
        self.lines += lines
        return self

    def undo(self, name: str | None = None) -> Verb:
        """Take the last line back, or the last one of a verb."""
        found = [i for i, line in enumerate(self.lines) if name is None or line.name == name]
        if not found:
            raise BadOption("there is nothing to undo" + (f" of {name}" if name else ""))
        return self.lines.pop(found[-1])

    @property
    def recipe(self) -> Recipe:
        """The lines as data, with what they expect of the model."""
        recipe = Recipe(tuple(self.lines), source="the schedule")
        return Recipe(recipe.lines, expectations(recipe, self.model), recipe.source, self.reasons)

    def help(self, name: str | None = None) -> str:
        """What a verb does and takes; without a name, all verbs."""
        return verbs_table.help_of(name)

    # ---- looking ----

    def find(
        self, what: Any = None, *, where: Callable[[str, nn.Module], Any] | None = None, within: str = ""
    ) -> Places | list[Found]:
        """Look for modules or operators; nothing is changed.

        what: a class of modules, a glob, or operators as a plain function (lambda x, w, b: gelu(linear(x, w, b))), which are
            looked for in the forward pass: wholestep.schedule(model, example=...) has to be given a batch.
        where: a predicate (path, module).
        """
        if (what is None) == (where is None):
            raise BadOption("find takes a class, a glob or a function, or where=", hint="find(nn.Linear)")
        scopes = list(self.modules.select(within))
        known = [(path, module) for path, module in self.modules if any(inside(path, at) for at in scopes)]
        if where is not None:
            return Places(self, [path for path, module in known if where(path, module)])
        if isinstance(what, str):
            return Places(self, list(self.modules.select(joined(within, what))))
        if isinstance(what, type):
            return Places(self, [path for path, module in known if isinstance(module, what)])
        pattern = trace_pattern(what)
        graph = self.forward()
        paths = {id(module): path for path, module in self.model.named_modules()}
        found = found_in(graph.module.graph, pattern, paths, lambda path: any(inside(path, at) for at in scopes))
        return [
            one for one in found if all(node.meta.get("nn_module_stack") for node in one.match.nodes)
        ]  # of the model

    def exchanges(self, mesh: Mesh) -> Localised:
        """What ranks of a mesh exchange in the forward pass, module by module, with bytes and the reason: it follows from `shard`.
        Needs a batch, wholestep.schedule(model, example=...); nothing is changed. An `enter` is a sum in the backward pass."""
        found: list[Localised] = []
        ranks, syncs = Ranks(mesh, cuts_of(self.recipe, self.modules, mesh)), syncs_of(self.recipe, self.modules)
        self.forward(lambda graph, paths: found.append(localised(ranks, syncs, self.modules.root, graph, paths)))
        return found[0]

    def forward(self, *rewrites: Rewrite, loss_fn: Any = None) -> LossGraph:
        """The forward pass, or a loss, as the front end sees it; it does not run."""
        if self.example is None:
            hint = "give one: wholestep.schedule(model, example=batch)"
            raise BadOption("operators are looked for in the forward pass, which needs an example batch", hint=hint)
        try:
            subject = make_subject(self.given if loss_fn else self.model, loss_fn or _sum_of_outputs, None)
            subject.edits = Edits(rewrites=rewrites)
            found: LossGraph = Front(subject).look(self.example, lambda graph, args: graph)
            return found
        except CaptureRefused as refused:
            raise BadOption(f"the forward pass cannot be read: {refused}") from None

    def diff(self, other: Schedule | Recipe | str | Path | None = None) -> str:
        """What differs from another recipe; without one, from what the schedule began with."""
        before = self.start if other is None else recipe_of(other)
        return "\n".join(compared(before, self.recipe)) or "no difference"

    def __repr__(self) -> str:
        rows = []
        for number, line in enumerate(self.lines, start=1):
            count = "" if "/" in line.at else f"  ({len(self.modules.select(line.at))} modules)"
            rows.append(f"{number:3}  {line}{count if not count.startswith('  (1 ') else ''}")
        return "\n".join([f"schedule of {type(self.model).__name__}, {len(self.lines)} line(s)", *rows])

    def __iter__(self) -> Iterator[Verb]:
        return iter(list(self.lines))

    def __len__(self) -> int:
        return len(self.lines)

    def __bool__(self) -> bool:
        return True

    # ---- files ----

    def save(self, path: str | Path) -> None:
        """Write the recipe, with what it expects of the model."""
        if not isinstance(path, str | Path):
            raise BadOption(f"a recipe is not written to {path!r}", hint="name a file: sch.save('recipe.toml')")
        write_recipe(self.recipe, Path(path))
        self.start = self.recipe

    def text(self) -> str:
        """The recipe as a file would have it."""
        return recipe_text(self.recipe)

    # ---- applying ----

    def build(self) -> nn.Module:
        """The same model, edited in place; `restore` takes it back. A line that is about a compiled step is an error."""
        if self.built is not None:
            raise BadOption("the model is built already", hint="call sch.restore() first")
        recipe = self.recipe
        recipe.check(self.modules)
        changes = [change for line in recipe for change in line.eager(self.modules)]
        changes.sort(key=lambda change: bool(getattr(change, "wraps", False)))
        edits = Edits(changes)
        edits.apply()
        self.built = edits
        return self.model

    def restore(self) -> nn.Module:
        """The model as it was before `build`."""
        if self.built is not None:
            self.built.undo()
            self.built = None
        return self.model

    def verify(self, loss_fn: Any, optimizer: Any, batches: Any, *, each: bool = False, **options: Any) -> Any:
        """Train a few steps of the scheduled model beside the model as it was written; see `wholestep.verify`.

        each: True checks after every verb; False (the default) checks all of them, and looks for the wrong verb only if that fails.
        The wrong verb is named in `report.first_departure`, with the first tensor that departs. Awkward batches are made of the
        first one, unless `edge_batches` are given.
        """
        public = sys.modules["wholestep"]  # as a user calls it: what verifies comes after this folder
        by_verb = "each" if each else "blame"
        return public.verify(self.model, loss_fn, optimizer, batches, recipe=self, by_verb=by_verb, **options)


def schedule(model: Any, recipe: Any = None, *, example: Any = None) -> Schedule:
    """Say how a model is to run, apart from what it is; nothing is applied until `compile(..., recipe=...)` or `build()`.

    Args:
        model: a Module, or a dict or tuple of them, whose names come first in paths.
        recipe: a file or recipe to begin with; what no longer matches the model is an error with the nearest name.
        example: a batch, as the model takes it, to look for operators in the forward pass (`find`).
    """
    return Schedule(model, None if recipe is None else recipe_of(recipe), example=example)


def _sum_of_outputs(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss that reads all that a model returns."""
    if isinstance(batch, Mapping):
        out = model(**batch)
    elif isinstance(batch, tuple | list):
        out = model(*batch)
    else:
        out = model(batch)
    values = list(out.values()) if isinstance(out, Mapping) else out
    total = torch.zeros(())
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            total = total + leaf.sum().to(total)
    return total


def recipe_of(given: Any) -> Recipe:
    """The recipe of a schedule, a file, or a recipe itself."""
    if isinstance(given, Schedule):
        return given.recipe
    if isinstance(given, Recipe):
        return given
    if isinstance(given, str | Path):
        return read_recipe(Path(given))
    hint = "give a wholestep.schedule(model), or the path of a file"
    raise BadOption(f"recipe={given!r}", hint=hint)
