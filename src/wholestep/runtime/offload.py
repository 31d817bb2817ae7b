"""`with wholestep.offload(model, host="20GiB"):` what eager PyTorch saves for the backward pass waits in the host's memory.

In: a model, and an amount. While the context is open, tensors that autograd saves are copied to pinned memory beside the
computation, and come back when the backward pass asks for them, the next ones ahead of their time. Gradients are the same to the
last bit.

- One copy per storage: q, k and v of a fused projection are one storage, copied once, and rebuilt as the views they are.
- Parameters, buffers and inputs of the model stay: they are there anyway.
- A storage that is written in place while its copy is on the way makes the backward pass raise, as PyTorch itself would.
- When the memory is used up, or a tensor is small, it is kept where it is.
- Several threads may save and ask at once (on a GPU the backward pass has a thread of its own): one lock orders them, and whoever
  asks on a stream of its own waits there for the copy.

No module is changed, and nothing is global but torch's own stack of hooks. Compiled steps have their own way (`passes/offload.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from wholestep.compat import counter_of, counts_writes_to
from wholestep.errors import BadOption
from wholestep.graph.bytes import parse_bytes
from wholestep.plan.room import refuse_amount
from wholestep.tiers.pool import Pool

LEAST_BYTES = 1 << 20
"""Of what is worth a copy: one takes about 20 us to start, in which the link moves as much."""
AHEAD = 2
"""Storages that are fetched before they are asked for."""


@contextlib.contextmanager
def offload(model: nn.Module, host: str | int, *, least: str | int = LEAST_BYTES) -> Iterator[Offloaded]:
    """Let what is saved for the backward pass wait in at most `host` bytes of the host's memory; tensors below `least` stay."""
    if not isinstance(model, nn.Module):
        raise BadOption(f"offload of {type(model).__name__}", hint="give the model, a torch.nn.Module")
    amount = parse_bytes(host)
    refuse_amount("host", host, amount)
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    one = Offloaded(device, Pool(amount, pinned=device.type == "cuda"), parse_bytes(least))
    stay = model.register_forward_pre_hook(one.note_inputs, with_kwargs=True)
    one.leave_out([*model.parameters(), *model.buffers()])
    try:
        with torch.autograd.graph.saved_tensors_hooks(one.pack, one.unpack):
            yield one
    finally:
        stay.remove()


