"""What the multi-tensor update operators share: argument checks, torch.optim flags, and the device tables of one Triton
launch.

In: lists of tensors. Out: `Table`s, i.e. a device int64 matrix of addresses (one row per list: params, grads, states)
with a static chunk table that gives each Triton program its tensor and its first element. Why: one launch for hundreds
of parameters instead of one each.

Addresses change from step to step only when the allocator moves gradients, so tables are cached by content. A table
uploaded while a CUDA graph is being captured owns its pinned host buffer for ever: the graph copies from that buffer at
every replay.
"""

import functools
import importlib.util
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

IMPLEMENTATIONS = ("single", "foreach", "fused")
# Elements per Triton program: 4 warps x 32 lanes x 16 elements; enough loads in flight, and small tensors waste little.
BLOCK = 2048
SKIP = -1.0
"""A `scale` below zero, which no clipping yields: the update leaves parameters and states as they are."""
# Of gradients that torch's code is given as copies: a call costs some 50 us, as much as copying this on one CPU core.
MAX_COPIED_BYTES = 1 << 20
# A step may have one update per layer and group: hundreds of small tables, a few KiB each.
MAX_CACHED_TABLES = 1024
MAX_SPARE_BUFFERS = 1024


def implementation_flags(implementation: str) -> dict[str, bool]:
    """The keyword arguments by which torch.optim's functional code selects its implementation."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    return {"foreach": implementation == "foreach", "fused": implementation == "fused"}


def skipped(scale: Tensor | None) -> bool:
    """Whether this update is left out; reads the value, so it waits for a GPU."""
    return scale is not None and bool(scale < 0)


def factor(scale: Tensor | None) -> Tensor | None:
    """None where gradients are multiplied by one, as far as that can be seen without waiting: they need no copies then."""
    return None if scale is None or (not scale.is_cuda and bool(scale == 1)) else scale


def scaled_grad(grad: Tensor, param: Tensor, scale: Tensor | None) -> Tensor:
    """grad * scale as clip_grad_norm_ does it, in the parameter's dtype; the gradient itself where nothing changes.

    A gradient of a narrower dtype (lean_gradients) is widened first, and one that lies in memory in another way than its
    parameter is copied, as autograd would have left it: torch's fused kernels go through memory and ask for no strides.
    """
    grad = grad.resolve_conj()
    wide = grad if widest(grad.dtype, param.dtype) is grad.dtype else grad.to(param.dtype)
    scaled = wide if scale is None else (wide * scale).to(wide.dtype)
    return matching(scaled, param)


def as_real(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Complex ones as views of their real and imaginary parts, which torch's optimizers update side by side."""
    return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]


def fused_or_single(params: list[Tensor], states: list[list[Tensor]]) -> str:
    """ "fused" where its kernels, which go through memory, meet the same elements of parameters and states side by side."""
    flat = all(map(is_dense, params)) and all(
        same_layout(t, p) for group in states for t, p in zip(group, params, strict=True)
    )
    return "fused" if flat else "single"


def widest(grad: torch.dtype, param: torch.dtype) -> torch.dtype:
    """The dtype in which a gradient counts: its own, unless its parameter's is wider."""
    return param if torch.finfo(param).bits > torch.finfo(grad).bits else grad


def parts_to_copy(params: list[Tensor], grads: list[Tensor], scale: Tensor | None) -> list[slice]:
    """The parts in which torch's code updates a list: whole; or, where gradients are first copied (scaled, widened, laid out
    otherwise), so many at a time that the copies stay small."""
    pairs = list(zip(params, grads, strict=True))
    if scale is None and all(widest(g.dtype, p.dtype) is g.dtype and same_layout(g, p) for p, g in pairs):
        return [slice(None)]
    parts, begin, total = [], 0, 0
    for i, (param, _) in enumerate(pairs):
        size = param.numel() * param.element_size()
        if i > begin and total + size > MAX_COPIED_BYTES:
            parts.append(slice(begin, i))
            begin, total = i, 0
        total += size
    return [*parts, slice(begin, len(pairs))]


def check_lengths(params: list[Tensor], lists: dict[str, list[Tensor]], op: str) -> None:
    """Every list has one tensor per parameter."""
    for name, tensors in lists.items():
        if len(tensors) != len(params):
            raise ValueError(f"{op}: {name} has {len(tensors)} tensors, expected {len(params)}")


