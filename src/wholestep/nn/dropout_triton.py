"""ws::dropout as one Triton kernel, for eager CUDA: there the arithmetic of its mask would be some twenty launches.

In: x (contiguous float32, float16 or bfloat16), p, a 0-d int64 key on the same device. Out: the bits of ws::dropout (see
ops/dropout.py and ops/random_bits.py, which this follows line by line). Import only where Triton exists.
"""

# Kernel bodies are Triton's language, whose arguments carry no Python types.
# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from wholestep.ops.random_bits import MULTIPLIERS, drop_threshold

FIRST: tl.constexpr = tl.constexpr(MULTIPLIERS[0])
SECOND: tl.constexpr = tl.constexpr(MULTIPLIERS[1])
THIRD: tl.constexpr = tl.constexpr(MULTIPLIERS[2])
BLOCK = 1024


@triton.jit
def _xor_shift(x, DISTANCE: tl.constexpr):
    return x ^ ((x >> DISTANCE) & ((1 << (32 - DISTANCE)) - 1))


@triton.jit
def _dropout_kernel(x_ptr, out_ptr, key_ptr, numel, threshold, scale, BLOCK: tl.constexpr):
    wide = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = wide < numel
    key = tl.load(key_ptr)
    high = (key >> 32).to(tl.int32) + (wide >> 32).to(tl.int32) * FIRST  # the index has high bits beyond 2**32 elements
    bits = _xor_shift(wide.to(tl.int32) ^ key.to(tl.int32), 16) * FIRST
    bits = _xor_shift(bits + high, 15) * SECOND
    bits = _xor_shift(bits, 16) * THIRD
    bits = _xor_shift(bits, 15)
    x = tl.load(x_ptr + wide, mask=inside, other=0.0)
    kept = (x.to(tl.float32) * scale).to(out_ptr.dtype.element_ty)
    # a selection, not a product: a dropped inf or NaN gives 0
    tl.store(out_ptr + wide, tl.where((bits & 0x7FFFFFFF) < threshold, 0.0, kept), mask=inside)


def launch(x: Tensor, p: float, key: Tensor) -> Tensor:
    """x / (1 - p) where kept, else 0; 0 < p < 1."""
    out = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), BLOCK),)
        _dropout_kernel[grid](x, out, key, x.numel(), drop_threshold(p), 1.0 / (1.0 - p), BLOCK=BLOCK)
    return out
