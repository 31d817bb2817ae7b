"""Counter-based random bits as plain int32 tensor arithmetic.

In: a shape, a 64-bit key held in a 0-d int64 tensor. Out: the int32 tensor `mix(linear index, key)`, and from it masks,
uniforms and normals. Why: a value depends only on (index, key), so recomputation, CUDA graphs, and any device or
backend see the same bits, no mask is stored, and the arithmetic fuses into its neighbours. Keys come from
`site_keys(seed, step, micro, num_sites)`.

Legend: `lo`, `hi` are the two int32 halves of the key; `>>>` is the logical shift, written as an arithmetic shift and a
mask because int32 shifts keep the sign. All multiplications wrap modulo 2**32.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from wholestep.ops.aten.elementwise import RANDOM_BITS, per_output_element
from wholestep.ops.record import record

# Three odd multipliers as signed int32, the last from the golden ratio. Their quality is what
# tests/ops/test_random_bits.py measures: bit balance, neighbours, other keys, permuted overlaps.
MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32, 0x9E3779B1 - 2**32)
# The second stream of `normal` uses another key: key ^ NORMAL_STREAM.
NORMAL_STREAM = 0x5851F42D4C957F2D
# Of the numbers of a rank that draws by itself.
RANK_STREAM = 0x2545F4914F6CDD1D
# Mantissa bits kept so that a uniform rounded to the dtype stays below 1.
UNIFORM_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 24}


def xor_shift(x: Tensor, distance: int) -> Tensor:
    """x ^ (x >>> distance) on int32."""
    return x ^ ((x >> distance) & ((1 << (32 - distance)) - 1))


def mix(index: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """Hash an int32 index with both key halves; three multiplications, about 20 integer instructions."""
    x = xor_shift(index ^ lo, 16) * MULTIPLIERS[0]
    # hi enters after one round and before two: keys with equal lo (or lo that differ by a permutation of the indices)
    # still give unrelated bits. Entering one round later left correlations of 0.7 between keys whose hi differ by 1.
    x = xor_shift(x + hi, 15) * MULTIPLIERS[1]
    x = xor_shift(x, 16) * MULTIPLIERS[2]
    return xor_shift(x, 15)


def split_key(key: Tensor) -> tuple[Tensor, Tensor]:
    """The low and the high 32 bits of a 0-d int64 key, as int32."""
    return key.to(torch.int32), (key >> 32).to(torch.int32)


def part_key(key: Tensor, shape: Sequence[int], dim: int, parts: int, rank: Tensor) -> Tensor:
    """The key by which one of equal parts of a tensor gets the very bits that it has in the whole: int64 [4].

    shape: of the part. An index i of the part is i + i // period * jump + start in the whole.
    """
    period = max(1, math.prod(shape[dim:]))
    return torch.stack([key, torch.full_like(key, period), torch.full_like(key, (parts - 1) * period), rank * period])


def forked_key(key: Tensor, rank: Tensor) -> Tensor:
    """A key that has nothing to do with that of another rank."""
    return key ^ ((rank + 1) * RANK_STREAM)


def _part_bits(shape: Sequence[int], key: Tensor, device: torch.device) -> Tensor:
    """`bits` of a part of a larger tensor, by a `part_key`. Indices below 2**31 give the same bits as int32 ones."""
    whole, period, jump, start = key.unbind()
    lo, hi = split_key(whole)
    index = torch.arange(math.prod(shape), dtype=torch.int64, device=device).reshape(tuple(shape))
    index = index + torch.div(index, period, rounding_mode="floor") * jump + start
    return mix(index.to(torch.int32), lo, hi + (index >> 32).to(torch.int32) * MULTIPLIERS[0])


def bits(shape: Sequence[int], key: Tensor, device: torch.device | None = None) -> Tensor:
    """32 random bits per element, in logical (contiguous) index order."""
    device = key.device if device is None else device
    if key.dim() == 1:
        return _part_bits(shape, key, device)
    lo, hi = split_key(key)
    numel = 1
    for size in shape:
        numel = numel * size
    if numel < 2**31:
        index = torch.arange(numel, dtype=torch.int32, device=device).reshape(tuple(shape))
        return mix(index, lo, hi)
    wide = torch.arange(numel, dtype=torch.int64, device=device).reshape(tuple(shape))
    # The high index bits enter like the high key bits, but multiplied so that index and key cannot cancel.
    return mix(wide.to(torch.int32), lo, hi + (wide >> 32).to(torch.int32) * MULTIPLIERS[0])


def keep_mask(shape: Sequence[int], p: float, key: Tensor, device: torch.device | None = None) -> Tensor:
    """True with probability 1 - p (to 2**-31)."""
    return (bits(shape, key, device) & 0x7FFFFFFF) >= drop_threshold(p)


def drop_threshold(p: float) -> int:
    """The 31-bit number below which an element is dropped; a p just under 1 must still fit in int32."""
    return min(round(p * 2**31), 2**31 - 1)


def uniform(
    shape: Sequence[int], key: Tensor, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """Uniform in [0, 1). The float64 values are the float32 ones, so a float64 reference draws the same numbers;
    float16 and bfloat16 truncate them, because rounding could give 1."""
    if dtype not in UNIFORM_BITS:
        raise TypeError(f"uniform draws {', '.join(str(d) for d in UNIFORM_BITS)}; got {dtype}")
    num_bits = UNIFORM_BITS[dtype]
    drawn = (bits(shape, key, device) >> (32 - num_bits)) & ((1 << num_bits) - 1)
    return (drawn.to(torch.float32) * 2.0**-num_bits).to(dtype)


def normal(
    shape: Sequence[int], key: Tensor, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """Standard normal by Box-Muller from two streams, computed in float32 and then cast."""
    radius_uniform = 1.0 - uniform(shape, key, torch.float32, device)  # in (0, 1]: its logarithm is finite
    angle = uniform(shape, _other_stream(key), torch.float32, device) * 6.283185307179586
    return (torch.sqrt(-2.0 * torch.log(radius_uniform)) * torch.cos(angle)).to(dtype)


def _other_stream(key: Tensor) -> Tensor:
    """The key of the second stream; one of a part (`part_key`) lies where it lay."""
    return key ^ NORMAL_STREAM if key.dim() == 0 else torch.cat([key[:1] ^ NORMAL_STREAM, key[1:]])


# ---- keys ----------------------------------------------------------------------------------------------------

MASK64 = 2**64 - 1
GOLDEN64 = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    """The splitmix64 finaliser on Python integers: the specification of the two vectorised versions below."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)


