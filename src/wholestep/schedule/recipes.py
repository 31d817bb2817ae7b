"""Recipes that need nobody to write them: `wholestep.recipes.auto(model)` is what `compile` does by itself, as lines to be edited.

By structure, not by the name of a model: lists of modules of one class are layers, modules that hold several linear layers and
are named as projections of an attention are attentions, the last linear layer is the head. Every line says "auto", which is what
happens without it: compiled with the recipe, the step is the same, node for node. Edit a line and it is a wish. For a mesh there
are `shard` lines too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from wholestep.errors import BadOption
from wholestep.graph.mesh import Mesh
from wholestep.schedule import (
    auto_shard,
    verbs,  # noqa: F401 - registers them
)
from wholestep.schedule.schedule import Schedule
from wholestep.schedule.verb import AUTO, Verb, make

MIN_LAYERS = 2


def auto(model: Any, mesh: Mesh | None = None, *, example: Any = None, loss_fn: Any = None) -> Schedule:
    """The defaults for a model, written down.

    With a mesh, also how its parameters are cut among the ranks, found by trying (`auto_shard.py`), each line with its reason; what
    stays whole is in `reasons` too. That needs `example`, a batch as the model takes it; `loss_fn` has its layouts followed too.
    """
    schedule = Schedule(model, example=example)
    lines: list[Verb] = [make("recompute", glob, ratio=AUTO) for glob in layer_globs(schedule.model)]
    lines += [make("kernel", glob, take=AUTO) for glob in attention_globs(schedule.model)]
    lines += [make("precision", path, AUTO) for path in ("", *heads(schedule.model))]
    lines += [make("cudagraph", "", AUTO)]
    schedule.add(*lines)
    if mesh is not None:
        auto_shard.checked(mesh)
        _add_shardings(schedule, mesh, loss_fn)
    schedule.start = schedule.recipe
    return schedule


def _add_shardings(schedule: Schedule, mesh: Mesh, loss_fn: Any) -> None:
    found: list[auto_shard.Found] = []

    def look(graph: fx.GraphModule, paths: Mapping[int, str]) -> None:
        found.append(auto_shard.Search(schedule.model, graph, paths, mesh).run())

    if mesh.num_ranks > 1:
        schedule.forward(look, loss_fn=loss_fn)
    for one in found:
        if not one.dims:
            why = "; ".join(f"{place}: {reason}" for place, reason in list(one.whole.items())[:1])
            raise BadOption(f"nothing of {type(schedule.model).__name__} can be cut for {mesh}", hint=why or None)
        for group, dim in one.dims.items():
            at = group.pattern.rpartition(".")[0]
            known = list(schedule.modules.select(at)) if "*" in at else [at]
            places, param = auto_shard.address_of(group, known)
            for place in places:
                line = make("shard", place, param, dim)
                schedule.add(line)
                schedule.reasons[str(line)] = one.roles[group]
        schedule.reasons |= {f"{place} stays whole": why for place, why in one.whole.items()}


def layer_globs(model: nn.Module) -> list[str]:
    """`layers.*` for every outermost list of modules of one class."""
    found: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(_below(path, glob) for glob in found):
            continue
        children = list(module)
        alike = len({type(child) for child in children}) == 1
        if alike and len(children) >= MIN_LAYERS and any(list(child.children()) for child in children):
            found.append(f"{path}.*" if path else "*")
    return found


def attention_globs(model: nn.Module) -> list[str]:
    """Modules that project their input to at least a query, a key, a value and back, without a list inside: one glob for equal
    places of layers."""
    found: dict[str, None] = {}
    for path, module in model.named_modules():
        names = {name for name, _ in module.named_children()}
        if isinstance(module, nn.MultiheadAttention) or _projects(names):
            found[_starred(path)] = None
    return list(found)


_QUERY = (
    {"q_proj", "k_proj", "v_proj"},
    {"query", "key", "value"},
    {"q", "k", "v"},
    {"to_q", "to_k", "to_v"},
    {"c_attn"},
    {"qkv"},
)
"""What the projections of an attention are called, in the libraries that are known."""


def _projects(names: set[str]) -> bool:
    return any(known <= names for known in _QUERY)


def heads(model: nn.Module) -> list[str]:
    """The last linear layer, if it is the model's own child: the output of a classifier or language model."""
    own = [name for name, module in model.named_children() if isinstance(module, nn.Linear)]
    return own[-1:]


def _starred(path: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def _below(path: str, glob: str) -> bool:
    prefix = glob.removesuffix("*").removesuffix(".")
    return path.startswith(f"{prefix}.") if prefix else bool(path)
