"""Graphs to bytes and back, for the caches: a TrainingGraph or a bare fx.GraphModule in, bytes out, and the reverse.

Tracing takes seconds and reading a file a fraction of one, so capture keeps what it traced. The format is one line of
JSON (format, version, kind) and then a zlib-compressed JSON document; nothing in it is executed, there is no pickle.

Kept exactly: node names and order, operators, arguments (floats bit by bit), `meta["val"]`, `meta["custom"]`, tensor
constants, and all that a TrainingGraph says about its inputs and outputs. Not kept:

- other entries of `node.meta`;
- the storages of the fake tensors. A view is restored with its shape, strides and offset, but as a tensor of its own,
  and values of the same shape, strides, offset, type and device share ONE FakeTensor within a load (making thousands of
  them would take most of the loading time). The graph is functional, so nothing may depend on which fake tensors share
  memory; `liveness.py` reads aliasing from the operators' schemas.

What cannot be written raises ValueError with the reason, and the caller does not cache: symbolic shapes, higher-order
operators and sub-modules, constants beyond `MAX_CONSTANT_BYTES`.
"""

from __future__ import annotations

import base64
import importlib
import json
import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from wholestep import compat
from wholestep.graph.mesh import Ranks
from wholestep.graph.training_graph import Input, Output, OutputKind, Role, Target, TrainingGraph

FORMAT = "wholestep.graph"
VERSION = 4
MAX_CONSTANT_BYTES = 1 << 20
"""Constants burned into a graph are scalars and small tables; a larger one means that a weight slipped in."""

# Plain functions a graph may call besides operators. The file names them, so the list is closed: reading must not
# import whatever a file asks for.
_FUNCTION_MODULES = ("_operator", "math")

_MEMORY_FORMATS = {
    str(entry): entry
    for entry in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format)
}


def dumps(graph: TrainingGraph) -> bytes:
    """The training graph as bytes. Raises ValueError, saying why, when it cannot be cached."""
    body = _module_to_plain(graph.module)
    body["inputs"] = [[entry.role.value, entry.name] for entry in graph.inputs]
    body["outputs"] = [[entry.kind.value, entry.name, entry.target] for entry in graph.outputs]
    body["gradients"] = list(graph.gradients.items())
    body["boundaries"] = list(graph.boundaries.items())
    body["made_by"] = graph.made_by
    body["seconds"] = graph.seconds
    body["target"] = graph.target.device
    body["ranks"] = graph.ranks.to_json()
    return _pack("training_graph", body)


def loads(data: bytes, fake_mode: FakeTensorMode | None = None) -> TrainingGraph:
    """The training graph that `dumps` wrote. Its fake tensors belong to `fake_mode`, or to a new mode."""
    body = _unpack("training_graph", data)
    return TrainingGraph(
        module=_module_from_plain(body, fake_mode or FakeTensorMode()),
        inputs=tuple(Input(Role(role), name) for role, name in body["inputs"]),
        outputs=tuple(Output(OutputKind(kind), name, target) for kind, name, target in body["outputs"]),
        gradients=dict(body["gradients"]),
        boundaries=dict(body["boundaries"]),
        made_by=body["made_by"],
        seconds=body["seconds"],
        target=Target(body["target"]),
        ranks=Ranks.from_json(body["ranks"]),
    )


def dumps_module(module: fx.GraphModule) -> bytes:
    """A bare graph module (a decomposed region, for instance) as bytes."""
    return _pack("module", _module_to_plain(module))


def loads_module(data: bytes, fake_mode: FakeTensorMode | None = None) -> fx.GraphModule:
    """The graph module that `dumps_module` wrote."""
    return _module_from_plain(_unpack("module", data), fake_mode or FakeTensorMode())


