"""Host memory for copies, taken once: slots in, tensors out.

Slots are fixed before a step runs, so that no step allocates, and recorded copies find their memory where it was. Memory that a GPU
copies to by itself has to be pinned; it is registered as it is (torch's own pinned allocator rounds up to powers of two). Without a
GPU it is plain memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence

import torch

from wholestep.errors import NotEnoughMemory
from wholestep.graph.bytes import show_bytes

ALIGNMENT = 4096
"""Of slots: a page, which is also what direct I/O asks for."""
SLAB_BYTES = 4 << 30
"""Of memory that is registered at once: 56 GiB took 1.1 to 3.3 s in such slabs."""


class Arena:
    """Slots of host memory, allocated together when the first of them is used."""

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self.sizes: list[int] = []
        """Bytes of every slab, as far as slots are planned."""
        self.slabs: list[torch.Tensor] = []

    @property
    def bytes(self) -> int:
        return sum(self.sizes)

    def reserve(self, num_bytes: int) -> tuple[int, int]:
        """A slot: (slab, offset). Slots are never shared, so the next step may write where this one reads no more."""
        if self.slabs:
            raise RuntimeError("slots are planned before the first of them is used")
        size = -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
        if not self.sizes or self.sizes[-1] + size > SLAB_BYTES:
            self.sizes.append(0)
        self.sizes[-1] += size
        return len(self.sizes) - 1, self.sizes[-1] - size

    def tensor(self, slot: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
        """The slot as a tensor of the sizes, strides and type of another."""
        if not self.slabs:
            self.open()
        slab, offset = slot
        return viewed(self.slabs[slab], offset, like.shape, like.stride(), like.dtype)

    def open(self) -> None:
        """Take the memory."""
        self.slabs = [host_memory(size, pinned=self.pinned) for size in self.sizes]


def host_memory(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Bytes of the host that begin at a page, registered with CUDA if asked."""
    try:
        whole = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        hint = "give a smaller host_memory="
        raise NotEnoughMemory(f"the host has no {show_bytes(num_bytes)} for what leaves the card", hint=hint) from error
    start = -whole.data_ptr() % ALIGNMENT
    # a storage of its own, which begins there: torch asks of a storage's first byte whether it is pinned
    memory = torch.from_numpy(whole.numpy()[start : start + num_bytes])
    if pinned:
        _register(memory)
    return memory


def _register(memory: torch.Tensor) -> None:
    """Pin it for as long as it lives."""
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code) != 0:
        hint = "give a smaller host_memory=, or allow the process to lock more memory (ulimit -l)"
        raise NotEnoughMemory(
            f"CUDA does not pin {show_bytes(memory.numel())} of host memory (error {int(code)})", hint=hint
        )
    weakref.finalize(memory.untyped_storage(), _unregister, memory.data_ptr())


def _unregister(address: int) -> None:
    """Copies that still use it are waited for: whoever drops a step, or the graph of a loss, does not."""
    with contextlib.suppress(RuntimeError):  # of a device that failed
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)


def viewed(
    memory: torch.Tensor, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Bytes as a tensor without gaps."""
    count = 1
    for size in shape:
        count *= size
    flat = memory[offset : offset + count * dtype.itemsize].view(dtype)
    return flat.as_strided(tuple(shape), tuple(stride), flat.storage_offset())


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory for a tensor of the same sizes and strides, pinned where there is a GPU."""
    memory = host_memory(max(1, tensor.numel() * tensor.element_size()), pinned=torch.cuda.is_available())
    return viewed(memory, 0, tensor.shape, tensor.stride(), tensor.dtype)