def base_key(seed: int, step: int, micro: int) -> int:
    """Fold (seed, step, micro-batch) into 64 bits: one mix per word, so no two triples share a stream by arithmetic."""
    state = 0
    for word in (seed, step, micro):
        state = mix64((state + GOLDEN64 + (word & MASK64)) & MASK64)
    return state


def site_keys(seed: int, step: int, micro: int, num_sites: int) -> Tensor:
    """One int64 key per random site on the CPU: mix64(base_key + (site + 1) * GOLDEN64), viewed as signed."""
    site = np.arange(1, num_sites + 1, dtype=np.uint64)
    x = np.uint64(base_key(seed, step, micro)) + site * np.uint64(GOLDEN64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return torch.from_numpy(x.view(np.int64))


# ---- operators -----------------------------------------------------------------------------------------------

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define("uniform(SymInt[] size, Tensor key, ScalarType dtype) -> Tensor")
LIBRARY.define("normal(SymInt[] size, Tensor key, ScalarType dtype) -> Tensor")
for _device in ("CPU", "CUDA"):
    LIBRARY.impl("uniform", uniform, _device)
    LIBRARY.impl("normal", normal, _device)


@torch.library.register_fake("ws::uniform", lib=LIBRARY)
def _uniform_fake(size: Sequence[int], key: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device=key.device)


@torch.library.register_fake("ws::normal", lib=LIBRARY)
def _normal_fake(size: Sequence[int], key: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device=key.device)


def _cases() -> Iterator[tuple[list[int], Tensor, torch.dtype]]:
    for shape in ([], [0], [5], [3, 1, 7]):
        yield from ((shape, torch.tensor(77), dtype) for dtype in UNIFORM_BITS)


record(
    "ws::uniform",
    reference=uniform,
    cases=_cases,
    kind="elementwise",
    flops=per_output_element(RANDOM_BITS + 3),
    decomposition=uniform,
)
record(
    "ws::normal",
    reference=normal,
    cases=_cases,
    kind="elementwise",
    flops=per_output_element(2 * (RANDOM_BITS + 3) + 5),
    decomposition=normal,
)
