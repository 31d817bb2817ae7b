"""A step that changes nothing keeps what its forward writes, too: `nonfinite="skip"`, and assumptions about data that fail.

The update operators leave parameters and states alone by themselves, told by their scale. Buffers (running means, say) are
written by the forward, before anyone knows the gradients; here their new values become a choice.
"""

from __future__ import annotations

import torch
from torch import fx

from wholestep.graph.training_graph import Output, OutputKind, Role, TrainingGraph

aten = torch.ops.aten


def keep_buffers(graph: TrainingGraph) -> None:
    """Rewrite, in place, every new buffer value into where(the norm is finite, new, old)."""
    norm = next((i for i, output in enumerate(graph.outputs) if output.kind is OutputKind.NORM), None)
    if norm is not None:
        _choose(graph, norm, aten.isfinite.default, (Role.BUFFER,))


def keep_all(graph: TrainingGraph, holds: str) -> None:
    """Every tensor that is written beside parameters and their state becomes where(all of output `holds`, new, old)."""
    flags = next(i for i, output in enumerate(graph.outputs) if output == Output(OutputKind.KEPT, holds))
    _choose(graph, flags, aten.all.default, (Role.BUFFER, Role.BATCH, Role.CONSTANT, Role.SCALE))


def _choose(graph: TrainingGraph, told_by: int, condition: torch._ops.OpOverload, roles: tuple[Role, ...]) -> None:
    written = [
        i for i, output in enumerate(graph.outputs)
        if output.kind is OutputKind.UPDATE and graph.inputs[output.target or 0].role in roles
    ]  # fmt: skip
    if not written:
        return
    nodes = graph.module.graph
    result = next(iter(reversed(nodes.nodes)))
    placeholders = [node for node in nodes.nodes if node.op == "placeholder"]
    values = list(result.args[0])

    def made(target: torch._ops.OpOverload, args: tuple, value: torch.Tensor) -> fx.Node:
        node = nodes.call_function(target, args)
        node.meta = {"val": value, "custom": {"phase": "update"}}
        return node

    with nodes.inserting_before(result):
        told = values[told_by].meta["val"]
        holds = made(condition, (values[told_by],), told.new_empty((), dtype=torch.bool))
        for i in written:
            new, old = values[i], placeholders[graph.outputs[i].target or 0]
            values[i] = made(aten.where.self, (holds, new, old), new.meta["val"])
    result.args = (tuple(values),)
    nodes.lint()
    graph.module.recompile()
