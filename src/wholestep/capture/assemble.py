"""From the record of one traced step to a TrainingGraph: live constants, no mutation, outputs with a meaning.

In: the FX graph that tracing recorded, with the meaning of its inputs and outputs. Out: a TrainingGraph. Tensors the trace met
on its own become inputs; writes become values (one `copy_` per written input, which turns into an UPDATE output).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from wholestep import compat
from wholestep.capture.provenance import complete
from wholestep.capture.subject import Subject
from wholestep.capture.written_views import settle_written_views
from wholestep.errors import CaptureRefused
from wholestep.graph.edit import remove_unread, replace_each
from wholestep.graph.training_graph import Input, Output, OutputKind, Role, TrainingGraph

aten = torch.ops.aten


def lift_constants(recorded: fx.GraphModule, subject: Subject, mode: compat.FakeMode) -> tuple[torch.Tensor, ...]:
    """Tensors that the trace met without being given them become inputs, read live at every step."""
    graph = recorded.graph
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    live: list[torch.Tensor] = []
    placeholders: list[fx.Node] = []
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        tensor = getattr(recorded, str(node.target))
        if compat.is_fake(tensor):
            raise CaptureRefused("a tensor kept from an earlier call is read")
        if not isinstance(tensor, torch.Tensor):
            continue
        if _becomes_literal(graph, node, tensor):
            continue
        known = next((i for i, t in enumerate(live) if t is tensor), None)
        if known is None:
            with graph.inserting_after(placeholders[-1] if placeholders else last):
                placeholders.append(graph.placeholder(f"constant{len(live)}"))
            placeholders[-1].meta["val"] = compat.to_fake(mode, tensor)
            live.append(tensor)
            known = len(live) - 1
        node.replace_all_uses_with(placeholders[known])
        graph.erase_node(node)
    _refuse_trained_constants(live, subject)
    return tuple(live)


def _becomes_literal(graph: fx.Graph, node: fx.Node, tensor: torch.Tensor) -> bool:
    """A number written in the code (`torch.tensor(0.5)`, or an empty list) is not state: it is put in the graph."""
    fresh = (aten.lift_fresh.default, aten.lift_fresh_copy.default)
    if (
        not (tensor.dim() == 0 or tensor.numel() == 0)
        or not node.users
        or not all(u.target in fresh for u in node.users)
    ):
        return False
    with graph.inserting_before(node):
        number = graph.call_function(
            aten.full.default,
            (list(tensor.shape), tensor.item() if tensor.numel() else 0),
            {"dtype": tensor.dtype, "device": tensor.device},
        )
    number.meta = {k: v for k, v in next(iter(node.users)).meta.items() if k in ("val", "custom")}
    for user in list(node.users):
        user.replace_all_uses_with(number)
        graph.erase_node(user)
    graph.erase_node(node)
    return True


def _refuse_trained_constants(live: list[torch.Tensor], subject: Subject) -> None:
    trained = {id(p): n for n, p in subject.trained.items()}
    for tensor in live:
        if id(tensor) in trained:
            raise CaptureRefused(
                f"{trained[id(tensor)]} is read around its module (through a closure or a list), so its gradient would be lost"
            )


def functional(
    recorded: fx.GraphModule, fakes: Callable[[], list[Any]], mode: compat.FakeMode
) -> tuple[fx.GraphModule, dict[Any, Any]]:
    """The second tracing where something mutates. With it: symbol of a count that only data tells -> its name in that trace.

    `fakes`: makes those of the inputs, which only a second tracing needs.
    """
    remove_unread(recorded.graph)
    if not any(_mutates(node) for node in recorded.graph.nodes):
        return recorded, {}  # already functional: half of the tracing time saved
    settle_written_views(recorded)
    again = _Again(recorded)
    # A fake forgets what was counted at it: its second count has a name of its own, which is not known to be a number yet.
    mode.epoch += 1
    with compat.counts_are_large(mode):
        module = compat.trace(lambda *flat: again.run(*flat), fakes(), mode=mode, functional=True)
    return module, again.names


class _Again(fx.Interpreter):
    """Runs a trace for the second time, in which counts that only data tells have new names."""

    def __init__(self, recorded: fx.GraphModule) -> None:
        super().__init__(recorded)
        self.names: dict[Any, Any] = {}
        """Symbol of the first time -> that of the second."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        for before, now in zip(_sizes(n.meta.get("val")), _sizes(value)):
            if isinstance(before, torch.SymInt) and isinstance(now, torch.SymInt):
                first, second = before.node._expr, now.node._expr  # `expr` is a number as soon as that is known
                if first.is_symbol and second.is_symbol:
                    self.names.setdefault(first, second)
        return value


