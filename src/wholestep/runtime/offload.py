"""`with wholestep.offload(model, host="20GiB"):` what eager PyTorch saves for the backward pass waits in the host's memory.

In: a model, and an amount. While the context is open, tensors that autograd saves are copied to pinned memory beside the
computation, and come back when the backward pass asks for them, the next ones ahead of their time. Gradients are the same to the
last bit.

- One copy per storage: q, k and v of a fused projection are one storage, copied once, and rebuilt as the views they are.
- Parameters, buffers and inputs of the model stay: they are there anyway.
- A storage that is written in place while its copy is on the way makes the backward pass raise, as PyTorch itself would.
- When the memory is used up, or a tensor is small, it is kept where it is.
- Memory of the host is pinned once: to pin it takes several times as long as to copy to it, so the next context of the model
  uses it again, until the model goes.
- Of what leaves, and of what is fetched ahead, at most `IN_FLIGHT_BYTES` are on the card: the computation waits there for a slow
  link, the host never does.
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
from typing import Any, TypeAlias

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
AHEAD = 8
"""Storages that are fetched before they are asked for, at most."""
IN_FLIGHT_BYTES = 1 << 30
"""On the card, of storages that leave, and of those that come before they are asked for: 20 ms of a link of 55 GB/s."""


@contextlib.contextmanager
def offload(model: nn.Module, host: str | int, *, least: str | int = LEAST_BYTES) -> Iterator[Offloaded]:
    """Let what is saved for the backward pass wait in at most `host` bytes of the host's memory; tensors below `least` stay."""
    if not isinstance(model, nn.Module):
        raise BadOption(f"offload of {type(model).__name__}", hint="give the model, a torch.nn.Module")
    amount = parse_bytes(host)
    refuse_amount("host", host, amount)
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    one = Offloaded(device, *_lent(model, device, amount), least=parse_bytes(least))
    stay = model.register_forward_pre_hook(one.note_inputs, with_kwargs=True)
    one.leave_out([*model.parameters(), *model.buffers()])
    try:
        with torch.autograd.graph.saved_tensors_hooks(one.pack, one.unpack):
            yield one
    finally:
        stay.remove()


_LENT: weakref.WeakKeyDictionary[nn.Module, tuple[Pool, Link]] = weakref.WeakKeyDictionary()
"""Model -> the memory and the streams that its contexts share. Buffers go from one context to the next, so the copies of both have
to be on the same streams."""
_LENDING = threading.Lock()


def _lent(model: nn.Module, device: torch.device, amount: int) -> tuple[Pool, Link]:
    """Those of earlier contexts, if the model is where it was and the amount is the same."""
    with _LENDING:
        pool, link = _LENT.get(model, (None, None))
        if pool is None or link is None or pool.limit != amount or link.device != device:
            pool = Pool(amount, pinned=device.type == "cuda")
            link = _CudaLink(device) if device.type == "cuda" else _NoLink(device)
            _LENT[model] = pool, link
        return pool, link


