"""Values of a checkpoint as JSON and tensors: exact both ways, and nothing pickled.

In: nested tables and lists, as `state_dict()` gives them. Out: JSON in which what JSON lacks (a tuple, integer keys, a tensor) is
a tagged object, and the tensors apart, each with memory of its own.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wholestep.errors import BadCheckpoint

if TYPE_CHECKING:  # what is wrong with a checkpoint is told before torch is loaded
    from torch import Tensor

_TAG = "$"
"""Marks, in JSON, an object that stands for something JSON lacks: a tuple, a table with other keys than text, a tensor."""
DTYPES = {
    "bool": "BOOL", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "int8": "I8", "int16": "I16", "int32": "I32",
    "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""As torch calls them -> as safetensors does."""


def savable(tensor: Tensor, name: str) -> Tensor:
    """The tensor itself, if it can be saved: it is read when it is written, and large ones are not held twice."""
    import torch

    if tensor.layout is not torch.strided or str(tensor.dtype).removeprefix("torch.") not in DTYPES or tensor.is_meta:
        kind = "without data" if tensor.is_meta else f"of {tensor.dtype}, {tensor.layout}"
        raise BadCheckpoint(f"{name!r} is a tensor {kind}, which cannot be saved")
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor:
        raise BadCheckpoint(
            f"{name!r} is a {type(tensor).__name__}, which cannot be saved", hint="save its plain tensors"
        )
    return tensor


def encode(value: Any, path: str, tensors: dict[str, Tensor] | None = None) -> Any:
    """`value` as JSON, exactly: tables with other keys than text, tuples and Counters are tagged; tensors go to `tensors`."""
    if value is None or type(value) in (bool, int, str) or isinstance(value, float):
        return value
    if type(value) in (list, tuple):
        items = [encode(item, f"{path}[{i}]", tensors) for i, item in enumerate(value)]
        return items if type(value) is list else {_TAG: "tuple", "items": items}
    if type(value) in (dict, collections.OrderedDict, collections.Counter):
        inside = {key: encode(item, f"{path}[{key!r}]", tensors) for key, item in value.items()}
        if type(value) is not collections.Counter and _TAG not in inside and all(type(key) is str for key in inside):
            return inside
        tag = "counter" if isinstance(value, collections.Counter) else "dict"
        return {_TAG: tag, "items": [[encode(key, f"a key of {path}"), item] for key, item in inside.items()]}
    if tensors is not None and _is_tensor(value):
        import torch

        tensors[path] = savable(value, path)
        strides = {} if value.is_contiguous() else {"strides": list(torch.empty_like(value, device="meta").stride())}
        return {_TAG: "tensor", "name": path, **strides}
    hint = "a checkpoint holds numbers, text, lists and dicts; convert it (float(x), x.tolist(), dataclasses.asdict(x))"
    raise BadCheckpoint(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which JSON cannot hold", hint=hint
    )


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def decode(value: Any, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(_TAG)
    if tag is None:
        return {key: decode(item, tensors) for key, item in value.items()}
    if tag == "tuple":
        return tuple(decode(item, tensors) for item in value["items"])
    if tag == "tensor":
        stored = (tensors or {})[value["name"]]
        if "strides" not in value:
            return stored.clone()  # what was read lies in the mapped file, aligned to 8 bytes only
        import torch

        return torch.empty_strided(stored.shape, value["strides"], dtype=stored.dtype).copy_(stored)
    pairs = {decode(key, tensors): decode(item, tensors) for key, item in value["items"]}
    return collections.Counter(pairs) if tag == "counter" else pairs
