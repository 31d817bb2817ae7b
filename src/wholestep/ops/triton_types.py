"""What the Triton update kernels share: torch dtypes as Triton dtypes, and typed pointers from a table of addresses.

Import only where Triton exists.
"""

# Kernel bodies are Triton's language, whose arguments carry no Python types.
# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl

TRITON_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """The Triton dtype, or an error that names the dtype."""
    if dtype not in TRITON_DTYPES:
        raise TypeError(f"the Triton update kernels take float16, bfloat16, float32 and float64 tensors; got {dtype}")
    return TRITON_DTYPES[dtype]


@triton.jit
def load_pointer(table, row, tensor, num_tensors, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + row * num_tensors + tensor).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        # Without this hint an address read from memory is loaded element by element.
        pointer = tl.multiple_of(pointer, 16)
    return pointer
