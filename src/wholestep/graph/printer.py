"""The graph as a Python program: a TrainingGraph in, source that a person can read and Python can run out.

Every operation is one line with its type, module path and source line as a comment. Layers that are equal print as one
function and one call per layer (`structure.py` decides what is equal), so 24 layers read like one. Only neighbouring
nodes are folded and nothing is reordered, so the program computes exactly what the graph does; it keeps every value
alive until it returns, so it is for reading and for checking, not for measuring memory.
"""

from __future__ import annotations

import builtins
import collections
import dataclasses
import hashlib
import keyword
import math
import operator
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from wholestep.graph.serialise import target_name
from wholestep.graph.structure import EqualRuns, equal_runs, external_inputs
from wholestep.graph.training_graph import (
    Input,
    OutputKind,
    Role,
    TrainingGraph,
    constant_of,
    module_of,
    phase_of,
    source_of,
)

WIDTH = 120
MAX_INLINE_CONSTANT = 64
"""Elements of a tensor constant that is written into the source; larger ones go into the table CONSTANTS."""

_SHORT_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "b8", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip

# Owners whose inputs often share a name with a parameter get it as a prefix.
_ROLE_PREFIXES = {
    Role.HYPER: "hyper_",
    Role.KEY: "key_",
    Role.CONSTANT: "constant_",
    Role.GRADIENT: "grad_",
    Role.SCALE: "scale_",
}

_RESERVED = {"torch", "operator", "math", "step", "CONSTANTS", *keyword.kwlist, *dir(builtins)}


@dataclasses.dataclass(frozen=True, slots=True)
class _Fold:
    """Equal runs of nodes and the name of the function they print as."""

    name: str
    equal: EqualRuns


def to_python(graph: TrainingGraph, *, fold_layers: bool = True) -> str:
    """The source of the step: `step(*inputs)` takes the inputs in the graph's order and returns its flat outputs."""
    folds = _folds(graph) if fold_layers else []
    namespaces = _namespaces(graph)
    names = _Names([*namespaces, *[fold.name for fold in folds]])
    # Operations first: they keep the names that errors, gradients and boundaries call them by.
    for node in graph.graph.nodes:
        if node.op in ("get_attr", "call_function"):
            names.add(node, node.name)
    for entry, node in zip(graph.inputs, graph.placeholders, strict=True):
        names.add(node, _input_name(entry))
    sections = [_header(graph), _preamble(graph, namespaces)]
    sections += [_function(fold, graph, namespaces) for fold in folds]
    sections.append(_step(graph, folds, names))
    return "\n\n\n".join(sections) + "\n"


def fingerprint(graph: TrainingGraph) -> str:
    """A hash that equal programs share."""
    return hash_source(to_python(graph))


def hash_source(source: str) -> str:
    """Of what is computed: empty lines, imports and lines of comments do not count, nor where the model's own lines stand."""
    lines = [line for line in source.splitlines() if line.strip() and not line.lstrip().startswith(("#", "import "))]
    lines = [re.sub(r"  \S+\.py:\d+$", "", line) for line in lines]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def dump(graph: TrainingGraph, folder: str | Path, stage: str, number: int, effect: str = "") -> Path:
    """Write `00_captured.py` into `folder`, headed by stage, effect, who made the graph and how long that took."""
    return _write(folder, stage, number, effect, to_python(graph))


def dump_source(
    source: str, folder: str | Path, stage: str, number: int, made_by: str, seconds: float, effect: str = ""
) -> Path:
    """The same for a stage that is no longer a graph: the generated code that calls regions and kernels."""
    return _write(folder, stage, number, effect, f"# Made by {made_by} in {seconds:.2f} s.\n\n{source}")


def _write(folder: str | Path, stage: str, number: int, effect: str, text: str) -> Path:
    path = Path(folder) / f"{number:02d}_{stage}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = [f"# Stage {number:02d}: {stage}."]
    if effect:
        head += textwrap.wrap(f"Effect: {effect}", WIDTH, initial_indent="# ", subsequent_indent="# ")
    path.write_text("\n".join([*head, text]), encoding="utf-8")
    return path


def value_type(value: Any) -> str:
    """`f32[8, 64]`, `(f32[8], i64[])` or `int`: the type comment of a node's `meta["val"]`."""
    if isinstance(value, torch.Tensor):
        dtype = _SHORT_DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(value_type, value)) + ")"
    return "None" if value is None else type(value).__name__


def _folds(graph: TrainingGraph) -> list[_Fold]:
    """One function for each group of equal runs: `transformer_h_forward`, a second kind `transformer_h_forward_2`."""
    folds: list[_Fold] = []
    used: collections.Counter[str] = collections.Counter()
    for equal in equal_runs(graph):
        base = f"{_identifier(equal.family.prefix) or 'layer'}_{equal.phase}"
        used[base] += 1
        folds.append(_Fold(base if used[base] == 1 else f"{base}_{used[base]}", equal))
    return folds


