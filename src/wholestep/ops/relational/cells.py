"""Sums over edges of rows times the matrix of their relation, where most nodes have edges of most relations: ws::cell_mm.

Legend: a cell is a relation together with a node, whether there are edges or not. A table has G * N cells, those of a relation
together; the entries of cell c stand at ptr[c] to ptr[c + 1]: index (Z,) is a row of x, target (Z,) the cell's node, edge (Z,) the
row of `weight` that it is multiplied by, or -1 for one. x (M, I), weight (E,), w (G, I, O), out (N, O).

    cell_mm          out[n] = sum over groups g of (sum over the entries of cell (g, n) of weight[edge] * x[index]) @ w[g]
    cell_mm_weights  out[g] = the sums of all cells of g, transposed, @ grad (N, O)
    cell_mm_both     both of these: what a derivative asks for, of one pass over the sums

One product has all groups side by side; in `linear_sum.py` there is a row for every pair, and a product for every relation. A
cell without edges costs a product all the same. The table comes with itself turned round (back_), so that what x gets is a
cell_mm too.

On a GPU some of it at a time (`cells_triton.py`); elsewhere sums of all cells, and one product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from wholestep.ops import grouped_mm
from wholestep.ops.amounts import Amount, numel
from wholestep.ops.call import Call
from wholestep.ops.multi_tensor import in_triton
from wholestep.ops.record import record
from wholestep.ops.relational import gather

LIBRARY = torch.library.Library("ws", "FRAGMENT")
_TABLE = "Tensor ptr, Tensor index, Tensor target, Tensor? edge"
_BACK = "Tensor back_ptr, Tensor back_index, Tensor back_target, Tensor? back_edge"
LIBRARY.define(f"cell_mm(Tensor x, Tensor? weight, Tensor w, {_TABLE}, {_BACK}) -> Tensor")
LIBRARY.define(f"cell_mm_weights(Tensor x, Tensor? weight, Tensor grad, {_TABLE}) -> Tensor")
LIBRARY.define(f"cell_mm_both(Tensor x, Tensor? weight, Tensor w, Tensor grad, {_TABLE}) -> (Tensor, Tensor)")
MOST_CELLS = 2
"""Per pair: where most are empty, their products cost more than what stands in memory between."""
ROOM = 1 << 28
"""Bytes of products, or sums, that a GPU has at a time."""


def product_first(cells: Amount, entries: Amount, inner: int, columns: int) -> bool:
    """Whether that is quicker on a GPU than sums first (`cells_triton.py`)."""
    return 2 * columns * (entries + cells) <= inner * (entries + 2 * cells)  # type: ignore[no-any-return]


def nodes_at_once(nodes: Amount, groups: int, width: int, size: int) -> Amount:
    """Whose sums have room, in parts of about equal size; of a number that is a symbol how many at most."""
    return _at_once(nodes, groups * width * size)


def groups_at_once(rows: Amount, groups: int, width: int, size: int) -> int:
    """Whose products with `rows` rows have room; of a number that is a symbol all."""
    return _at_once(groups, rows * width * size) if isinstance(rows, int) else groups  # type: ignore[return-value]


def _at_once(count: Amount, bytes_each: int) -> Amount:
    most = max(ROOM // max(bytes_each, 1), 1)
    return most if not isinstance(count, int) else -(-count // max(-(-count // most), 1))


def pays(x: Tensor, weight: Tensor | None, w: Tensor, on_gpu: bool = False) -> bool:
    """Whether kernels know these operands: narrow rows, and a number per edge that is not learned. `on_gpu`: they will be
    on one."""
    plain = x.dim() == 2 and w.dim() == 3 and (weight is None or weight.dim() == 1) and x.dtype == w.dtype
    learned = weight is not None and weight.requires_grad
    return plain and not learned and (on_gpu or x.device.type != "cpu") and grouped_mm.is_narrow(*w.shape[1:])


def _sums(x: Tensor, weight: Tensor | None, ptr: Tensor, index: Tensor, edge: Tensor | None, groups: int) -> Tensor:
    """(G, N, I)"""
    sums = gather.sum_reference(x, None if edge is None else weight, ptr, index, edge, ptr, index, None)
    return sums.reshape(groups, -1, x.shape[1])


def reference(
    x: Tensor, weight: Tensor | None, w: Tensor, ptr: Tensor, index: Tensor, target: Tensor, edge: Tensor | None, *_: Any
) -> Tensor:  # fmt: skip
    out = gather.widened(_sums(x, weight, ptr, index, edge, w.shape[0]) @ w).sum(0)
    return out.to(x.dtype)


def cell_mm(
    x: Tensor, weight: Tensor | None, w: Tensor, ptr: Tensor, index: Tensor, target: Tensor, edge: Tensor | None, *back: Any
) -> Tensor:  # fmt: skip
    if in_triton(x, weight, w) and grouped_mm.is_narrow(*w.shape[1:]):
        from wholestep.ops.relational import cells_triton

        return cells_triton.cell_mm(x, None if edge is None else weight, w, ptr, index, target, edge)
    return reference(x, weight, w, ptr, index, target, edge)


def weights_reference(
    x: Tensor, weight: Tensor | None, grad: Tensor, ptr: Tensor, index: Tensor, target: Tensor, edge: Tensor | None
) -> Tensor:
    groups = (ptr.shape[0] - 1) // max(grad.shape[0], 1)
    return _sums(x, weight, ptr, index, edge, groups).transpose(1, 2) @ grad


def cell_mm_weights(
    x: Tensor, weight: Tensor | None, grad: Tensor, ptr: Tensor, index: Tensor, target: Tensor, edge: Tensor | None
) -> Tensor:
    if in_triton(x, weight, grad) and grouped_mm.is_narrow(x.shape[1], grad.shape[1]):
        from wholestep.ops.relational import cells_triton

        return cells_triton.cell_mm_weights(x, None if edge is None else weight, grad, ptr, index, target, edge)
    return weights_reference(x, weight, grad, ptr, index, target, edge)


def both_reference(
    x: Tensor, weight: Tensor | None, w: Tensor, grad: Tensor, *table: Tensor | None
) -> tuple[Tensor, Tensor]:
    return reference(x, weight, w, *table), weights_reference(x, weight, grad, *table)  # type: ignore[arg-type]


def cell_mm_both(
    x: Tensor, weight: Tensor | None, w: Tensor, grad: Tensor, ptr: Tensor, index: Tensor, target: Tensor, edge: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if in_triton(x, weight, w, grad) and grouped_mm.is_narrow(*w.shape[1:]):
        from wholestep.ops.relational import cells_triton

        return cells_triton.cell_mm_both(x, None if edge is None else weight, w, grad, ptr, index, target, edge)
    return both_reference(x, weight, w, grad, ptr, index, target, edge)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("cell_mm", cell_mm, _device)
    LIBRARY.impl("cell_mm_weights", cell_mm_weights, _device)
    LIBRARY.impl("cell_mm_both", cell_mm_both, _device)


@torch.library.register_fake("ws::cell_mm", lib=LIBRARY)
def _fake(x: Tensor, weight: Any, w: Tensor, ptr: Tensor, *_: Any) -> Tensor:
    return x.new_empty((ptr.shape[0] - 1) // w.shape[0], w.shape[2])


@torch.library.register_fake("ws::cell_mm_weights", lib=LIBRARY)
def _weights_fake(x: Tensor, weight: Any, grad: Tensor, ptr: Tensor, *_: Any) -> Tensor:
    return x.new_empty((ptr.shape[0] - 1) // grad.shape[0], x.shape[1], grad.shape[1])


@torch.library.register_fake("ws::cell_mm_both", lib=LIBRARY)
def _both_fake(x: Tensor, weight: Any, w: Tensor, grad: Tensor, ptr: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty((ptr.shape[0] - 1) // w.shape[0], w.shape[2]), x.new_empty(w.shape[0], x.shape[1], grad.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, w, *tables = ctx.saved_tensors
    table, turned = tables[:4], tables[4:]
    of_x = of_weight = of_w = None
    to_x, _, to_w = ctx.needs_input_grad[:3]
    if to_x and to_w:
        of_x, of_w = torch.ops.ws.cell_mm_both(grad, weight, w.transpose(1, 2), x, *turned)
        of_w = of_w.transpose(1, 2)
    elif to_x:
        of_x = torch.ops.ws.cell_mm(grad, weight, w.transpose(1, 2), *turned, *table)
    elif to_w and x.shape[1] <= grad.shape[1]:  # sums of the narrower rows
        of_w = torch.ops.ws.cell_mm_weights(x, weight, grad, *table)
    elif to_w:
        of_w = torch.ops.ws.cell_mm_weights(grad, weight, x, *turned).transpose(1, 2)
    if weight is not None and ctx.needs_input_grad[1]:
        of_weight = _of_weight(x, weight, w, grad, *table)
    return of_x, of_weight, of_w, *[None] * 8


def _of_weight(
    x: Tensor, weight: Tensor, w: Tensor, grad: Tensor, ptr: Tensor, index: Tensor, target: Tensor, edge: Tensor | None
) -> Tensor:
    """Entry by entry: a layer whose weights are learned has another operator (`pays`)."""
    out = weight.new_zeros(weight.shape[0] + 1)  # the last is for entries without an edge
    if edge is None:
        return out[:-1]
    ends = ptr[grad.shape[0] :: grad.shape[0]].contiguous()
    rows = torch.ops.ws.grouped_mm(x.index_select(0, index), w, ends)
    dots = (rows * grad.index_select(0, target)).sum(-1).to(out.dtype)
    return out.index_copy(0, torch.where(edge < 0, weight.shape[0], edge.long()), dots)[:-1]


torch.library.register_autograd("ws::cell_mm", _backward, setup_context=_keep, lib=LIBRARY)


# ---- what is known of them -------------------------------------------------------------------------------------


def _cases() -> Iterator[tuple[Any, ...]]:
    """Two groups of three nodes, from rows of three: one cell has no entries, one has two."""
    lists = (
        [0, 2, 2, 3, 4, 5, 6], [0, 2, 1, 1, 0, 2], [0, 0, 2, 0, 1, 2], [0, 1, 2, 3, -1, 5],
        [0, 1, 2, 3, 4, 5, 6], [0, 2, 0, 1, 0, 2], [0, 1, 2, 0, 1, 2], [0, 2, 1, -1, 3, 5],
    )  # fmt: skip
    tables = tuple(torch.tensor(ids, dtype=torch.int32) for ids in lists)
    bare = tuple(None if place % 4 == 3 else ids for place, ids in enumerate(tables))
    for dtype in (torch.float32, torch.float64):
        x, w = torch.randn(3, 5).to(dtype), torch.randn(2, 5, 4).to(dtype)
        yield x, None, w, *bare
        yield x, torch.rand(6).to(dtype), w, *tables


def _weights_cases() -> Iterator[tuple[Any, ...]]:
    for x, weight, w, *tables in _cases():
        yield x, weight, torch.randn(3, w.shape[2], dtype=x.dtype), *tables[:4]


def _both_cases() -> Iterator[tuple[Any, ...]]:
    for x, weight, w, *tables in _cases():
        yield x, weight, w, torch.randn(3, 7, dtype=x.dtype), *tables[:4]


def _between_bytes(call: Call) -> Amount:
    """Of products or sums on their way, and of float32 that results are added up in."""
    x, cells, w, grad = call.tensor("x"), call.shape("ptr")[0] - 1, call.get("w"), call.get("grad")
    groups = w.shape[0] if w is not None else cells // grad.shape[0]  # type: ignore[union-attr]
    if grad is None and w is not None and product_first(cells, call.shape("index")[0], *w.shape[1:]):
        wide = w.shape[2] * x.element_size()
        made = groups_at_once(x.shape[0], groups, w.shape[2], x.element_size()) * x.shape[0] * wide
        return made if x.dtype == torch.float32 else made + 4 * (cells // groups) * w.shape[2]
    sums = nodes_at_once(cells // groups, groups, x.shape[1], x.element_size()) * groups * x.shape[1] * x.element_size()
    return sums if grad is None else sums + 4 * groups * x.shape[1] * grad.shape[1]


def _flops(call: Call) -> int:
    """Of products, and of the sums before them."""
    inner = call.shape("x")[1]
    columns = sum(t.shape[-1] for t in (call.get("w"), call.get("grad")) if t is not None)
    return 2 * (call.shape("ptr")[0] - 1) * inner * columns + 2 * numel(call.tensor("index")) * inner


for _name, _reference, _examples in (
    ("cell_mm", reference, _cases),
    ("cell_mm_weights", weights_reference, _weights_cases),
    ("cell_mm_both", both_reference, _both_cases),
):
    record(
        f"ws::{_name}",
        reference=_reference,
        cases=_examples,
        tolerance=1e-5,
        kind="matmul",
        flops=_flops,
        scratch=_between_bytes,
        compiled=False,
    )
