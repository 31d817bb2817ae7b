"""ws::clip(grads, max_norm, dtype?) -> (norm, scale): global-norm clipping as two 0-d tensors; nobody scales the
gradients here.

In: the gradients of all parameter groups, max_norm as a 0-d float64 tensor, and the dtype as which the gradients count
(None: their own), for gradients kept narrower than their parameters: each norm is that of the widened gradient. Out:
the total 2-norm and min(1, max_norm / (norm + 1e-6)), both float32 (float64 when a gradient is float64). Why: the
update operators multiply by `scale` while they read the gradients, which saves a pass over memory. The arithmetic is
that of torch.nn.utils.clip_grad_norm_, bit for bit on CPU, without a host sync.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from wholestep.ops.record import record

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define("clip(Tensor[] grads, Tensor max_norm, ScalarType? dtype=None) -> (Tensor norm, Tensor scale)")


def result_dtype(grads: list[Tensor], counted_as: torch.dtype | None = None) -> torch.dtype:
    """float64 only where a gradient is (or counts as) float64, as in a float64 reference run."""
    return torch.float64 if torch.float64 in (counted_as, *(g.dtype for g in grads)) else torch.float32


def widened_norm(grads: list[Tensor], dtype: torch.dtype) -> Tensor:
    """torch's total norm of the gradients cast to `dtype`, without casting them all at once.

    One foreach call per dtype of the gradients (it is fast only for one); the norms are put back in the order of the
    gradients, because the order decides the last bits of their sum.
    """
    norms: dict[int, Tensor] = {}
    for own in dict.fromkeys(g.dtype for g in grads):
        indices = [i for i, g in enumerate(grads) if g.dtype == own]
        wide = None if own == dtype else dtype  # as torch calls it, where nothing is widened
        norms |= zip(indices, torch._foreach_norm([grads[i] for i in indices], 2.0, dtype=wide), strict=True)
    return torch.linalg.vector_norm(torch.stack([norms[i] for i in range(len(grads))]), 2.0)


def reference(grads: list[Tensor], max_norm: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    counted_as, dtype = dtype, result_dtype(grads, dtype)
    if not grads:
        return torch.zeros((), device=max_norm.device), torch.ones((), device=max_norm.device)
    # In torch the norm of all-bf16 gradients is itself rounded to bf16; kept, so that clipping equals torch's.
    norm = torch.nn.utils.get_total_norm(grads, 2.0) if counted_as is None else widened_norm(grads, counted_as)
    # torch evaluates `max_norm / (norm + 1e-6)` as reciprocal() * max_norm with a scalar of at least float32.
    inverse = (norm + 1e-6).reciprocal()
    coefficient = (inverse.to(dtype) * max_norm.to(device=norm.device, dtype=dtype)).to(norm.dtype)
    return norm.to(dtype), torch.clamp(coefficient, max=1.0).to(dtype)


@torch.library.register_fake("ws::clip", lib=LIBRARY)
def _fake(grads: list[Tensor], max_norm: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    device = grads[0].device if grads else max_norm.device
    dtype = result_dtype(grads, dtype)
    return torch.empty((), dtype=dtype, device=device), torch.empty((), dtype=dtype, device=device)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("clip", reference, _device)


def _cases() -> Iterator[tuple[list[Tensor], Tensor, torch.dtype | None]]:
    grads = [torch.randn(3, 5), torch.randn(1), torch.randn(0, 2)]
    for limit in (0.1, 100.0):
        yield grads, torch.tensor(limit, dtype=torch.float64), None
        yield [g.bfloat16() for g in grads], torch.tensor(limit, dtype=torch.float64), torch.float32


record("ws::clip", reference=reference, cases=_cases)
