"""ws::add_rows(rows, index, values) -> rows, with values[i] added to rows[index[i]], always in the same order.

rows (N, D), index (S,) with repeats, values (S, D); on the CPU. What writes to one row several times - the gradient of an
embedding, of `x[index]` - is `index_put(accumulate=True)` in a graph, and there Inductor's code, and torch's kernel for float32,
add from several threads at once, with atomic operations: the order, and with it the last bits, change from run to run.
`index_add` keeps the order of the values, so it has the bits of torch's `index_put` on one thread, and was faster in every
size tried: 1,024 rows of 128 floats into 2,048 take 0.05 ms instead of 0.3 ms on one thread. It hides here from Inductor, which
would turn it into `index_put`.

`index_put` and its like below are written with this operator. They take the arguments of the aten operator they are named
after, and return NotImplemented where that one repeats itself: nothing is added, whole numbers, or no CPU.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from wholestep.graph.strides import inverse, laid_out, memory_order
from wholestep.ops.amounts import numel
from wholestep.ops.record import record

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define("add_rows(Tensor rows, Tensor index, Tensor values) -> Tensor")


def reference(rows: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Value by value. An index that is out of range is an error."""
    rows = rows.contiguous()
    if rows.dtype in (torch.float32, torch.float64):
        return torch.index_add(rows, 0, index, values)
    # In order as it is; and `index_add` would round the sum of narrow numbers once, where eager rounds after every addition.
    return torch.index_put(rows, (index,), values, accumulate=True)


@torch.library.register_fake("ws::add_rows", lib=LIBRARY)
def _fake(rows: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


LIBRARY.impl("add_rows", reference, "CPU")


def index_put(self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """aten.index_put: the indexed dimensions become rows, several indices become one."""
    given = {dim: index for dim, index in enumerate(indices) if index is not None}
    # A mask names every place once: there is no order.
    if not accumulate or not _rounds_on_cpu(self) or any(i.dtype in (torch.bool, torch.uint8) for i in given.values()):
        return NotImplemented
    places = torch.broadcast_tensors(*given.values())
    order = [*given, *(dim for dim in range(self.dim()) if dim not in given)]
    moved = self.permute(order)
    sizes, rest = moved.shape[: len(given)], moved.shape[len(given) :]
    # As in torch's indexing: indices of neighbouring dimensions stay where those were, others go to the front.
    first, last, depth = min(given), max(given), places[0].dim()
    ahead = first if last - first < len(given) else 0
    values = values.expand(*rest[:ahead], *places[0].shape, *rest[ahead:])
    values = values.permute(*range(ahead, ahead + depth), *range(ahead), *range(ahead + depth, values.dim()))
    rows, count, width = math.prod(sizes), places[0].numel(), math.prod(rest)
    index = _one_index(places, sizes).reshape(count)
    added = torch.ops.ws.add_rows(moved.reshape(rows, width), index, values.reshape(count, width))
    return _laid_out_like(self, added.view(moved.shape).permute(inverse(order)))


def masked_index_put(self: Tensor, mask: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> Any:
    """aten._unsafe_masked_index_put_accumulate: nothing is added where the mask is false, whatever the index is there."""
    if not _rounds_on_cpu(self):
        return NotImplemented
    clamped = [None if i is None else i.clamp(-size, size - 1) for i, size in zip(indices, self.shape, strict=False)]
    return index_put(self, clamped, values.masked_fill(~mask, 0), accumulate=True)


def put(self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Any:
    """aten.put: as if `self` had one dimension."""
    added = index_put(self.reshape(-1), [index.reshape(-1)], source.reshape(-1), accumulate)
    return added if added is NotImplemented else _laid_out_like(self, added.view(self.shape))


def _laid_out_like(self: Tensor, result: Tensor) -> Tensor:
    """In memory as torch's result, which is a copy of `self`: some kernels that read it later take its strides on trust."""
    return laid_out(result, memory_order(torch.empty_like(self, device="meta")))


def _rounds_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and (tensor.is_floating_point() or tensor.is_complex())


def _one_index(places: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The number of a row from its place in each dimension; where one of them is out of range, so is the number."""
    row, valid = torch.zeros_like(places[0]).long(), torch.ones_like(places[0], dtype=torch.bool)
    for place, size in zip(places, sizes, strict=True):
        place = torch.where(place < 0, place + size, place).long()
        row, valid = row * size + place, valid & (place >= 0) & (place < size)
    return torch.where(valid, row, math.prod(sizes))


def _cases() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        yield torch.randn(4, 3).to(dtype), torch.tensor([0, 3, 3, 0, 3]), torch.randn(5, 3).to(dtype)
        yield torch.randn(4, 1).to(dtype), torch.zeros(0, dtype=torch.int64), torch.randn(0, 1).to(dtype)


record(
    "ws::add_rows",
    reference=reference,
    cases=_cases,
    kind="reduction",
    flops=lambda call: numel(call.tensor("values")),
)
record("aten::index_put", "aten::_unsafe_index_put", in_order=index_put)
record("aten::_unsafe_masked_index_put_accumulate", in_order=masked_index_put)
record("aten::put", in_order=put)
