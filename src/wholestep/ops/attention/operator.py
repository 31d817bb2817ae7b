"""Registration of ws::attention and ws::attention_backward.

In: q (B, H, T, D), k and v (B, G, S, D), mask, causal, scale, dropout_p, key. Out: (out in q's layout, logsumexp (B, H,
T) contiguous in float32 or float64, seed, offset: 0-d int64). seed and offset carry the Philox state that a CUDA kernel
drew from torch's generator to the backward; they are 0 on CPU and undefined on CUDA without dropout. The math
implementation drops by `key` instead. `implementation` names the one to take; without it choice.py finds one.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from wholestep.ops.aten import attention as costs
from wholestep.ops.attention import decomposition, reference
from wholestep.ops.attention.choice import choose
from wholestep.ops.attention.interface import Asked, asked_and_kept
from wholestep.ops.attention.reference import empty_out
from wholestep.ops.call import Call
from wholestep.ops.record import Precision, record
from wholestep.ops.wide import wide_dtype

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale, float dropout_p, Tensor? key, "
    "*, str implementation='') -> (Tensor out, Tensor logsumexp, Tensor seed, Tensor offset)"
)
LIBRARY.define(
    "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor logsumexp, "
    "Tensor seed, Tensor offset, bool causal, float scale, float dropout_p, Tensor? key, *, str implementation='') "
    "-> (Tensor dq, Tensor dk, Tensor dv)"
)


def check(asked: Asked) -> None:
    """Refuse what no implementation could mean, with the values."""
    q, k, v = asked[:3]
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"ws::attention takes (batch, heads, length, width) tensors; got {shapes}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"ws::attention: batch, key length, key heads and width must agree; got {shapes}")
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"ws::attention: query heads must be a multiple of key heads; got {shapes}")
    if asked.dropout_p > 0.0 and asked.key is None:
        raise ValueError("ws::attention: dropout_p > 0 needs a key (a 0-d int64 tensor)")


def in_layout(t: Tensor, model: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """`t`, a fresh dense result, with exactly the strides of make(); copied only when its memory order differs.

    A dense result with the strides of `model` needs no make(): an allocation there would raise the peak for nothing.
    """
    if t.stride() == model.stride() and t.shape == model.shape:
        return t
    like = make()
    if all(s == w for s, w, n in zip(t.stride(), like.stride(), t.shape, strict=True) if n != 1):
        return t.as_strided(like.shape, like.stride())
    return like.copy_(t)


def attention(*arguments: Any, implementation: str = "") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the chosen implementation and give its results the announced strides."""
    asked = Asked(*arguments)
    check(asked)
    out, logsumexp, seed, offset = choose(asked, implementation).forward(asked)
    if seed is None or offset is None:
        # Without dropout nobody reads them: on CUDA leave them unwritten and save two launches.
        make = torch.empty if asked.q.is_cuda else torch.zeros
        seed, offset = (make((), dtype=torch.int64, device=asked.q.device) for _ in range(2))
    return in_layout(out, asked.q, lambda: empty_out(asked.q, asked.v)), logsumexp.contiguous(), seed, offset


