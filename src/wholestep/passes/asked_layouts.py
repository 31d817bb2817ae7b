"""The memory orders of convolutions as a plan names them: what is asked for, and what a graph has.

In: a plan's `layout` (module path or pattern -> `channels_last` or `as_written`), convolutions. Out: the layout that is asked for
each; one clear error for a place or a layout that there is not. `passes/channels_last.py` carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from wholestep.errors import BadOption, did_you_mean
from wholestep.graph.layers import holds_module, without_calls
from wholestep.graph.training_graph import TrainingGraph, module_of
from wholestep.passes.fx_edit import tensor_of

LAID_OUT, AS_WRITTEN = "channels_last", "as_written"


def wanted_layouts(found: Sequence[fx.Node], asked: Mapping[str, str]) -> dict[fx.Node, str]:
    """Convolution -> the layout that is asked for its module."""
    paths = {node: without_calls(module_of(node) or "") for node in found}
    wanted: dict[fx.Node, str] = {}
    for place, layout in asked.items():
        if layout not in (LAID_OUT, AS_WRITTEN):
            raise BadOption(f"layout {layout!r} for {place!r}", hint=f"it is {LAID_OUT} or {AS_WRITTEN}")
        named = [node for node, path in paths.items() if holds_module(place, path)]
        if not named:
            otherwise = "only convolutions over images have a layout to choose"
            hint = did_you_mean(place, sorted(set(paths.values())), otherwise)
            raise BadOption(f"the plan asks for a layout of {place!r}, where nothing has one", hint=hint)
        wanted.update(dict.fromkeys(named, layout))
    return wanted


def layouts_of(graph: TrainingGraph) -> dict[str, str]:
    """Module -> `channels_last`, for every convolution that runs so: what a plan would say to have it again."""
    found = [node for node in graph.operations() if node.target is torch.ops.aten.convolution.default]
    return {without_calls(module_of(node) or ""): LAID_OUT for node in found if all(map(_is_laid_out, node.args[:2]))}


def _is_laid_out(value: object) -> bool:
    """Whether it lies in channels-last, where that is not both."""
    tensor = tensor_of(value)
    if tensor is None or tensor.dim() != 4:
        return False
    several = tensor.shape[1] > 1, tensor.shape[2] * tensor.shape[3] > 1
    return all(map(statically_known_true, (*several, tensor.is_contiguous(memory_format=torch.channels_last))))
