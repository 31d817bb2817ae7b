"""Which tensors of the batch a recorded step may read where they lie, and how the others come into its buffers.

In: the inputs of call after call. Out: those that have been the same memory in every one of them, and whether one has moved. The
tables of a graph that is trained on as a whole are such tensors: copied into buffers they would be moved twice in every step. The
tables of a sampled block are not: they are small and many, and are copied by one kernel per dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Places:
    """Tensors of the batch that a recording may read where they lie: the same memory in every call so far.

    Until there is a recording nothing of theirs is kept alive but the number of their memory, which torch gives to no other as long
    as someone holds it weakly. A recording holds the memory itself: it lies where it lay until a tensor lies elsewhere.
    """

    def __init__(self, indices: Sequence[int]) -> None:
        self.indices = tuple(indices)
        self.found: dict[int, tuple[Any, Any]] | None = None

    def met(self, inputs: Sequence[torch.Tensor]) -> None:
        """One more call: what is elsewhere is never read in place again."""
        if self.found is None:
            self.found = {i: (StorageWeakRef(inputs[i].untyped_storage()), _lies(inputs[i])) for i in self.indices}
        self.found = {i: place for i, place in self.found.items() if place[1] == _lies(inputs[i])}

    def moved(self, inputs: Sequence[torch.Tensor]) -> bool:
        return any(place != _lies(inputs[i]) for i, (_, place) in (self.found or {}).items())


def _lies(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    return storage._cdata, tensor.data_ptr(), storage.nbytes(), tensor.dtype, tensor.shape, tensor.stride()


TOGETHER = frozenset({torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32})
"""Dtypes of which many tensors are copied by one kernel, so that the host has a few to launch and not one per tensor."""


def copy_in(buffers: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    """Copy a batch into the buffers of a recording, which are of its sizes and dtypes."""
    kinds: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for buffer, tensor in zip(buffers, given, strict=True):
        if tensor.shape != buffer.shape or tensor.dtype != buffer.dtype:
            was, found = f"{tuple(buffer.shape)} {buffer.dtype}", f"{tuple(tensor.shape)} {tensor.dtype}"
            raise ValueError(f"the CUDA graph was recorded for a batch of {was}, not {found}")
        into, of = kinds.setdefault(tensor.dtype, ([], []))
        into.append(buffer)
        of.append(tensor)
    for dtype, (into, of) in kinds.items():
        if dtype in TOGETHER and len(into) > 1:
            torch._foreach_copy_(into, of, non_blocking=True)
        else:
            for buffer, tensor in zip(into, of, strict=True):
                buffer.copy_(tensor, non_blocking=True)
