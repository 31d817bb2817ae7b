"""CUDA's autocast rules on CPU stand-ins, so that a laptop captures the graph a GPU would get.

In: nothing; while the context is open, autocast on the CPU decides as autocast on CUDA does. Autocast's lists differ: CUDA
computes norms, softmax, powers and sums in float32, the CPU in what it is given, and the difference is what a step keeps in
memory. Where the CPU has no rule of its own, CUDA's is registered for the time of the capture; where it has one, both agree.

A CPU-only torch cannot differentiate fake CUDA tensors (it ends the process), which is why the stand-ins are on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from wholestep import compat

_LOW = (torch.bfloat16, torch.float16)

TO_FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "group_norm",
    "cosine_similarity", "dist", "pdist", "renorm", "logsumexp", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d",
)  # fmt: skip
"""Operators whose inputs CUDA's autocast raises to float32."""
RESULT_IN_FLOAT32 = (
    "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum", "sum.dim_IntList",
)  # fmt: skip
"""Operators that CUDA's autocast asks for a float32 result, unless the caller named a type."""
LOWERED = ("mv", "addmv", "einsum", "lstm_cell", "gru_cell")
"""Operators that CUDA's autocast lowers and the CPU's does not."""


@contextlib.contextmanager
def gpu_autocast() -> Iterator[None]:
    """CPU autocast with CUDA's lists."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for names, rule in ((TO_FLOAT32, _raised), (RESULT_IN_FLOAT32, _asked), (LOWERED, _lowered)):
            for name in names:
                if compat.lacks_cpu_autocast(name):
                    library.impl(name, rule(_operator(name)), "AutocastCPU")
        yield


def _operator(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _raised(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with compat.below_cpu_autocast():
            return operator(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))

    return kernel


def _asked(operator: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        named = dict(zip(names, args)) | kwargs
        if args[0].dtype in _LOW and named.get("dtype") is None:
            args, kwargs = (), named | {"dtype": torch.float32}
        with compat.below_cpu_autocast():
            return operator(*args, **kwargs)

    return kernel


def _lowered(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        with compat.below_cpu_autocast():
            return operator(*_cast(args, dtype), **_cast(kwargs, dtype))

    return kernel


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def one(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if floating else value

    return tree_map(one, values)
