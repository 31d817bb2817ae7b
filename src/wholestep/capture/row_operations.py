"""Which operations on logits only move whole rows of classes, so that the same operation on the linear layer's input moves the
same rows.

In: where the class dimension is, one call of a torch function on such a tensor, and its result. Out: the operations so far with
this one added, or None when classes were touched. Nothing is computed until `Rows.apply`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Operation = Callable[[Tensor], Tensor]

_RESHAPES = (
    Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, torch.unflatten,
    Tensor.view_as, Tensor.reshape_as, Tensor.squeeze, torch.squeeze, Tensor.unsqueeze, torch.unsqueeze,
)  # fmt: skip
_TRANSPOSES = (
    Tensor.transpose, torch.transpose, Tensor.permute, torch.permute, Tensor.movedim, torch.movedim, Tensor.swapaxes,
    torch.swapaxes, Tensor.moveaxis, torch.moveaxis, Tensor.swapdims, torch.swapdims,
)  # fmt: skip
_PROPERTIES = tuple(getattr(Tensor, name).__get__ for name in ("mT", "T"))


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Operations that take a linear layer's input to the rows of a tensor of logits."""

    operations: tuple[Operation, ...]
    class_dim: int
    """Counted from the front."""

    def apply(self, x: Tensor) -> Tensor:
        for operation in self.operations:
            x = operation(x)
        return x

    def then(self, operation: Operation, class_dim: int) -> Rows:
        return Rows((*self.operations, operation), class_dim)


def follow_rows(rows: Rows, func: Callable, args: tuple, kwargs: dict, result: Tensor) -> Rows | None:
    """`rows` with this call added, or None when it is no operation on whole rows."""
    tensor = args[0]
    if func in _RESHAPES:
        return _reshaped(rows, tensor, result)
    if func in _TRANSPOSES or func in _PROPERTIES:
        return _transposed(rows, func, args, kwargs)
    if func is Tensor.__getitem__:
        return _picked(rows, tensor, args[1], result)
    return None


def _reshaped(rows: Rows, tensor: Tensor, result: Tensor) -> Rows | None:
    """Classes last before and after: the elements keep their order, so rows do."""
    if rows.class_dim != tensor.dim() - 1 or result.dim() == 0 or result.shape[-1] != tensor.shape[-1]:
        return None
    if result.dtype != tensor.dtype:  # Tensor.view(dtype) reads the same bytes otherwise
        return None
    leading = tuple(result.shape[:-1])
    return rows.then(lambda x: x.reshape(*leading, x.shape[-1]), result.dim() - 1)


def _transposed(rows: Rows, func: Callable, args: tuple, kwargs: dict) -> Rows | None:
    tensor, rest = args[0], args[1:]
    # where every dimension goes is read off a tensor of sizes 1, 2, 3, ...
    sizes = torch.empty(tuple(range(1, tensor.dim() + 1)), device="meta")
    moved = tuple(func(sizes, *rest, **kwargs).shape)
    return rows.then(lambda x: func(x, *rest, **kwargs), moved.index(rows.class_dim + 1))


def _picked(rows: Rows, tensor: Tensor, index: Any, result: Tensor) -> Rows | None:
    """Leading dimensions are picked from, the classes stay whole and last."""
    entries = index if isinstance(index, tuple) else (index,)
    if rows.class_dim != tensor.dim() - 1 or not entries or not all(map(_is_plain_index, entries)):
        return None
    dots = [i for i, entry in enumerate(entries) if entry is Ellipsis]
    consumed = sum(1 for entry in entries if entry is not None and entry is not Ellipsis)
    reaches_classes = entries[-1] is not Ellipsis if dots else consumed == tensor.dim()
    keeps_classes = isinstance(entries[-1], slice) and entries[-1] == slice(None)
    if entries[-1] is None or (reaches_classes and not keeps_classes):
        return None
    return rows.then(lambda x: x[index], result.dim() - 1)


def _is_plain_index(entry: Any) -> bool:
    if isinstance(entry, Tensor):
        return entry.dtype == torch.int64
    if isinstance(entry, bool):  # adds a dimension
        return False
    return entry is None or entry is Ellipsis or isinstance(entry, int | slice | torch.SymInt)