def _header(graph: TrainingGraph) -> str:
    phases = collections.Counter(phase_of(node) for node in graph.operations())
    counts = ", ".join(f"{phase} {phases[phase]}" for phase in ("forward", "backward", "update") if phases[phase])
    return "\n".join(
        [
            f"# Training step: {sum(phases.values())} operations ({counts or 'none'}), "
            f"{len(graph.inputs)} inputs, {len(graph.outputs)} outputs.",
            f"# Made by {graph.made_by} in {graph.seconds:.2f} s.",
        ]
    )


def _preamble(graph: TrainingGraph, namespaces: Sequence[str]) -> str:
    called = {node.target for node in graph.operations() if _is_function(node.target) and not _is_item(node)}
    modules = {"torch", *map(_function_module, called)}
    lines = [f"import {module}" for module in sorted(modules)]
    if "ws" in namespaces:
        lines.append("import wholestep.ops  # registers torch.ops.ws")
    lines.append("")
    lines += [f"{namespace} = torch.ops.{namespace}" for namespace in namespaces]
    large = [node for node in graph.graph.find_nodes(op="get_attr") if _inline_constant(graph, node) is None]
    if large:
        lines += ["", "# Tensors too large to print: fill in from the graph module's attributes of these names."]
        lines += [f"# {node.target}: {value_type(constant_of(graph.module, node))}" for node in large]
        lines.append("CONSTANTS = {}")
    return "\n".join(lines)


def _step(graph: TrainingGraph, folds: Sequence[_Fold], names: _Names) -> str:
    lines = ["@torch.no_grad()", "def step("]
    role = None
    for entry, node in zip(graph.inputs, graph.placeholders, strict=True):
        if entry.role is not role:
            role = entry.role
            lines.append(f"    # {role.value}")
        lines.append(f"    {names[node]},  # {value_type(node.meta.get('val'))}  {entry}")
    lines.append("):")
    for node in graph.graph.find_nodes(op="get_attr"):
        source = _inline_constant(graph, node) or f"CONSTANTS[{str(node.target)!r}]"
        lines.append(f"    {names[node]} = {source}")
    starts = {run[0]: (fold, index) for fold in folds for index, run in enumerate(fold.equal.runs)}
    folded = {node for fold in folds for run in fold.equal.runs for node in run}
    phase = None
    for node in graph.operations():
        if phase_of(node) != phase and (node in starts or node not in folded):
            phase = phase_of(node)
            lines.append(f"    # ---- {phase} ----")
        if node in starts:
            lines += _call(*starts[node], names)
        elif node not in folded:
            lines.append(f"    {_statement(node, names)}")
    return "\n".join([*lines, *_return(graph, names)])


def _return(graph: TrainingGraph, names: _Names) -> list[str]:
    lines = ["    return ("]
    for entry, value in zip(graph.outputs, graph.output_values, strict=True):
        meaning = f"{entry.kind.value}:{entry.name}"
        if entry.kind is OutputKind.UPDATE and entry.target is not None:
            meaning = f"update {graph.inputs[entry.target]}"
        lines.append(f"        {_literal(value, names)},  # {meaning}")
    return [*lines, "    )"]


def _function(fold: _Fold, graph: TrainingGraph, namespaces: Sequence[str]) -> str:
    """The function of a fold, written from its first run; names lose the layer's number."""
    run, layer = fold.equal.runs[0], fold.equal.layers[0]
    prefix = f"{fold.equal.family.prefix}." if fold.equal.family.prefix else ""
    described = dict(zip(graph.placeholders, graph.inputs, strict=True))
    names = _Names([*namespaces, fold.name])
    for node in run:
        names.add(node, node.name)
    arguments = external_inputs(run)
    for node in arguments:
        entry = described.get(node)
        names.add(node, node.name if entry is None else _input_name(entry, strip=f"{prefix}{layer}."))
    lines = [f"# {prefix}*, layers {_ranges(fold.equal.layers)} x{len(fold.equal.runs)}", f"def {fold.name}("]
    lines += [f"    {names[node]},  # {value_type(node.meta.get('val'))}" for node in arguments]
    lines.append("):")
    for node in run:
        lines.append(f"    {_statement(node, names, replace=(f'{prefix}{layer}', f'{prefix}*'))}")
    lines += _wrapped("    return ", [names[run[position]] for position in fold.equal.returned])
    return "\n".join(lines)