def target_name(target: Any) -> str:
    """The qualified name of an operator or function: `aten.mm.default`, `ws.dropout.default`, `_operator.getitem`."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, operator = target._schema.name.partition("::")
        return f"{namespace}.{operator}.{target._overloadname}"
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', repr(target))}"


def resolve_target(name: str) -> Callable[..., Any]:
    """The operator or function called `name`; the inverse of `target_name`."""
    module, _, attribute = name.rpartition(".")
    if module in _FUNCTION_MODULES:
        return getattr(importlib.import_module(module), attribute)
    try:
        namespace, operator, overload = name.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"the stored graph calls {name}, which this process does not know") from error


def _pack(kind: str, body: dict[str, Any]) -> bytes:
    header = json.dumps({"format": FORMAT, "version": VERSION, "kind": kind})
    text = json.dumps(body, separators=(",", ":"), allow_nan=False)
    # Level 1: a graph repeats itself so much that higher levels cost time and save little.
    return header.encode() + b"\n" + zlib.compress(text.encode(), 1)


def _unpack(kind: str, data: bytes) -> dict[str, Any]:
    head, _, packed = data.partition(b"\n")
    try:
        header = json.loads(head)
        stored_format, version, stored_kind = header["format"], header["version"], header["kind"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("not a stored graph: the first line is not its header") from error
    if stored_format != FORMAT or version != VERSION:
        raise ValueError(
            f"stored graph has format {stored_format} version {version}; this is {FORMAT} version {VERSION}"
        )
    if stored_kind != kind:
        raise ValueError(f"stored graph is a {stored_kind}, asked for a {kind}")
    try:
        return json.loads(zlib.decompress(packed))
    except (ValueError, zlib.error) as error:
        raise ValueError("stored graph is damaged") from error


def _module_to_plain(module: fx.GraphModule) -> dict[str, Any]:
    """One row [op, name, target, args, kwargs, val, custom] per node, and tables for what repeats among them."""
    writer = _Writer()
    rows = []
    for node in module.graph.nodes:
        rows.append(writer.row(node))
        writer.position[node] = len(rows) - 1
    constants = _constants_to_plain(module)
    tables = {"targets": writer.targets, "tensors": writer.tensors, "customs": writer.customs}
    return {
        "nodes": rows,
        **{name: [json.loads(key) for key in table] for name, table in tables.items()},
        "constants": constants,
    }


def _module_from_plain(body: dict[str, Any], fake_mode: FakeTensorMode) -> fx.GraphModule:
    graph = fx.Graph()
    reader = _Reader(body, fake_mode)
    for op, name, target, args, kwargs, val, custom in body["nodes"]:
        node = graph.create_node(
            op,
            reader.targets[target] if op == "call_function" else reader.names[target],
            tuple([reader.value(entry) for entry in args]),
            {key: reader.value(entry) for key, entry in kwargs.items()},
            name=name,
        )
        if node.name != name:  # fx refuses names such as `sum`, which a pass may have set nevertheless
            node.name = name
        if val is not None:
            node.meta["val"] = reader.value(val)
        if custom is not None:
            node.meta["custom"] = reader.custom(custom)
        reader.nodes.append(node)
    constants = {name: _constant_from_plain(entry) for name, entry in body["constants"].items()}
    return compat.GraphModule(constants, graph)


def _constants_to_plain(module: fx.GraphModule) -> dict[str, Any]:
    stored: dict[str, Any] = {}
    total = 0
    for node in module.graph.find_nodes(op="get_attr"):
        if node.target in stored:
            continue
        value: Any = module
        for part in node.target.split("."):
            value = getattr(value, part)
        reason = _why_not_stored(value)
        if reason:
            raise ValueError(f"cannot store the graph: constant {node.target} {reason}")
        span = _span(value)
        total += span * value.element_size()
        if total > MAX_CONSTANT_BYTES:
            raise ValueError(
                f"cannot store the graph: its tensor constants exceed {MAX_CONSTANT_BYTES} bytes (at {node.target}); "
                "make large tensors inputs"
            )
        # The raw span of memory, so that strides (also 0 of an expanded constant) come back as they were.
        raw = value.detach().as_strided((span,), (1,), value.storage_offset()).cpu().view(torch.uint8)
        stored[node.target] = {
            "bytes": base64.b64encode(raw.numpy().tobytes()).decode(),
            "shape": list(value.shape),
            "stride": list(value.stride()),
            "dtype": _dtype_name(value.dtype),
            "device": str(value.device),
        }
    return stored


def _constant_from_plain(entry: dict[str, Any]) -> torch.Tensor:
    raw = bytearray(base64.b64decode(entry["bytes"]))
    dtype = _named_dtype(entry["dtype"])
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.clone().to(entry["device"]).as_strided(entry["shape"], entry["stride"])


def _why_not_stored(value: Any) -> str | None:
    if not isinstance(value, torch.Tensor):
        return f"is a {type(value).__name__}, not a tensor"
    if isinstance(value, FakeTensor) or value.device.type == "meta":
        return "has no data"
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a tensor subclass ({type(value).__name__})"
    if value.layout is not torch.strided or value.is_quantized or value.is_conj() or value.is_neg():
        return "is not a plain strided tensor"
    return None


def _span(tensor: torch.Tensor) -> int:
    """Elements of storage between the first and the last element of the tensor."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _named_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the stored graph uses the type {name}, which this torch does not know")
    return dtype


def _whole_numbers(tensor: torch.Tensor) -> tuple[list[int], list[int], int]:
    numbers = [*tensor.shape, *tensor.stride(), tensor.storage_offset()]
    if not all(type(number) is int for number in numbers):
        raise ValueError(f"symbolic shape {tuple(tensor.shape)}: graphs with symbolic shapes are not stored")
    return numbers[: tensor.dim()], numbers[tensor.dim() : -1], numbers[-1]


def _number(table: dict[str, int], entry: Any) -> int:
    return table.setdefault(json.dumps(entry), len(table))


def _fake_tensor(shape: list[int], stride: list[int], offset: int, dtype: str, device: str) -> torch.Tensor:
    if offset == 0:
        return torch.empty_strided(shape, stride, dtype=_named_dtype(dtype), device=device)
    extent = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    base = torch.empty(offset + extent, dtype=_named_dtype(dtype), device=device)
    return base.as_strided(shape, stride, offset)


