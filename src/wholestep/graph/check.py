"""The verifier: a TrainingGraph in, nothing out, or a GraphError that names the node, its module and its source line.

It runs after capture and after every pass in tests, so it must be quick (one walk over the nodes) and must not flag
what is legal. One case looks wrong and is not: a forward node may read a backward value. A loss that itself
differentiates (a gradient penalty, meta-learning) has its inner backward inside the forward, so the two may alternate.
The update is different: it ends the step, so neither forward nor backward may read what it wrote.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from wholestep.graph.training_graph import OutputKind, Role, TrainingGraph, module_of, source_of

_PHASES = ("forward", "backward", "update")
_NOTHING: dict[str, Any] = {}


class GraphError(AssertionError):
    """A training graph breaks one of its own rules: a defect of capture or of a pass, never of the user's model."""


def check(graph: TrainingGraph, *, strict: bool = False) -> None:
    """Raise GraphError unless the graph keeps its rules; with `strict`, operations nobody reads are errors too."""
    if not _is_well_formed(graph.graph):
        _raise_malformed(graph)
    _check_inputs(graph)
    _check_outputs(graph)
    _check_nodes(graph, strict=strict)
    _check_names(graph)


def _is_well_formed(graph: fx.Graph) -> bool:
    """As `Graph.lint`, in fewer steps: every node reads what stands before it, and has a name of its own."""
    seen: set[fx.Node] = set()
    names: set[str] = set()
    for node in graph.nodes:
        if node.graph is not graph or not seen.issuperset(node.all_input_nodes):
            return False
        if node.op != "call_function" and not isinstance(node.target, str):
            return False
        if node.op == "call_function" and not callable(node.target):
            return False
        if node.op == "get_attr" and not _has_attribute(graph.owning_module, node.target):
            return False
        seen.add(node)
        names.add(node.name)
    return len(names) == len(seen)


def _has_attribute(module: Any, path: Any) -> bool:
    for part in path.split("."):
        module = getattr(module, part, None)
    return module is not None


def _raise_malformed(graph: TrainingGraph) -> None:
    try:
        graph.graph.lint()
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        raise GraphError(f"graph made by {graph.made_by} is malformed: {error}") from error
    raise GraphError(f"graph made by {graph.made_by} is malformed")


def looked_at(graph: TrainingGraph) -> list[Any]:
    """All that `check` looks at. Two lists whose entries are the same objects are a graph that nobody touched in between."""
    tables = (graph.inputs, graph.outputs, *graph.gradients.items(), *graph.boundaries.items())
    found: list[Any] = [part for entry in tables for part in entry]
    for node in graph.graph.nodes:
        meta = node.meta
        phase = (meta.get("custom") or _NOTHING).get("phase")
        found += (node, node.op, node.name, node.target, node.args, node.kwargs, meta.get("val"), phase)
    return found


def where(node: fx.Node) -> str:
    """`node mm_3 (aten.mm.default), module encoder.0, model.py:12`: how every error names a node."""
    parts = [f"node {node.name} ({node.target})"]
    if module_of(node):
        parts.append(f"module {module_of(node)}")
    if source_of(node):
        parts.append(str(source_of(node)))
    return ", ".join(parts)


def _check_inputs(graph: TrainingGraph) -> None:
    placeholders = graph.placeholders
    if len(placeholders) != len(graph.inputs):
        raise GraphError(f"{len(placeholders)} placeholders, but {len(graph.inputs)} inputs are described")
    seen: dict[tuple[Role, str], int] = {}
    for index, (entry, node) in enumerate(zip(graph.inputs, placeholders, strict=True)):
        key = (entry.role, entry.name)
        if key in seen:
            raise GraphError(f"inputs {seen[key]} and {index} are both called {entry}")
        seen[key] = index
        if "val" not in node.meta:
            raise GraphError(f"{where(node)}: input {entry} has no meta['val']")