def on_copies(in_place: Callable[..., None], num_states: int, params: list[Tensor], *rest: Any) -> list[Tensor]:
    """The functional form of an update (params, grads, one list per state, ...): new params and states, concatenated."""
    grads, states, others = rest[0], rest[1 : num_states + 1], rest[num_states + 1 :]
    new = [[t.clone() for t in tensors] for tensors in (params, *states)]
    in_place(new[0], grads, *new[1:], *others)
    return [t for tensors in new for t in tensors]


@functools.cache
def triton_reason() -> str | None:
    """Why Triton kernels cannot be used here, or None when they can."""
    return None if importlib.util.find_spec("triton") is not None else "triton is not installed"


IN_TRITON = frozenset((torch.float32, torch.bfloat16, torch.float16))


def in_triton(*tensors: Tensor | None) -> bool:
    """Whether kernels know these operands, and Triton is there."""
    return all(t is None or (t.is_cuda and t.dtype in IN_TRITON) for t in tensors) and triton_reason() is None


# ---- grouping and layout -------------------------------------------------------------------------------------


def group_by_dtype(lists: list[list[Tensor]]) -> dict[tuple[torch.dtype, ...], list[int]]:
    """Indices of the tensors whose (param, grad, state...) dtypes are the same: one launch each."""
    groups: dict[tuple[torch.dtype, ...], list[int]] = {}
    for index, row in enumerate(zip(*lists, strict=True)):
        if row[0].numel() > 0:
            groups.setdefault(tuple(t.dtype for t in row), []).append(index)
    return groups


def is_dense(t: Tensor) -> bool:
    """True when the elements fill one block of memory without gaps or overlaps, in any order of dimensions."""
    if t.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def same_layout(a: Tensor, b: Tensor) -> bool:
    """True when element i of the memory of `a` is element i of the memory of `b` (strides of size-1 dimensions do not
    count)."""
    if a.stride() == b.stride():
        return True
    return all(s == t for s, t, size in zip(a.stride(), b.stride(), a.shape, strict=True) if size != 1)


def matching(t: Tensor, like: Tensor) -> Tensor:
    """`t` itself, or a copy of it in the layout of the dense tensor `like`."""
    if same_layout(t, like):
        return t
    return torch.empty_like(like, dtype=t.dtype).copy_(t)


# ---- tables --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chunks:
    """The static half of a table: which tensor and which first element each program works on."""

    tensor: Tensor  # int32 [num_chunks]
    start: Tensor  # int64 [num_chunks]
    size: Tensor  # int64 [num_tensors], elements of each tensor
    num_chunks: int


@dataclass(slots=True)
class HostBuffer:
    """A pinned staging buffer, with the event after which it may be written again."""

    memory: Tensor
    ready: torch.cuda.Event | None = None


@dataclass(slots=True)
class TableStore:
    """Tables of one device: cached by content, uploaded through pinned buffers."""

    device: torch.device
    chunks: dict[tuple[int, ...], Chunks] = field(default_factory=dict)
    tables: OrderedDict[bytes, Tensor] = field(default_factory=OrderedDict)
    ring: dict[int, list[HostBuffer]] = field(default_factory=dict)
    spare: dict[int, list[Tensor]] = field(default_factory=dict)
    captured: list[Tensor] = field(default_factory=list)


@functools.cache
def store_of(device: torch.device) -> TableStore:
    return TableStore(device)


