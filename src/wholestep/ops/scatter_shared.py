"""Rows added up by an index that all of a batch share: `out[b, q, index[q, k]] += src[b, q, k]`.

index (Q, K), src (..., Q, K), out (..., Q, size). The gradient of `gather` with an expanded index is of this kind, as relative
positions have it (DeBERTa: 24 times a step, two fifths of it). Added one by one, in bf16 by compare and swap, it is slow and
its order is that of chance. On a GPU it is a product with ones and zeros here (`scatter_shared_triton.py`): sums in float32,
in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from wholestep.ops.amounts import numel
from wholestep.ops.multi_tensor import in_triton
from wholestep.ops.record import record


def reference(index: Tensor, src: Tensor, size: int) -> Tensor:
    """Added in float32 and rounded once."""
    wide = src if src.dtype == torch.float64 else src.float()
    out = wide.new_zeros(*src.shape[:-1], size)
    return out.scatter_add(-1, index.expand(src.shape), wide).to(src.dtype)


def _scattered(index: Tensor, src: Tensor, size: int) -> Tensor:
    if not in_triton(src):
        return reference(index, src, size)
    from wholestep.ops.scatter_shared_triton import launch

    return launch(index, src, size)


_operator = torch.library.custom_op(
    "ws::scatter_shared", _scattered, mutates_args=(), schema="(Tensor index, Tensor src, int size) -> Tensor"
)


@_operator.register_fake
def _(index: Tensor, src: Tensor, size: int) -> Tensor:
    return src.new_empty(*src.shape[:-1], size)


def _cases() -> Iterator[tuple[Tensor, Tensor, int]]:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        yield torch.randint(0, 7, (3, 5)), torch.randn(2, 1, 3, 5).to(dtype), 7
        yield torch.zeros(1, 1, dtype=torch.int64), torch.randn(2, 1, 1).to(dtype), 1


record(
    "ws::scatter_shared",
    reference=reference,
    cases=_cases,
    kind="reduction",
    flops=lambda call: numel(call.tensor("src")),
)
