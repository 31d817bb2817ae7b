"""total += left.T @ right, in the precision of `total`, where the factors may be bf16 or fp16 and `total` float32.

Why: a weight's gradient that is summed over chunks must not be rounded to bf16 at every chunk. cuBLAS adds in float32 by itself
(`addmm` with out_dtype, torch 2.10 or later); where torch does not offer that, the product comes in float32 a slice of rows at
a time, and on the CPU in the factors' dtype.
"""

import torch
from torch import Tensor

aten = torch.ops.aten
SLICE_BYTES = 64 * 2**20
"""Of a product that is made before it is added: small beside the total."""
_UNSUPPORTED = (RuntimeError, TypeError, AttributeError, NotImplementedError)
_WORKS: dict[str, bool] = {}
"""Which of the forms this torch and device have, found out at the first call; a refused form launches nothing."""


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total (V, H) += left (R, V).T @ right (R, H)."""
    if total.dtype == left.dtype:
        total.addmm_(left.t(), right)
    elif not (total.is_cuda and _added_by_cublas(total, left, right)):
        _add_slices(total, left, right)


def _added_by_cublas(total: Tensor, left: Tensor, right: Tensor) -> bool:
    if _WORKS.get("addmm", True):
        try:
            aten.addmm.dtype_out(total, left.t(), right, total.dtype, out=total)
            _WORKS["addmm"] = True
        except torch.OutOfMemoryError:
            raise
        except _UNSUPPORTED:
            if _WORKS.get("addmm"):
                raise  # it has worked before: a failure of another kind
            _WORKS["addmm"] = False
    return _WORKS["addmm"]


def _add_slices(total: Tensor, left: Tensor, right: Tensor) -> None:
    step = max(SLICE_BYTES // max(4 * right.shape[1], 1), 1)
    for start in range(0, total.shape[0], step):
        part = slice(start, start + step)
        total[part] += _product(left[:, part].t(), right, total.dtype)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    if left.is_cuda and _WORKS.get("mm", True):
        try:
            made = torch.mm(left, right, out_dtype=dtype)
            _WORKS["mm"] = True
            return made
        except torch.OutOfMemoryError:
            raise
        except _UNSUPPORTED:
            if _WORKS.get("mm"):
                raise
            _WORKS["mm"] = False
    return torch.mm(left, right)
