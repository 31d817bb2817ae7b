"""The Triton body of ws::sgd: one launch per dtype group over a table of addresses. Import only where Triton exists.

In: the tables of multi_tensor.py, hyper (float64 [lr, momentum, dampening, weight_decay]) and scale in device memory.
Out: params and buffers updated in place, in float32 math (float64 for float64 parameters). Table rows: 0 param, 1 grad,
2 momentum buffer.
"""

# Kernel bodies are Triton's language, whose arguments carry no Python types.
# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl
from torch import Tensor

from wholestep.ops.multi_tensor_triton import launch_update
from wholestep.ops.triton_types import load_pointer


@triton.jit
def _sgd_block(
    param_ptr, grad_ptr, buffer_ptr, offsets, mask, lr, momentum, dampening, weight_decay, scale,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    param = tl.load(param_ptr + offsets, mask=mask).to(MATH)
    grad = tl.load(grad_ptr + offsets, mask=mask).to(MATH) * scale
    if MAXIMIZE:
        grad = -grad
    grad = grad + weight_decay * param
    if MOMENTUM:
        buffer = tl.load(buffer_ptr + offsets, mask=mask).to(MATH) * momentum + grad * (1 - dampening)
        tl.store(buffer_ptr + offsets, buffer.to(buffer_ptr.dtype.element_ty), mask=mask)
        grad = grad + momentum * buffer if NESTEROV else buffer
    param = param - lr * grad
    tl.store(param_ptr + offsets, param.to(param_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tensors"])
def _sgd_kernel(
    table, chunk_tensor, chunk_start, sizes, hyper, scale_ptr, num_tensors,
    PARAM: tl.constexpr, GRAD: tl.constexpr, BUFFER: tl.constexpr, MATH: tl.constexpr, HAS_SCALE: tl.constexpr,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tensor = tl.load(chunk_tensor + program)
    start = tl.load(chunk_start + program)
    size = tl.load(sizes + tensor)
    lr = tl.load(hyper).to(MATH)
    momentum = tl.load(hyper + 1).to(MATH)
    dampening = tl.load(hyper + 2).to(MATH)
    weight_decay = tl.load(hyper + 3).to(MATH)
    scale = tl.load(scale_ptr).to(MATH) if HAS_SCALE else 1.0
    if HAS_SCALE:
        size = tl.where(scale < 0, 0, size)  # left out: every element is masked
    param_ptr = load_pointer(table, 0, tensor, num_tensors, PARAM, ALIGNED)
    grad_ptr = load_pointer(table, 1, tensor, num_tensors, GRAD, ALIGNED)
    buffer_ptr = load_pointer(table, 2, tensor, num_tensors, BUFFER, ALIGNED) if MOMENTUM else param_ptr
    offsets = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
    if start + BLOCK <= size:  # full blocks need no mask, hence wide loads
        _sgd_block(
            param_ptr, grad_ptr, buffer_ptr, offsets, None, lr, momentum, dampening, weight_decay, scale,
            MOMENTUM, NESTEROV, MAXIMIZE, MATH,
        )  # fmt: skip
    else:
        _sgd_block(
            param_ptr, grad_ptr, buffer_ptr, offsets, offsets < size, lr, momentum, dampening, weight_decay, scale,
            MOMENTUM, NESTEROV, MAXIMIZE, MATH,
        )  # fmt: skip


def launch(
    params: list[Tensor],
    grads: list[Tensor],
    states: list[list[Tensor]],
    hyper: Tensor,
    scale: Tensor | None,
    *,
    nesterov: bool,
    maximize: bool,
) -> None:
    """states: [momentum_buffers], or nothing without momentum."""
    flags = dict(MOMENTUM=len(states) == 1, NESTEROV=nesterov, MAXIMIZE=maximize)
    launch_update(_sgd_kernel, params, grads, states, hyper, scale, state_types=("BUFFER",), **flags)