def attention_backward(grad_out: Tensor, *arguments: Any, implementation: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """The backward of the same implementation: `choose` reads nothing that differs between the two calls."""
    asked, kept = asked_and_kept(arguments)
    grads = choose(asked, implementation).backward(grad_out, asked, kept)
    dq, dk, dv = (
        in_layout(g, t, functools.partial(torch.empty_like, t)) for g, t in zip(grads, asked[:3], strict=True)
    )
    return dq, dk, dv


@torch.library.register_fake("ws::attention", lib=LIBRARY)
def _fake(*arguments: Any, implementation: str = "") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    asked = Asked(*arguments)
    check(asked)
    q = asked.q
    logsumexp = torch.empty(q.shape[:3], dtype=wide_dtype(q.dtype), device=q.device)
    seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    return empty_out(q, asked.v), logsumexp, seed, offset


@torch.library.register_fake("ws::attention_backward", lib=LIBRARY)
def _backward_fake(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object, implementation: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple, keyword_only_inputs: dict, output: tuple
) -> None:
    q, k, v, mask, causal, scale, dropout_p, key = inputs
    if mask is not None and mask.requires_grad:
        raise NotImplementedError(
            "ws::attention gives no gradient to its mask. "
            "Use wholestep.ops.attention.scaled_dot_product_attention, which "
            "composes the softmax from differentiable operators when the mask requires one."
        )
    out, logsumexp, seed, offset = output
    ctx.mark_non_differentiable(logsumexp, seed, offset)
    ctx.save_for_backward(q, k, v, mask, out, logsumexp, seed, offset, key)
    ctx.arguments, ctx.implementation = (causal, scale, dropout_p), keyword_only_inputs.get("implementation", "")


def _autograd(
    ctx: torch.autograd.function.FunctionCtx, grad_out: Tensor | None, *_: object
) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 8
    q, k, v, mask, out, logsumexp, seed, offset, key = ctx.saved_tensors
    dq, dk, dv = torch.ops.ws.attention_backward(
        grad_out, q, k, v, mask, out, logsumexp, seed, offset, *ctx.arguments, key, implementation=ctx.implementation
    )
    return dq, dk, dv, None, None, None, None, None


def _no_second_derivative(ctx: torch.autograd.function.FunctionCtx, *_: object) -> tuple[Tensor | None, ...]:
    raise NotImplementedError(
        "The second derivative of ws::attention is not implemented (a gradient penalty or Hessian through attention). "
        "Write that attention with plain operators: softmax(q @ k.mT * scale, -1) @ v."
    )


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("attention", attention, _device)
    LIBRARY.impl("attention_backward", attention_backward, _device)
torch.library.register_autograd("ws::attention", _autograd, setup_context=_setup_context, lib=LIBRARY)
torch.library.register_autograd("ws::attention_backward", _no_second_derivative, lib=LIBRARY)


def _gradient_in_float32(call: Call) -> int:
    """The gradient of narrow queries is summed in float32."""
    queries = call.tensor("q")
    return 4 * queries.numel() if queries.dtype in (torch.bfloat16, torch.float16) else 0


def _plain(*asked: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    nothing = torch.zeros((), dtype=torch.int64)
    return *reference.forward(*asked), nothing, nothing


def _plain_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return reference.backward(*arguments[:7], *arguments[9:])  # it draws by key: no seed and offset


def _cases() -> Iterator[tuple[Any, ...]]:
    for heads, groups, queries, keys in ((2, 2, 5, 5), (4, 2, 3, 7), (1, 1, 1, 1)):
        q, (k, v) = torch.randn(2, heads, queries, 8), torch.randn(2, 2, groups, keys, 8).unbind()
        mask = torch.rand(2, 1, queries, keys) < 0.5
        mask[..., 0] = True
        yield q, k, v, None, False, 0.3, 0.0, None
        yield q, k, v, None, True, 0.3, 0.0, None
        turned = torch.randn(8, heads, queries, 2).transpose(0, 3)  # as models of pictures have it: width is not dense
        yield turned, k, v, None, False, 0.3, 0.0, None
        yield q.double(), k.double(), v.double(), mask, False, 0.3, 0.0, None
        hidden = mask.clone()
        hidden[0, :, 0] = False  # a row that sees no key: what kernels of torch note of it is theirs
        yield q, k, v, hidden, False, 0.3, 0.25, torch.tensor(99)
    for batch, length in ((0, 3), (2, 0)):
        yield *(torch.randn(batch, heads, length, 8) for heads in (4, 2, 2)), None, False, 0.3, 0.0, None


def _backward_cases() -> Iterator[tuple[Any, ...]]:
    for q, k, v, mask, *rest in _cases():
        out, logsumexp, seed, offset = torch.ops.ws.attention(q, k, v, mask, *rest)
        yield torch.randn_like(out), q, k, v, mask, out, logsumexp, seed, offset, *rest


record(
    "ws::attention",
    reference=_plain,
    cases=_cases,
    tolerance=1e-5,
    kind="attention",
    flops=costs.attention,
    precision=Precision("attention", "low", 4),  # q, k, v and mask
    draws=costs.drops,  # on a GPU dropout draws from torch's own generator
    decomposition=decomposition.attention,
)
record(
    "ws::attention_backward",
    reference=_plain_backward,
    cases=_backward_cases,
    tolerance=1e-5,
    kind="attention",
    flops=costs.attention_backward,
    precision=Precision("attention", "low", 6),  # not the logsumexp behind them, float32 by definition
    scratch=_gradient_in_float32,
    decomposition=decomposition.attention_backward,
    unordered=frozenset({"cuda"}),
)
