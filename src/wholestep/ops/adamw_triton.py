"""The Triton body of ws::adamw: one launch per dtype group over a table of addresses. Import only where Triton exists.

In: the tables of multi_tensor.py, hyper (float64 [step, lr, beta1, beta2, eps, weight_decay]) and scale in device
memory. Out: params and states updated in place. Bias corrections are computed in float64 by every program (a few
instructions), the rest in float32, or in float64 for float64 parameters. Table rows: 0 param, 1 grad, 2 exp_avg, 3
exp_avg_sq, 4 max_exp_avg_sq (amsgrad).
"""

# Kernel bodies are Triton's language, whose arguments carry no Python types.
# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl
from torch import Tensor

from wholestep.ops.multi_tensor_triton import launch_update
from wholestep.ops.triton_types import load_pointer


@triton.jit
def _adamw_block(
    param_ptr, grad_ptr, m_ptr, v_ptr, vmax_ptr, offsets, mask, take1, keep2, take2, eps, decay, step_size, root2,
    scale, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    param = tl.load(param_ptr + offsets, mask=mask).to(MATH)
    grad = tl.load(grad_ptr + offsets, mask=mask).to(MATH) * scale
    m = tl.load(m_ptr + offsets, mask=mask).to(MATH)
    v = tl.load(v_ptr + offsets, mask=mask).to(MATH)
    if MAXIMIZE:
        grad = -grad
    if DECOUPLED:
        param = param * decay
    else:
        grad = grad + decay * param
    m = m + (grad - m) * take1
    v = v * keep2 + grad * grad * take2
    tl.store(m_ptr + offsets, m.to(m_ptr.dtype.element_ty), mask=mask)
    tl.store(v_ptr + offsets, v.to(v_ptr.dtype.element_ty), mask=mask)
    if AMSGRAD:
        v = tl.maximum(v, tl.load(vmax_ptr + offsets, mask=mask).to(MATH))
        tl.store(vmax_ptr + offsets, v.to(vmax_ptr.dtype.element_ty), mask=mask)
    param = param - step_size * (m / (tl.sqrt(v) / root2 + eps))
    tl.store(param_ptr + offsets, param.to(param_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tensors"])
def _adamw_kernel(
    table, chunk_tensor, chunk_start, sizes, hyper, scale_ptr, num_tensors, PARAM: tl.constexpr, GRAD: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, LARGEST: tl.constexpr, MATH: tl.constexpr, HAS_SCALE: tl.constexpr,
    AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tensor = tl.load(chunk_tensor + program)
    start = tl.load(chunk_start + program)
    size = tl.load(sizes + tensor)
    step = tl.load(hyper)
    lr = tl.load(hyper + 1)
    beta1 = tl.load(hyper + 2)
    beta2 = tl.load(hyper + 3)
    step_size = (lr / (1 - tl.exp(step * tl.log(beta1)))).to(MATH)
    root2 = tl.sqrt(1 - tl.exp(step * tl.log(beta2))).to(MATH)
    eps = tl.load(hyper + 4).to(MATH)
    weight_decay = tl.load(hyper + 5)
    scale = tl.load(scale_ptr).to(MATH) if HAS_SCALE else 1.0
    if HAS_SCALE:
        size = tl.where(scale < 0, 0, size)  # left out: every element is masked

    param_ptr = load_pointer(table, 0, tensor, num_tensors, PARAM, ALIGNED)
    grad_ptr = load_pointer(table, 1, tensor, num_tensors, GRAD, ALIGNED)
    m_ptr = load_pointer(table, 2, tensor, num_tensors, FIRST, ALIGNED)
    v_ptr = load_pointer(table, 3, tensor, num_tensors, SECOND, ALIGNED)
    vmax_ptr = load_pointer(table, 4, tensor, num_tensors, LARGEST, ALIGNED) if AMSGRAD else v_ptr
    offsets = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
    # 1 - beta2 in float32 would be off by 5e-5 of itself: differences are taken in float64 first
    take1, keep2, take2 = (1 - beta1).to(MATH), beta2.to(MATH), (1 - beta2).to(MATH)
    decay = (1 - lr * weight_decay).to(MATH) if DECOUPLED else weight_decay.to(MATH)
    if start + BLOCK <= size:  # full blocks need no mask, hence wide loads
        _adamw_block(
            param_ptr, grad_ptr, m_ptr, v_ptr, vmax_ptr, offsets, None, take1, keep2, take2, eps, decay, step_size,
            root2, scale, AMSGRAD, MAXIMIZE, DECOUPLED, MATH,
        )  # fmt: skip
    else:
        _adamw_block(
            param_ptr, grad_ptr, m_ptr, v_ptr, vmax_ptr, offsets, offsets < size, take1, keep2, take2, eps, decay,
            step_size, root2, scale, AMSGRAD, MAXIMIZE, DECOUPLED, MATH,
        )  # fmt: skip


def launch(
    params: list[Tensor],
    grads: list[Tensor],
    states: list[list[Tensor]],
    hyper: Tensor,
    scale: Tensor | None,
    *,
    maximize: bool,
    decoupled: bool,
) -> None:
    """states: [exp_avgs, exp_avg_sqs], and max_exp_avg_sqs as a third list for amsgrad."""
    flags = dict(AMSGRAD=len(states) == 3, MAXIMIZE=maximize, DECOUPLED=decoupled)
    launch_update(
        _adamw_kernel, params, grads, states, hyper, scale, state_types=("FIRST", "SECOND", "LARGEST"), **flags
    )