def _require_stored_target(node: fx.Node) -> None:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return
    if getattr(target, "__module__", None) in _FUNCTION_MODULES:
        return
    raise ValueError(f"cannot store the graph: node {node.name} calls {target_name(target)}, which is not an operator")


class _Writer:
    """Turns values into JSON: plain values stand for themselves, all else is an object with one key that says what."""

    def __init__(self) -> None:
        self.position: dict[fx.Node, int] = {}
        # Each table maps the JSON text of an entry to its number; dicts keep the order in which entries came.
        self.targets: dict[str, int] = {}
        self.tensors: dict[str, int] = {}
        self.customs: dict[str, int] = {}

    def row(self, node: fx.Node) -> list[Any]:
        if node.op not in ("placeholder", "get_attr", "call_function", "output"):
            raise ValueError(f"cannot store the graph: node {node.name} is a {node.op}")
        target = target_name(node.target)
        if node.op == "call_function":
            _require_stored_target(node)
        args = [self.value(entry) for entry in node.args]
        kwargs = {key: self.value(entry) for key, entry in node.kwargs.items()}
        # A stored null means "no val"; a val that is None is written as a tagged value.
        val = self.value(node.meta["val"]) if "val" in node.meta else None
        if "val" in node.meta and val is None:
            val = {"none": 0}
        custom = None
        if node.meta.get("custom") is not None:
            custom = _number(self.customs, self.value(node.meta["custom"]))
        return [node.op, node.name, _number(self.targets, target), args, kwargs, val, custom]

    def value(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, fx.Node):
            return {"node": self.position[value]}
        if isinstance(value, torch.Tensor):
            return {"tensor": self.tensor(value)}
        if isinstance(value, list):
            return [self.value(entry) for entry in value]
        if isinstance(value, tuple):
            return {"tuple": [self.value(entry) for entry in value]}
        if isinstance(value, dict):
            return {"dict": [[self.value(key), self.value(entry)] for key, entry in value.items()]}
        return self.rare_value(value)

    def rare_value(self, value: Any) -> Any:
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise ValueError(f"symbolic value {value}: graphs with symbolic shapes are not stored")
        if isinstance(value, slice):
            return {"slice": [self.value(value.start), self.value(value.stop), self.value(value.step)]}
        if isinstance(value, torch.dtype):
            return {"dtype": _dtype_name(value)}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, torch.layout):
            return {"layout": str(value).removeprefix("torch.")}
        if isinstance(value, torch.memory_format):
            return {"memory_format": str(value)}
        if isinstance(value, complex):
            return {"complex": [self.value(value.real), self.value(value.imag)]}
        if value is Ellipsis:
            return {"ellipsis": 0}
        raise ValueError(f"cannot store the graph: {type(value).__name__} {value!r:.60} in it has no stored form")

    def tensor(self, tensor: torch.Tensor) -> int:
        if tensor.layout is not torch.strided:
            raise ValueError(f"cannot store the graph: it has a value of layout {tensor.layout}")
        shape, stride, offset = _whole_numbers(tensor)
        return _number(self.tensors, [shape, stride, offset, _dtype_name(tensor.dtype), str(tensor.device)])


class _Reader:
    """The inverse of `_Writer`: tables first, then values by their tag."""

    def __init__(self, body: dict[str, Any], fake_mode: FakeTensorMode) -> None:
        self.nodes: list[fx.Node] = []
        self.names: list[str] = body["targets"]
        self.targets = _ResolvedTargets(self.names)
        self.customs: list[Any] = body["customs"]
        with fake_mode:
            self.tensors = [_fake_tensor(*entry) for entry in body["tensors"]]

    def custom(self, index: int) -> Any:
        return self.value(self.customs[index])  # built anew for each node: passes write into these dicts

    def value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.value(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        ((tag, content),) = value.items()
        if tag == "node":
            return self.nodes[content]
        if tag == "tensor":
            return self.tensors[content]
        if tag == "tuple":
            return tuple([self.value(entry) for entry in content])
        if tag == "dict":
            return {self.value(key): self.value(entry) for key, entry in content}
        return self.rare_value(tag, content)

    def rare_value(self, tag: str, content: Any) -> Any:
        if tag == "float":
            return float(content)
        if tag == "slice":
            return slice(*[self.value(entry) for entry in content])
        if tag == "dtype":
            return _named_dtype(content)
        if tag == "device":
            return torch.device(content)
        if tag == "layout":
            return getattr(torch, content)
        if tag == "memory_format":
            return _MEMORY_FORMATS[content]
        if tag == "complex":
            return complex(*[self.value(entry) for entry in content])
        if tag == "ellipsis":
            return Ellipsis
        if tag == "none":
            return None
        raise ValueError(f"stored graph is damaged: unknown kind of value {tag!r}")


class _ResolvedTargets:
    """Operators by table number, looked up on first use: the table also holds the names of placeholders."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._found: dict[int, Callable[..., Any]] = {}

    def __getitem__(self, index: int) -> Callable[..., Any]:
        if index not in self._found:
            self._found[index] = resolve_target(self._names[index])
        return self._found[index]
