"""Eager PyTorch in little of the card's memory: what it keeps waits on the host. Values are the same to the last bit.

In: how many bytes may stay on the device. `Saved` is a context in which tensors that autograd saves for the backward pass stay
there as long as they fit, and go to the host's memory beyond that; `OnHost` holds tensors by name on the host and hands them out
one at a time, on the device. What is left on the device is the model and what one operator at a time reads and writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import traceback
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

SMALL_BYTES = 1 << 20
"""Saved tensors below this stay: hundreds of them are nothing beside one activation, and every copy waits for the device."""


@dataclasses.dataclass(eq=False, slots=True, weakref_slot=True)
class Moved:
    """A saved tensor that waits on the host."""

    device: torch.device
    tensor: torch.Tensor

    def back(self) -> torch.Tensor:
        return self.tensor.to(self.device)


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """While open, saved tensors beyond `room` bytes go to the host; those in `held`, which are there anyway, do not."""

    def __init__(self, room: int, held: Mapping[str, torch.Tensor]) -> None:
        self.left = room
        self.held = {t.untyped_storage().data_ptr() for t in held.values()}
        self.moved_bytes = 0
        self._moved: dict[Any, tuple[StorageWeakRef, weakref.ref[Moved]]] = {}
        """What is saved by several operators goes once (a log-softmax, by itself and by the loss that reads it)."""
        super().__init__(self._pack, _unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        size = tensor.numel() * tensor.element_size()
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if size < SMALL_BYTES or not plain or tensor.untyped_storage().data_ptr() in self.held:
            return tensor
        if size <= self.left:
            self.left -= size
            return tensor
        storage = StorageWeakRef(tensor.untyped_storage())
        key = (storage.cdata, tensor._version, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        known = self._moved.get(key)
        found = None if known is None or known[0].expired() else known[1]()
        if found is None:
            self.moved_bytes += size
            found = self._to_host(tensor)
            self._moved[key] = storage, weakref.ref(found)
        return found

    def _to_host(self, tensor: torch.Tensor) -> Moved:
        return Moved(tensor.device, tensor.to("cpu", copy=True))


def _unpack(packed: Any) -> torch.Tensor:
    return packed if isinstance(packed, torch.Tensor) else packed.back()


class OnHost(Mapping[str, torch.Tensor]):
    """Tensors by name in the host's memory; looked up, they are on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tensors: dict[str, torch.Tensor] = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        self._tensors[name] = tensor.detach().to("cpu", copy=True)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name].to(self.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors


def gradients_to_host(
    objective: torch.Tensor, leaves: Mapping[str, torch.Tensor], scale: torch.Tensor | None, device: torch.device
) -> OnHost:
    """Gradients of `objective` (divided by `scale`), each moved to the host as soon as it is whole."""
    found = OnHost(device)

    def taken(name: str, gradient: torch.Tensor) -> torch.Tensor:
        found.put(name, gradient if scale is None else gradient / scale)
        return gradient.new_zeros(()).expand_as(gradient)  # one element in memory, to be dropped

    # behind the user's own hooks, which see and may change the gradient first
    handles = [leaf.register_hook(functools.partial(taken, name)) for name, leaf in leaves.items()]
    try:
        torch.autograd.grad(objective, list(leaves.values()), allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return found


@contextlib.contextmanager
def zeros_set_aside(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Those that are all zeros, as the state of a first step is, give their memory back while this is open."""
    empty: list[tuple[torch.Tensor, int]] = []
    for tensor in tensors:
        size = tensor.untyped_storage().nbytes()
        if size == tensor.numel() * tensor.element_size() >= SMALL_BYTES and not bool(tensor.any()):
            empty.append((tensor, size))
            tensor.untyped_storage().resize_(0)
    try:
        yield
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # what was made lives in them, in the room of what was set aside
        raise
    finally:
        for tensor, size in empty:
            _resize(tensor, size)
            tensor.zero_()


def _resize(tensor: torch.Tensor, size: int) -> None:
    """It was there before, so it has to be there again: a limit on the allocator that others have used up does not hold here."""
    try:
        tensor.untyped_storage().resize_(size)
    except torch.OutOfMemoryError:
        limit = torch.cuda.get_per_process_memory_fraction(tensor.device)
        torch.cuda.set_per_process_memory_fraction(1.0, tensor.device)
        try:
            tensor.untyped_storage().resize_(size)
        finally:
            torch.cuda.set_per_process_memory_fraction(limit, tensor.device)


def copied_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host; of zeros a single one, where they are."""
    if not bool(tensor.any()):
        return tensor.new_zeros(()).expand(tensor.shape)
    return tensor.detach().to("cpu", copy=True)
