"""Which tensors of the batch a recorded step may read where they lie.

In: the inputs of call after call. Out: those that have been the same memory in every one of them, and whether one has moved. The
tables of a graph that is trained on as a whole are such tensors: copied into buffers they would be moved twice in every step.
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
