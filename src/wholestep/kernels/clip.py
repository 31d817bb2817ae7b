"""ws::clip(grads, max_norm) -> (norm, scale): global-norm clipping as two 0-d tensors; nobody scales the gradients
here.

In: the gradients of all parameter groups, max_norm as a 0-d float64 tensor. Out: the total 2-norm and min(1, max_norm /
(norm + 1e-6)), both float32 (float64 when a gradient is float64). Why: the update operators multiply by `scale` while
they read the gradients, which saves a pass over memory. The arithmetic is that of torch.nn.utils.clip_grad_norm_, bit
for bit on CPU, without a host sync.
"""

import torch
from torch import Tensor

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define("clip(Tensor[] grads, Tensor max_norm) -> (Tensor norm, Tensor scale)")


def result_dtype(grads: list[Tensor]) -> torch.dtype:
    """float64 only where a gradient is float64, as in a float64 reference run."""
    return torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32


def reference(grads: list[Tensor], max_norm: Tensor) -> tuple[Tensor, Tensor]:
    dtype = result_dtype(grads)
    if not grads:
        return torch.zeros((), device=max_norm.device), torch.ones((), device=max_norm.device)
    # In torch the norm of all-bf16 gradients is itself rounded to bf16; kept, so that clipping equals torch's.
    norm = torch.nn.utils.get_total_norm(grads, 2.0)
    # torch evaluates `max_norm / (norm + 1e-6)` as reciprocal() * max_norm with a scalar of at least float32.
    inverse = (norm + 1e-6).reciprocal()
    coefficient = (inverse.to(dtype) * max_norm.to(device=norm.device, dtype=dtype)).to(norm.dtype)
    return norm.to(dtype), torch.clamp(coefficient, max=1.0).to(dtype)


@torch.library.register_fake("ws::clip", lib=LIBRARY)
def _fake(grads: list[Tensor], max_norm: Tensor) -> tuple[Tensor, Tensor]:
    device = grads[0].device if grads else max_norm.device
    dtype = result_dtype(grads)
    return torch.empty((), dtype=dtype, device=device), torch.empty((), dtype=dtype, device=device)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("clip", reference, _device)
