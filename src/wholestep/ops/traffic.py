"""Bytes one node has to move: what it reads and what it writes, at least.

In: an fx node with `meta["val"]`. Out: bytes read and written, aware of dtypes. Every distinct input counts once however often the
operator looks at it, every output once; intermediate values inside an operator stay on the chip. Views, `getitem` and
operators over sizes move nothing. Exceptions, by name:

- arguments that lend only their shape (`zeros_like`), or whose content is replaced (`copy`), are not read;
- an operator that picks at indices reads the indices and as much as it picks, not the whole table;
- an operator that writes into an argument reads and writes it;
- expanded dimensions are stored once, and read once;
- a loss in chunks reads its weight once per chunk, and its logits pass through memory.

Optimizer updates need no exception: they read parameters, gradients and state, and write parameters and state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from wholestep.graph.training_graph import tensors_in
from wholestep.ops.amounts import Amount, numel, shape, stored_bytes
from wholestep.ops.call import Call, elements, read_call
from wholestep.ops.record import record, record_of


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes between the memory of the device and its chip."""

    read: Amount
    written: Amount

    @property
    def total(self) -> Amount:
        return self.read + self.written


NOTHING = Traffic(0, 0)

_SHAPE_ONLY = (
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones",
    "new_full", "new_empty", "new_empty_strided", "fill", "zero", "copy", "bernoulli.p", "uniform", "normal", "exponential",
)  # fmt: skip
record(*(f"aten::{name}" for name in _SHAPE_ONLY), unread=("self",))
record(
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", writes=False
)


def _picked(table: str, *others: str) -> Callable[[Call], Amount]:
    """Reads of an operator that picks as many elements of `table` as it gives out."""

    def read(call: Call) -> Amount:
        picked = numel(call.outputs[0]) * call.tensor(table).element_size()
        return picked + _stored(tensor for name in others for tensor in tensors_in(call.get(name)))

    return read


def _loss_picks(call: Call) -> Amount:
    """One probability per target."""
    target = call.tensor("target")
    return numel(target) * call.tensor("self").element_size() + _stored([target, *tensors_in(call.get("weight"))])


def _loss_gradient(call: Call) -> Amount:
    """The gradient of the loss and the targets; the probabilities only lend their shape."""
    return _stored([call.tensor("grad_output"), call.tensor("target"), *tensors_in(call.get("weight"))])


def _rows_summed(call: Call) -> Amount:
    """A row of the table per index."""
    weight, indices = call.tensor("weight"), call.tensor("indices")
    rows = numel(indices) * shape(weight)[-1] * weight.element_size()
    return rows + _stored([indices, *tensors_in(call.get("offsets"))])


def _rows_gathered(call: Call) -> Amount:
    """Every incoming row once, and the row it is added to once."""
    grad, indices = call.tensor("grad_output", "grad"), call.tensor("indices")
    return 2 * stored_bytes(grad) + stored_bytes(indices)


def _convolution_gradient(call: Call) -> Amount:
    """The image serves the gradient of the weight only, the weight that of the image only."""
    image, weight, _ = (bool(wanted) for wanted in call["output_mask"])
    wanted = [name for name, needed in (("weight", image), ("input", weight)) if needed]
    return _stored(call.tensor(name) for name in ("grad_output", *wanted))


READS: dict[str, Callable[[Call], Amount]] = {
    "aten::embedding": _picked("weight", "indices"),
    "aten::index": _picked("self", "indices"),
    "aten::_unsafe_index": _picked("self", "indices"),
    "aten::index_select": _picked("self", "index"),
    "aten::gather": _picked("self", "index"),
    "aten::take": _picked("self", "index"),
    "aten::nll_loss_forward": _loss_picks,
    "aten::nll_loss2d_forward": _loss_picks,
    "aten::nll_loss_backward": _loss_gradient,
    "aten::nll_loss2d_backward": _loss_gradient,
    "aten::_embedding_bag": _rows_summed,
    "aten::embedding_dense_backward": _rows_gathered,
    "aten::convolution_backward": _convolution_gradient,
}
"""Operator -> bytes it reads, where that is not its inputs once."""


for _name, _read in READS.items():
    record(_name, reads=_read)


def traffic(node: fx.Node | Call) -> Traffic:
    """Bytes of a `call_function` node."""
    call = node if isinstance(node, Call) else read_call(node)
    if call.is_view or call.name == "python::getitem" or not (call.inputs or call.outputs):
        return NOTHING
    known = record_of(call)
    read = known.reads(call) if known.reads is not None else _stored(_read_tensors(call, known.unread))
    written = _stored(_written_tensors(call)) + _second_writes(call) if known.writes else 0
    if known.passes_through is not None:
        inside = known.passes_through(call)
        read, written = read + inside[0], written + inside[1]
    return Traffic(read, written)


def _read_tensors(call: Call, unread: tuple[str, ...]) -> list[torch.Tensor]:
    return [tensor for name, value in call.arguments.items() if name not in unread for tensor in tensors_in(value)]


def _written_tensors(call: Call) -> list[torch.Tensor]:
    """The results, and arguments that are written into; a result that is such an argument counts once."""
    if call.schema is None or not call.schema.is_mutable:
        return call.outputs
    into = [
        t for a in call.schema.arguments if a.alias_info and a.alias_info.is_write for t in tensors_in(call.get(a.name))
    ]
    fresh = [r for r, s in zip(_results(call), call.schema.returns) if s.alias_info is None]
    return into + [tensor for value in fresh for tensor in tensors_in(value)]


def _results(call: Call) -> tuple[Any, ...]:
    return tuple(call.result) if isinstance(call.result, list | tuple) else (call.result,)


def _second_writes(call: Call) -> Amount:
    """Rows that are added to after the whole table was filled with zeros."""
    if call.name != "aten::embedding_dense_backward":
        return 0
    return elements([call.tensor("grad_output", "grad")]) * call.outputs[0].element_size()


def _stored(tensors: Any) -> Amount:
    """Bytes of these tensors; the same tensor (one value of the graph) counts once."""
    distinct = {id(tensor): tensor for tensor in tensors}
    return sum((stored_bytes(tensor) for tensor in distinct.values()), 0)