def _check_outputs(graph: TrainingGraph) -> None:
    output = graph.output_node
    if output.op != "output" or len(output.args) != 1 or not isinstance(output.args[0], list | tuple):
        raise GraphError("the graph does not end in one flat output tuple")
    values = graph.output_values
    if len(values) != len(graph.outputs):
        raise GraphError(f"{len(values)} values are returned, but {len(graph.outputs)} outputs are described")
    kinds = {entry.kind for entry in graph.outputs}
    # The update half of an accumulated step reads gradients and returns no loss; every other graph has one.
    update_only = any(entry.role is Role.GRADIENT for entry in graph.inputs)
    if OutputKind.LOSS not in kinds and not update_only:
        raise GraphError("no output is the loss, and no input is a gradient (so this is not an update graph)")
    _check_updates(graph)


def _check_updates(graph: TrainingGraph) -> None:
    placeholders = graph.placeholders
    updated: dict[int, str] = {}
    for entry, value in zip(graph.outputs, graph.output_values, strict=True):
        if not isinstance(value, fx.Node):
            # An auxiliary result may be a plain number, and a parameter that the loss does not reach has no gradient.
            if entry.kind not in (OutputKind.AUX, OutputKind.KEPT, OutputKind.GRADIENT):
                raise GraphError(f"output {entry.kind.value}:{entry.name} is {value!r}, not a node")
            continue
        if entry.kind is not OutputKind.UPDATE:
            continue
        if entry.target is None or not 0 <= entry.target < len(placeholders):
            raise GraphError(f"{where(value)}: update {entry.name} targets input {entry.target}, which does not exist")
        if entry.target in updated:
            raise GraphError(
                f"{where(value)}: input {graph.inputs[entry.target]} is updated twice "
                f"(outputs {updated[entry.target]} and {entry.name})"
            )
        updated[entry.target] = entry.name
        new, old = value.meta.get("val"), placeholders[entry.target].meta.get("val")
        if not _alike(new, old):
            place = f"{where(value)}: update of {graph.inputs[entry.target]}"
            raise GraphError(f"{place} is {_facts(new)}, the input is {_facts(old)}")


def _check_nodes(graph: TrainingGraph, *, strict: bool) -> None:
    made_by_update: set[fx.Node] = set()
    silent: dict[Any, bool] = {}
    """Target -> whether it returns nothing: an assertion on the values of a tensor."""
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.target not in silent:
            silent[node.target] = _returns_nothing(node)
        _check_node(node, silent[node.target], made_by_update)
        if strict and not node.users and not silent[node.target]:
            raise GraphError(f"{where(node)}: nobody reads it")


def _returns_nothing(node: fx.Node) -> bool:
    """Raises for an operator that may not be called at all."""
    if node.op != "call_function":
        raise GraphError(f"{where(node)}: a {node.op} node; only operators may be called")
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        raise GraphError(f"{where(node)}: mutates an argument, and training graphs are functional: {schema}")
    return schema is not None and not schema.returns


def _check_node(node: fx.Node, returns_nothing: bool, made_by_update: set[fx.Node]) -> None:
    """Its value and its phase; it is added to what the update makes where that is its phase."""
    if "val" not in node.meta and not returns_nothing:
        raise GraphError(f"{where(node)}: no meta['val']")
    phase = _declared_phase(node)
    if phase not in _PHASES:
        raise GraphError(f"{where(node)}: phase is {phase!r}, not one of {', '.join(_PHASES)}")
    if phase == "update":
        made_by_update.add(node)
    elif not made_by_update.isdisjoint(node.all_input_nodes):
        source = next(entry for entry in node.all_input_nodes if entry in made_by_update)
        raise GraphError(f"{where(node)}: a {phase} node reads {source.name}, which the update makes")


def _check_names(graph: TrainingGraph) -> None:
    names = {node.name for node in graph.graph.nodes}
    for table, field in ((graph.gradients, "gradients"), (graph.boundaries, "boundaries")):
        for key, name in table.items():
            if name not in names:
                raise GraphError(f"{field}[{key!r}] names the node {name}, which is not in the graph")


def _declared_phase(node: fx.Node) -> Any:
    """The phase as written: `phase_of` falls back to forward, and a missing phase is what is looked for here."""
    return (node.meta.get("custom") or {}).get("phase")


def _alike(new: Any, old: Any) -> bool:
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        return _facts(new) == _facts(old)
    return new.shape == old.shape and new.dtype is old.dtype and new.device == old.device


def _facts(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype, str(value.device))
    return type(value).__name__
