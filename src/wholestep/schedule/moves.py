"""What the lines `offload` of a recipe become: keys of values, and patterns of parameters, of a Plan."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from wholestep.graph.keys import joined_key, layer_ranks, split_key, value_keys
from wholestep.graph.layers import layers_of, without_calls
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph, module_of, phase_of
from wholestep.graph.views import is_cheap_view
from wholestep.schedule.modules import Modules, inside


def moved_by_lines(
    lines: Sequence[Any], plan: Plan, graph: TrainingGraph, modules: Modules, place: Callable[[Any], str]
) -> dict[str, Any]:
    """The fields of the plan that the lines write over, and `reasons` for them: the line."""
    tiers = {tier: list(getattr(plan, tier)) for tier in ("recompute", "host", "file")}
    state, reasons = dict(plan.state), dict(plan.reasons)
    for line in lines:
        if line.what == "state":
            patterns = _parameters_of(line.at, modules)
            state |= dict.fromkeys(patterns, "host")
            reasons |= dict.fromkeys(patterns, place(line))
            continue
        keys = [line.at] if "/" in line.at else values_of(graph, modules.first_names(modules.select(line.at)).values())
        bases = {split_key(key)[0] for key in keys}
        for tier, listed in tiers.items():
            tiers[tier] = [key for key in listed if split_key(key)[0] not in bases]
        tiers[line.to] += keys
        reasons |= dict.fromkeys(keys, place(line))
    return {tier: tuple(keys) for tier, keys in tiers.items()} | {"state": state, "reasons": reasons}


def _parameters_of(at: str, modules: Modules) -> list[str]:
    """Patterns of the parameters of modules, by the first name that each module has; of several modules some may have none."""
    selected = modules.select(at)
    first = {id(module): path for path, module in modules.root.named_modules()}
    own = [module for module in selected.values() if any(True for _ in module.parameters())] or selected.values()
    return list(dict.fromkeys(f"{first[id(module)]}.*" if first[id(module)] else "*" for module in own))


def values_of(graph: TrainingGraph, paths: Any) -> list[str]:
    """Keys of what these modules, and those inside of them, make and the backward pass reads; with the layers that are meant."""
    keys, layers = value_keys(graph), layers_of(graph.graph.nodes)
    ranks = layer_ranks(keys, layers)
    chosen: dict[str, set[int]] = {}
    for node, key in keys.items():
        module = without_calls(module_of(node) or "")
        if any(inside(module, path) for path in paths) and _waits(node):
            chosen.setdefault(key, set()).add(ranks[key][layers.get(node)])
    return [joined_key(key, wanted, len(ranks[key])) for key, wanted in chosen.items()]


def _waits(node: fx.Node) -> bool:
    """Whether it is a tensor of its own that is read after the forward pass, by itself or as a view."""
    return isinstance(node.meta.get("val"), torch.Tensor) and not _looks(node) and _is_read_later(node)


def _is_read_later(node: fx.Node) -> bool:
    return any(
        phase_of(user) != "forward" or (_looks(user) and _is_read_later(user))
        for user in node.users
        if user.op != "output"
    )


def _looks(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and is_cheap_view(source)