class Offloaded:
    """What waits on the host; `moved_bytes` and `kept_bytes` say how much was copied and how much stayed for want of room."""

    def __init__(self, device: torch.device, pool: Pool, link: Link, least: int) -> None:
        self.device, self.pool, self.link, self.least = device, pool, link, least
        self.stays: set[StorageWeakRef] = set()
        self.known: weakref.WeakValueDictionary[int, Stored] = weakref.WeakValueDictionary()
        """Address of a storage -> what was copied of it; whether it is the same storage still is asked every time."""
        self.order: list[weakref.ref[Stored]] = []
        self.leaving: deque[Stored] = deque()
        """Whose copies are not known to be over."""
        self.held: deque[Stored] = deque()
        """Of these, those whose memory has not been let go."""
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
            self._wait_for_room()
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
            self.held.append(stored)
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
            self.leaving.popleft().arrive()
        while self.held and self.held[0].held is None:
            self.held.popleft()

    def _wait_for_room(self) -> None:
        """Too much is on its way: the computation waits for the first of it, and its memory is used anew behind that."""
        while len(self.held) > 1 and sum(stored.num_bytes for stored in self.held) > IN_FLIGHT_BYTES:
            first = self.held.popleft()
            if first.held is not None:
                self.link.wait_out(first.gone, first.held)
                first.held = None

    def _next(self, stored: Stored) -> list[Stored]:
        """The backward pass asks in the other order: what was saved before this, and has not been asked for as often."""
        rounds = -(-stored.asked // stored.views)
        found: list[Stored] = []
        room = IN_FLIGHT_BYTES
        for number in range(stored.number - 1, max(-1, stored.number - 1 - AHEAD), -1):
            entry = self.order[number]()
            if entry is None or entry.asked >= rounds * entry.views:
                continue
            room -= entry.num_bytes
            if found and room < 0:
                break
            found.append(entry)
        return found


@dataclasses.dataclass(eq=False)
class Stored:
    """A storage on the host."""

    link: Link
    buffer: torch.Tensor
    num_bytes: int
    source: StorageWeakRef
    counter: torch.Tensor
    """Of writes through the tensor that was saved, and through its views."""
    version: int
    device: torch.device
    number: int = 0
    gone: Any = None
    """Says whether the copy is over; None when it was at once."""
    held: torch.Tensor | None = None
    """Keeps the memory of the device as long as it is read."""
    arrived: bool = False
    """The copy is known to be over."""
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
        on_its_way = self.gone is not None and not self.arrived
        return self.overwritten or (on_its_way and self.counter._version != self.version)

    def arrive(self) -> None:
        self.overwritten, self.arrived, self.held = self.was_overwritten(), True, None

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

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        target.copy_(source)

    def wait_out(self, gone: Any, memory: torch.Tensor) -> None:
        return None

    def bring(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        target.copy_(source)

    def wait(self, memory: torch.Tensor, event: Any) -> None:
        return None

    def drop(self, memory: torch.Tensor) -> None:
        return None

    def is_over(self, gone: Any) -> bool:
        return True


class _CudaLink:
    """A stream each way. Memory is taken on the stream that asks for it, and freed there after a wait; a thread that reads it on
    another stream says so to the allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> _Gone:
        stream = torch.cuda.current_stream(self.device)
        self.out.wait_stream(stream)
        self.out.wait_stream(self.back)  # which may still read what this buffer held before
        with torch.cuda.stream(self.out):
            target.copy_(source, non_blocking=True)
            return _Gone(self.out.record_event(), stream)

    def wait_out(self, gone: _Gone, memory: torch.Tensor) -> None:
        """The stream that saved the tensor, not that of the thread that asks: its memory is used anew there."""
        gone.stream.wait_event(gone.event)
        memory.record_stream(gone.stream)  # nothing where it was taken on this one

    def bring(self, target: torch.Tensor, source: torch.Tensor, after: _Gone) -> Any:
        self.back.wait_stream(torch.cuda.current_stream(self.device))
        self.back.wait_event(after.event)
        with torch.cuda.stream(self.back):
            target.copy_(source, non_blocking=True)
            return self.back.record_event()

    def wait(self, memory: torch.Tensor, event: Any) -> None:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        memory.record_stream(stream)

    def drop(self, memory: torch.Tensor) -> None:
        memory.record_stream(self.back)

    def is_over(self, gone: _Gone) -> bool:
        return bool(gone.event.query())


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Gone:
    """A copy out: the event behind it, and the stream on which the tensor was saved."""

    event: torch.cuda.Event
    stream: torch.cuda.Stream


Link: TypeAlias = _NoLink | _CudaLink


def _is_odd(tensor: torch.Tensor) -> bool:
    """What is not simply bytes in a storage: subclasses, conjugate or negative views."""
    odd = type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return odd or tensor.is_sparse or (tensor.is_leaf and tensor.requires_grad)
