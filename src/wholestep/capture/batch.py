"""Batches of any shape: tensors, tuples, dicts, HF encodings, dataclasses, nested.

`flatten` splits a batch into its tensors and a hashable `BatchSpec`; `unflatten` puts it back together with other tensors of
the same roles. What is not a tensor (a string, a flag, None) is part of the spec: it is burned into the captured graph, so a
batch with another value is another spec and is captured anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from wholestep.errors import BadBatch

_LEAF = "tensor"
_PLAIN = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True, slots=True)
class BatchSpec:
    """The structure of a batch with its tensors taken out."""

    tree: tuple
    names: tuple[str, ...]


def flatten(batch: Any) -> tuple[list[torch.Tensor], BatchSpec]:
    """The tensors of a batch in a fixed order, and its structure."""
    tensors: list[torch.Tensor] = []
    names: list[str] = []
    tree = _flatten(batch, "", tensors, names)
    return tensors, BatchSpec(tree, tuple(names))


def _flatten(value: Any, path: str, tensors: list[torch.Tensor], names: list[str]) -> tuple:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        names.append(path or "batch")
        return (_LEAF,)
    if isinstance(value, _PLAIN):
        return ("plain", type(value), value)
    if isinstance(value, Mapping):
        keys = tuple(value.keys())
        return ("mapping", type(value), keys, tuple(_flatten(value[k], _join(path, k), tensors, names) for k in keys))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = tuple(field.name for field in dataclasses.fields(value))
        children = tuple(_flatten(getattr(value, f), _join(path, f), tensors, names) for f in fields)
        return ("dataclass", type(value), fields, children)
    if isinstance(value, list | tuple):
        children = tuple(_flatten(v, _join(path, i), tensors, names) for i, v in enumerate(value))
        return ("sequence", type(value), None, children)
    raise BadBatch(
        f"the batch holds a {type(value).__name__} at {path or 'its top'}",
        hint="use tensors, numbers, strings, dicts, lists, tuples or dataclasses of them",
    )


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def unflatten(tensors: Sequence[torch.Tensor], spec: BatchSpec) -> Any:
    """A batch of the structure `spec` that holds `tensors`."""
    stream = iter(tensors)
    return _unflatten(spec.tree, stream)


def _unflatten(tree: tuple, stream: Any) -> Any:
    kind = tree[0]
    if kind == _LEAF:
        return next(stream)
    if kind == "plain":
        return tree[2]
    _, cls, keys, children = tree
    values = [_unflatten(child, stream) for child in children]
    if kind == "mapping":
        items = dict(zip(keys, values, strict=True))
        return items if cls is dict else _rebuild_mapping(cls, items)
    if kind == "dataclass":
        made = object.__new__(
            cls
        )  # not through __init__: fields with init=False and __post_init__ already had their turn
        for name, value in zip(keys, values, strict=True):
            object.__setattr__(made, name, value)
        return made
    if hasattr(cls, "_fields"):  # namedtuple
        return cls(*values)
    return cls(values)


def _rebuild_mapping(cls: type, items: dict) -> Any:
    try:
        return cls(items)
    except TypeError:
        return cls(**items)


def split_batch(batch: Any, count: int) -> list[Any]:
    """One batch cut along the first dimension of its tensors into `count` equal micro-batches."""
    tensors, spec = flatten(batch)
    sizes = {t.shape[0] for t in tensors if t.dim() > 0}
    if len(sizes) != 1 or next(iter(sizes)) % count:
        raise BadBatch(
            f"a batch with first dimensions {sorted(sizes)} cannot be cut into accumulate={count} equal micro-batches",
            hint="call step([b1, b2, ...]) with the micro-batches themselves, or make the batch a multiple of accumulate",
        )
    chunks = [[t] * count if t.dim() == 0 else list(t.chunk(count)) for t in tensors]
    return [unflatten([c[i] for c in chunks], spec) for i in range(count)]
