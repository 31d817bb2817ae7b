"""Recipes that need nobody to write them: `wholestep.recipes.auto(model)` is what `compile` does by itself, as lines to be edited.

By structure, not by the name of a model: lists of modules of one class are layers, modules that hold several linear layers and
are named as projections of an attention are attentions, the last linear layer is the head. Every line says "auto", which is what
happens without it: compiled with the recipe, the step is the same, node for node. Edit a line and it is a wish.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from wholestep.errors import NotBuiltYet
from wholestep.schedule import verbs  # noqa: F401 - registers them
from wholestep.schedule.schedule import Schedule
from wholestep.schedule.verb import AUTO, Verb, make

MIN_LAYERS = 2


def auto(model: Any, mesh: Any = None) -> Schedule:
    """The defaults for a model, written down. With a mesh: how it is sharded; not part of this version."""
    if mesh is not None:
        raise NotBuiltYet("recipes.auto with a mesh", hint="leave mesh out; shardings come with their engine")
    schedule = Schedule(model)
    model = schedule.model
    lines: list[Verb] = [make("recompute", glob, ratio=AUTO) for glob in layer_globs(model)]
    lines += [make("kernel", glob, take=AUTO) for glob in attention_globs(model)]
    lines += [make("precision", path, AUTO) for path in ("", *heads(model))]
    lines += [make("cudagraph", "", AUTO)]
    schedule.add(*lines)
    schedule.start = schedule.recipe
    return schedule


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
