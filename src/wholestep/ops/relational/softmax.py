"""ws::segment_softmax: softmax over the edges of every node, edges in the order of their nodes.

logits (E,) or (E, heads); ptr (N + 1,): the edges of node n stand at ptr[n] to ptr[n + 1]. The largest of each node is subtracted
first, so nothing overflows; a node whose logits are all -inf gives zeros. bf16 and fp16 compute in float32. On a GPU Triton kernels
compute it (`softmax_triton.py`).

    a = exp(l - max) / sum;  dl = a (da - sum over the node's edges of a da)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from wholestep.ops.amounts import numel
from wholestep.ops.multi_tensor import in_triton
from wholestep.ops.record import record
from wholestep.ops.relational.gather import targets_of, widened

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define("segment_softmax(Tensor logits, Tensor ptr) -> Tensor")
LIBRARY.define("segment_softmax_backward(Tensor grad, Tensor out, Tensor ptr) -> Tensor")


def reference(logits: Tensor, ptr: Tensor) -> Tensor:
    wide, targets = widened(logits), targets_of(ptr, logits.shape[0])
    nodes = (ptr.shape[0] - 1, *wide.shape[1:])
    place = targets.reshape(-1, *[1] * (wide.dim() - 1)).expand(wide.shape)
    top = wide.new_full(nodes, float("-inf")).scatter_reduce(0, place, wide, "amax")
    top = top.masked_fill(top == float("-inf"), 0.0)
    risen = (wide - top.index_select(0, targets)).exp()
    total = wide.new_zeros(nodes).index_add(0, targets, risen)
    return (risen / total.clamp(min=torch.finfo(wide.dtype).tiny).index_select(0, targets)).to(logits.dtype)


def reference_backward(grad: Tensor, out: Tensor, ptr: Tensor) -> Tensor:
    a, targets = widened(out), targets_of(ptr, out.shape[0])
    pulled = a * widened(grad)
    total = a.new_zeros(ptr.shape[0] - 1, *a.shape[1:]).index_add(0, targets, pulled)
    return (pulled - a * total.index_select(0, targets)).to(out.dtype)


def softmax(logits: Tensor, ptr: Tensor) -> Tensor:
    if not in_triton(logits):
        return reference(logits, ptr)
    from wholestep.ops.relational import softmax_triton

    return softmax_triton.softmax(logits, ptr)


def softmax_backward(grad: Tensor, out: Tensor, ptr: Tensor) -> Tensor:
    if not in_triton(grad, out):
        return reference_backward(grad, out, ptr)
    from wholestep.ops.relational import softmax_triton

    return softmax_triton.softmax_backward(grad, out, ptr)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("segment_softmax", softmax, _device)
    LIBRARY.impl("segment_softmax_backward", softmax_backward, _device)


@torch.library.register_fake("ws::segment_softmax", lib=LIBRARY)
def _fake(logits: Tensor, ptr: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.register_fake("ws::segment_softmax_backward", lib=LIBRARY)
def _backward_fake(grad: Tensor, out: Tensor, ptr: Tensor) -> Tensor:
    return torch.empty_like(out, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output, inputs[1])


def _differentiated(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    out, ptr = ctx.saved_tensors
    return torch.ops.ws.segment_softmax_backward(grad, out, ptr), None


torch.library.register_autograd("ws::segment_softmax", _differentiated, setup_context=_keep, lib=LIBRARY)


def _cases() -> Iterator[tuple[Tensor, Tensor]]:
    ptr = torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        yield (100 * torch.randn(6)).to(dtype), ptr
        yield torch.randn(6, 3).to(dtype), ptr
    yield torch.tensor([float("-inf"), float("-inf"), 1.0, float("-inf"), 2.0, 3.0]), ptr


def _backward_cases() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for logits, ptr in _cases():
        yield torch.randn_like(logits), reference(logits, ptr), ptr


for _name, _reference, _tried, _work in (
    ("", reference, _cases, 5), ("_backward", reference_backward, _backward_cases, 4),
):  # fmt: skip
    record(
        f"ws::segment_softmax{_name}",
        reference=_reference,
        cases=_tried,
        kind="reduction",
        flops=lambda call, work=_work: work * numel(call.outputs[0]),
        compiled=False,
    )