def _sizes(value: Any) -> Sequence[Any]:
    return value.shape if isinstance(value, torch.Tensor) else [value]


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and (schema is None or schema.is_mutable) and node.target is not operator.getitem


_IDENTITIES = (
    aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default,
    torch.ops.ws.enter.default,  # its derivative is in the graph by now
)  # fmt: skip


def assemble(
    module: fx.GraphModule, inputs: Sequence[Input], meanings: list[Output], *, num_sites: int = 0
) -> TrainingGraph:
    """From a functional trace to a TrainingGraph: writes to inputs become outputs, helper outputs become tables; keys beyond
    `num_sites` were not taken."""
    graph = module.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    replaced: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.target in _IDENTITIES:
            replaced[node] = replaced.get(node.args[0], node.args[0])
    replace_each(graph, replaced)
    output = next(iter(reversed(graph.nodes)))
    values, outputs = list(output.args[0]), list(meanings)
    for node in list(graph.nodes):
        if node.target is aten.copy_.default and node.args[0] in placeholders:
            index = placeholders.index(node.args[0])
            target, new = node.args[0], node.args[1]
            if new.meta["val"].dtype != target.meta["val"].dtype or new.meta["val"].shape != target.meta["val"].shape:
                raise CaptureRefused(f"{inputs[index]} is overwritten with another shape or dtype")
            values = [new if v is node else v for v in values]
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            updated = any(
                m.kind is OutputKind.UPDATE and m.target == index for m in meanings
            )  # by the optimizer, after it
            if new is not target and not updated:
                values.append(new)
                outputs.append(Output(OutputKind.UPDATE, str(inputs[index]), index))
    gradients, boundaries, kept = {}, {}, []
    for value, meaning in zip(values, outputs, strict=True):
        marks, _, name = meaning.name.partition("/") if meaning.kind is OutputKind.KEPT else ("", "", "")
        if marks == "gradient":
            gradients[name] = value
        elif marks == "boundary":
            boundaries[name] = value
        elif not (meaning.kind is OutputKind.UPDATE and value is placeholders[meaning.target or 0]):
            kept.append((value, meaning))
    output.args = (tuple(v for v, _ in kept),)
    remove_unread(graph)
    kept_inputs, outputs = _drop_unused(graph, placeholders, inputs, [m for _, m in kept], num_sites)
    complete(module)
    graph.lint()
    module.recompile()
    alive = set(graph.nodes)
    return TrainingGraph(
        module, tuple(kept_inputs), tuple(outputs),
        {n: v.name for n, v in gradients.items() if v in alive},
        {n: v.name for n, v in boundaries.items() if isinstance(v, fx.Node) and v in alive},
    )  # fmt: skip


def _drop_unused(
    graph: fx.Graph, placeholders: list[fx.Node], inputs: Sequence[Input], outputs: list[Output], num_sites: int
) -> tuple[list[Input], list[Output]]:
    """Parameters that got no gradient have no state, as in torch: unused state inputs leave the graph, and so do spare keys."""
    spare = {Input(Role.KEY, f"site{site}") for site in range(num_sites, len(inputs))}
    dropped = [
        i
        for i, p in enumerate(placeholders)
        if not p.users and (inputs[i].role in (Role.STATE, Role.GRADIENT) or inputs[i] in spare)
    ]
    for i in dropped:
        graph.erase_node(placeholders[i])
    place: dict[int, int] = {}
    kept: list[Input] = []
    for i, entry in enumerate(inputs):
        if i not in dropped:
            place[i] = len(kept)
            kept.append(entry)
    return kept, [o if o.target is None else dataclasses.replace(o, target=place[o.target]) for o in outputs]