def _call(fold: _Fold, index: int, names: _Names) -> list[str]:
    run = fold.equal.runs[index]
    targets = ", ".join(names[run[position]] for position in fold.equal.returned)
    start = "    " + (f"{targets} = " if targets else "") + f"{fold.name}"
    arguments = [names[node] for node in external_inputs(run)]
    path = f"{fold.equal.family.prefix}.{fold.equal.layers[index]}".lstrip(".")
    one_line = f"{start}({', '.join(arguments)})  # {path}"
    if len(one_line) <= WIDTH:
        return [one_line]
    if len(start) > WIDTH:
        left = [names[run[position]] for position in fold.equal.returned]
        head = [*_wrapped("    ", left)]
        head[-1] += f" = {fold.name}(  # {path}"
    else:
        head = [f"{start}(  # {path}"]
    body = textwrap.wrap(", ".join(arguments), WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return [*head, *body, "    )"]


def _wrapped(start: str, names: Sequence[str]) -> list[str]:
    """`return a` or `return (a, b)`, over several lines when long."""
    if len(names) == 1:
        return [f"{start}{names[0]}"]
    one_line = f"{start}({', '.join(names)})"
    if len(one_line) <= WIDTH:
        return [one_line]
    body = textwrap.wrap(", ".join(names), WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return [f"{start}(", *body, "    )"]


def _statement(node: fx.Node, names: _Names, replace: tuple[str, str] = ("", "")) -> str:
    module = module_of(node)
    if module and replace[0] and f"{module}.".startswith(f"{replace[0]}."):
        module = replace[1] + module[len(replace[0]) :]
    comment = "  ".join(filter(None, (value_type(node.meta.get("val")), module, source_of(node))))
    return f"{names[node]} = {_expression(node, names)}  # {comment}"


def _expression(node: fx.Node, names: _Names) -> str:
    if _is_item(node):
        return f"{_literal(node.args[0], names)}[{node.args[1]}]"
    arguments = [_literal(entry, names) for entry in node.args]
    arguments += [f"{key}={_literal(entry, names)}" for key, entry in node.kwargs.items()]
    return f"{_callee(node.target)}({', '.join(arguments)})"


def _callee(target: Any) -> str:
    if _is_function(target):
        return f"{_function_module(target)}.{target.__qualname__}"
    return target_name(target)


def _is_item(node: fx.Node) -> bool:
    """Element `i` of an operator's results, which prints as `x[i]`."""
    return node.target is operator.getitem and isinstance(node.args[1], int)


def _is_function(target: Any) -> bool:
    return not isinstance(target, torch._ops.OpOverload)


def _function_module(target: Any) -> str:
    return "operator" if target.__module__ == "_operator" else str(target.__module__)


def _literal(value: Any, names: Mapping[fx.Node, str] | _Names) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, tuple):
        inner = ", ".join(_literal(entry, names) for entry in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return "[" + ", ".join(_literal(entry, names) for entry in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_literal(entry, names)}" for key, entry in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({', '.join(_literal(entry, names) for entry in (value.start, value.stop, value.step))})"
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, complex):
        return f"complex({_literal(value.real, names)}, {_literal(value.imag, names)})"
    return "..." if value is Ellipsis else repr(value)


def _inline_constant(graph: TrainingGraph, node: fx.Node) -> str | None:
    """A small plain tensor as source; None when it must come from outside."""
    value = constant_of(graph.module, node)
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    if not plain or value.device.type == "meta" or value.numel() > MAX_INLINE_CONSTANT or not value.is_contiguous():
        return None
    device = "" if value.device.type == "cpu" else f', device="{value.device}"'
    if value.numel() == 0:
        return f"torch.empty({tuple(value.shape)}, dtype={value.dtype}{device})"
    return f"torch.tensor({_literal(value.tolist(), {})}, dtype={value.dtype}{device})"


def _namespaces(graph: TrainingGraph) -> list[str]:
    targets = [node.target for node in graph.operations() if not _is_function(node.target)]
    return sorted({target._schema.name.partition("::")[0] for target in targets})


def _input_name(entry: Input, strip: str = "") -> str:
    name, prefix = _identifier(entry.name.removeprefix(strip)), _ROLE_PREFIXES.get(entry.role, "")
    return name if name.startswith(prefix.rstrip("_")) else prefix + name


def _identifier(text: str) -> str:
    name = re.sub(r"\W+", "_", text).strip("_")
    return f"n{name}" if name[:1].isdigit() else name


def _ranges(numbers: Sequence[int]) -> str:
    """`0-11`, or `0-3, 5` when there are gaps; backward runs come in falling order and print rising."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


class _Names:
    """Unique Python names of the values in one scope."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = {*_RESERVED, *taken}
        self._names: dict[fx.Node, str] = {}

    def add(self, node: fx.Node, wanted: str) -> None:
        base = re.sub(r"\W", "_", wanted) or "value"
        name, number = base, 1
        while name in self._taken:
            number += 1
            name = f"{base}_{number}"
        self._taken.add(name)
        self._names[node] = name

    def __getitem__(self, node: fx.Node) -> str:
        return self._names[node]