def chunks_of(store: TableStore, sizes: tuple[int, ...]) -> Chunks:
    """The chunk table for these tensor sizes, built once (its upload waits for the device, so warm up before a
    capture)."""
    found = store.chunks.get(sizes)
    if found is None:
        counts = np.array([-(-size // BLOCK) for size in sizes], dtype=np.int64)
        tensor = np.repeat(np.arange(len(sizes), dtype=np.int32), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        start = (np.arange(len(tensor), dtype=np.int64) - first) * BLOCK
        found = Chunks(
            torch.from_numpy(tensor).to(store.device),
            torch.from_numpy(start).to(store.device),
            torch.tensor(sizes, dtype=torch.int64, device=store.device),
            len(tensor),
        )
        store.chunks[sizes] = found
    return found


def address_table(store: TableStore, rows: list[list[Tensor]]) -> tuple[Tensor, bool]:
    """The device int64 [len(rows) * num_tensors] table of addresses, and whether all are 16-byte aligned."""
    addresses = np.array([t.data_ptr() for row in rows for t in row], dtype=np.int64)
    aligned = not bool((addresses & 15).any())
    if store.device.type != "cuda":
        return torch.from_numpy(addresses), aligned
    content = addresses.tobytes()
    capturing = torch.cuda.is_current_stream_capturing()
    table = store.tables.get(content)
    if table is not None:
        store.tables.move_to_end(content)
        if capturing:
            store.captured.append(table)
        return table, aligned
    if capturing:
        return _upload_captured(store, addresses), aligned
    table = _upload(store, addresses)
    store.tables[content] = table
    if len(store.tables) > MAX_CACHED_TABLES:
        store.tables.popitem(last=False)
    return table, aligned


def _size_class(num_words: int) -> int:
    return max(64, 1 << (num_words - 1).bit_length())


def _upload(store: TableStore, addresses: np.ndarray) -> Tensor:
    """Copy through a ring buffer whose previous copy has ended; keep spares for a later capture, where pinning memory
    is not allowed."""
    size_class = _size_class(len(addresses))
    ring = store.ring.setdefault(size_class, [])
    buffer = next((b for b in ring if b.ready is None or b.ready.query()), None)
    if buffer is None:
        buffer = HostBuffer(torch.empty(size_class, dtype=torch.int64, pin_memory=True))
        ring.append(buffer)
    spare = store.spare.setdefault(size_class, [])
    if len(spare) < MAX_SPARE_BUFFERS:
        spare.append(torch.empty(size_class, dtype=torch.int64, pin_memory=True))
    buffer.memory.numpy()[: len(addresses)] = addresses
    table = torch.empty(len(addresses), dtype=torch.int64, device=store.device)
    table.copy_(buffer.memory[: len(addresses)], non_blocking=True)
    buffer.ready = buffer.ready or torch.cuda.Event()
    buffer.ready.record(torch.cuda.current_stream(store.device))
    return table


def _upload_captured(store: TableStore, addresses: np.ndarray) -> Tensor:
    """Record the copy in the graph; its pinned source is never reused. Not cached: the table is written only when the
    graph replays."""
    spare = store.spare.setdefault(_size_class(len(addresses)), [])
    memory = spare.pop() if spare else torch.empty(_size_class(len(addresses)), dtype=torch.int64, pin_memory=True)
    memory.numpy()[: len(addresses)] = addresses
    store.captured.append(memory)
    table = torch.empty(len(addresses), dtype=torch.int64, device=store.device)
    table.copy_(memory[: len(addresses)], non_blocking=True)
    return table


# ---- launching -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """What one launch over a dtype group needs; `rows` keeps the tensors of the table alive until the launch is
    queued."""

    table: Tensor
    chunks: Chunks
    aligned: bool
    dtypes: tuple[torch.dtype, ...]
    rows: list[list[Tensor]]
    write_back: list[tuple[Tensor, Tensor]]  # (where the user's tensor is, the dense copy that was updated)


def launches(params: list[Tensor], grads: list[Tensor], states: list[list[Tensor]]) -> list[Launch]:
    """Group by dtype, bring every tensor of a parameter into one memory layout, and build the tables."""
    store = store_of(params[0].device)
    result = []
    for dtypes, indices in group_by_dtype([params, grads, *states]).items():
        columns, write_back = [], []
        for i in indices:
            param = params[i] if is_dense(params[i]) else params[i].contiguous()
            column = [param, matching(grads[i], param), *(matching(s[i], param) for s in states)]
            originals = (params[i], grads[i], *(s[i] for s in states))
            write_back += [
                (o, c) for row, (o, c) in enumerate(zip(originals, column, strict=True)) if row != 1 and o is not c
            ]
            columns.append(column)
        rows = [list(row) for row in zip(*columns, strict=True)]
        table, aligned = address_table(store, rows)
        chunks = chunks_of(store, tuple(p.numel() for p in rows[0]))
        result.append(Launch(table, chunks, aligned, dtypes, rows, write_back))
    return result


def copy_back(launch: Launch) -> None:
    """Give tensors that are not dense their new values."""
    for original, copy in launch.write_back:
        original.copy_(copy)