class Offloaded:
    """What waits on the host; `moved_bytes` and `kept_bytes` say how much was copied and how much stayed for want of room."""

    def __init__(self, device: torch.device, pool: Pool, least: int) -> None:
        self.device, self.pool, self.least = device, pool, least
        self.link = _CudaLink(device) if device.type == "cuda" else _NoLink()
        self.stays: set[StorageWeakRef] = set()
        self.known: weakref.WeakValueDictionary[int, Stored] = weakref.WeakValueDictionary()
        """Address of a storage -> what was copied of it; whether it is the same storage still is asked every time."""
        self.order: list[weakref.ref[Stored]] = []
        self.leaving: deque[Stored] = deque()
        self.moved_bytes = self.kept_bytes = 0
        self.lock = threading.Lock()
        """Held while anything here changes."""

    def leave_out(self, tensors: list[torch.Tensor]) -> None:
        new = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if tensor.layout == torch.strided}
        with self.lock:
            self.stays = {storage for storage in self.stays if not storage.expired()} | new

    def note_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.leave_out([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)])

    def pack(self, tensor: torch.Tensor) -> Any:
        """The tensor itself where it stays; else what it takes to have it again."""
        here = (
            tensor.layout == torch.strided and tensor.device == self.device
        )  # the link's streams know no other device
        storage = tensor.untyped_storage() if here else None
        if storage is None or storage.nbytes() < self.least or StorageWeakRef(storage) in self.stays or _is_odd(tensor):
            return tensor
        with self.lock:
            self._look()
            stored = self._stored(tensor, storage)
            if stored is None:
                self.kept_bytes += storage.nbytes()
                return tensor
            stored.views += 1
        return View(stored, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        stored: Stored = packed.stored
        with self.lock:
            self._look()
            if stored.was_overwritten():
                raise RuntimeError(
                    "a tensor that the backward pass needs was modified by an inplace operation while it left the card: "
                    "use the operation that is not in place"
                )
            base = stored.fetched()
            for entry in self._next(stored):
                entry.fetch()
        empty = torch.empty(0, dtype=packed.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), packed.offset, packed.shape, packed.stride)

    def _stored(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Stored | None:
        """The one copy of a storage, made now if there is none of this version."""
        known = self.known.get(storage._cdata)
        if known is not None and not known.source.expired() and known.holds(tensor):
            return known
        buffer = self.pool.take(storage.nbytes())
        if buffer is None:
            return None
        counter = counter_of(tensor)
        stored = Stored(
            self.link, buffer, storage.nbytes(), StorageWeakRef(storage), counter, tensor._version, tensor.device
        )
        weakref.finalize(stored, self.pool.give_back, buffer)
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        stored.gone = self.link.send(buffer[: storage.nbytes()], source)
        if stored.gone is not None:
            stored.held = tensor.detach()
            self.leaving.append(stored)
        self.known[storage._cdata] = stored
        while self.order and self.order[-1]() is None:
            self.order.pop()
        self.order.append(weakref.ref(stored))
        stored.number = len(self.order) - 1
        self.moved_bytes += storage.nbytes()
        return stored

    def _look(self) -> None:
        """Let go of what has left; what was written to on the way is not what was saved."""
        while self.leaving and self.link.is_over(self.leaving[0].gone):
            self.leaving.popleft().let_go()

    def _next(self, stored: Stored) -> list[Stored]:
        """The backward pass asks in the other order: what was saved before this."""
        found = [self.order[i]() for i in range(stored.number - 1, max(-1, stored.number - 1 - AHEAD), -1)]
        return [entry for entry in found if entry is not None]


@dataclasses.dataclass(eq=False)
class Stored:
    """A storage on the host."""

    link: _NoLink | _CudaLink
    buffer: torch.Tensor
    num_bytes: int
    source: StorageWeakRef
    counter: torch.Tensor
    """Of writes through the tensor that was saved, and through its views."""
    version: int
    device: torch.device
    number: int = 0
    gone: Any = None
    held: torch.Tensor | None = None
    overwritten: bool = False
    back: tuple[torch.Tensor, Any] | None = None
    """Memory of the device, and the event that says it is filled."""
    views: int = 0
    """How many tensors were saved that look at it."""
    asked: int = 0
    """How often they were asked back: when all were, the device's memory is let go."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the storage is as it was when it was copied. Tensors that torch cut out of one storage, each with a
        count of its own writes (the gates of a GRU), are written to one after the other: the copy of one is not one of the next."""
        return self.counter._version == self.version and counts_writes_to(self.counter, tensor)

    def was_overwritten(self) -> bool:
        """Whether it was written to before its copy was known to be over, which it may not be yet."""
        return self.overwritten or (self.held is not None and self.counter._version != self.version)

    def let_go(self) -> None:
        self.overwritten = self.was_overwritten()
        self.held = None

    def fetch(self) -> None:
        """Begin to bring it back."""
        if self.back is None:
            memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
            self.back = memory, self.link.bring(memory, self.buffer[: self.num_bytes], self.gone)

    def fetched(self) -> torch.Tensor:
        """The bytes on the device, which all views share."""
        self.fetch()
        assert self.back is not None
        base, here = self.back
        self.link.wait(base, here)
        self.asked += 1
        if self.asked % self.views == 0:
            self.back = None
        return base

    def __del__(self) -> None:
        if self.back is not None:  # fetched ahead and never asked for: its memory is used anew when the copy is over
            self.link.drop(self.back[0])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class View:
    """What autograd holds in the place of a tensor."""

    stored: Stored
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _NoLink:
    """Copies at once, where device and host are the same."""

    def send(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        target.copy_(source)

    def bring(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        target.copy_(source)

    def wait(self, memory: torch.Tensor, event: Any) -> None:
        return None

    def drop(self, memory: torch.Tensor) -> None:
        return None

    def is_over(self, event: Any) -> bool:
        return True


class _CudaLink:
    """A stream each way. Memory is taken on the stream that asks for it, and freed there after a wait; a thread that reads it on
    another stream says so to the allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        self.out.wait_stream(torch.cuda.current_stream(self.device))
        self.out.wait_stream(self.back)  # which may still read what this buffer held before
        with torch.cuda.stream(self.out):
            target.copy_(source, non_blocking=True)
            return self.out.record_event()

    def bring(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        self.back.wait_stream(torch.cuda.current_stream(self.device))
        self.back.wait_event(after)
        with torch.cuda.stream(self.back):
            target.copy_(source, non_blocking=True)
            return self.back.record_event()

    def wait(self, memory: torch.Tensor, event: Any) -> None:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        memory.record_stream(stream)  # nothing where it was taken on this one

    def drop(self, memory: torch.Tensor) -> None:
        memory.record_stream(self.back)

    def is_over(self, event: Any) -> bool:
        return bool(event.query())


def _is_odd(tensor: torch.Tensor) -> bool:
    """What is not simply bytes in a storage: subclasses, conjugate or negative views."""
    odd = type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return odd or tensor.is_sparse or (tensor.is_leaf and tensor.requires_grad)
