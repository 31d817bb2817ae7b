"""`nonfinite="skip"`: a step that changes nothing keeps the module's buffers too.

The update operators leave parameters and states alone by themselves, told by their scale. Buffers (running means, say) are
written by the forward, before anyone knows the gradients; here their new values become a choice by the gradient norm.
"""

from __future__ import annotations

import torch

from wholestep.graph.training_graph import OutputKind, Role, TrainingGraph

aten = torch.ops.aten


def keep_buffers(graph: TrainingGraph) -> None:
    """Rewrite, in place, every new buffer value into where(the norm is finite, new, old)."""
    norm = next((i for i, output in enumerate(graph.outputs) if output.kind is OutputKind.NORM), None)
    written = [
        i for i, output in enumerate(graph.outputs)
        if output.kind is OutputKind.UPDATE and graph.inputs[output.target or 0].role is Role.BUFFER
    ]  # fmt: skip
    if norm is None or not written:
        return
    nodes = graph.module.graph
    result = next(iter(reversed(nodes.nodes)))
    placeholders = [node for node in nodes.nodes if node.op == "placeholder"]
    values = list(result.args[0])
    with nodes.inserting_before(result):
        finite = nodes.call_function(aten.isfinite.default, (values[norm],))
        finite.meta = {"val": values[norm].meta["val"].to(torch.bool), "custom": {"phase": "update"}}
        for i in written:
            new, old = values[i], placeholders[graph.outputs[i].target or 0]
            values[i] = nodes.call_function(aten.where.self, (finite, new, old))
            values[i].meta = {"val": new.meta["val"], "custom": {"phase": "update"}}
    result.args = (tuple(values),)
    nodes.lint()
    graph.module.recompile()
