"""ws::recurrent: one layer of an LSTM, GRU or plain RNN over all its time steps, by cuDNN.

Legend: T time steps, B rows, I inputs, H width, W ways (2 when the layer is read in both directions, else 1). x (T, B, I),
h and c (W, B, H), c only for an LSTM; weights as nn.LSTM has them, per way: (G H, I), (G H, H), and two biases (G H) or none,
with G gates. Out: the states of all steps (T, B, W H), the last h and c, and what cuDNN keeps for the backward: its `reserve`
and the weights in one piece (`packed`).

Why an operator: torch's tracing unrolls these layers over time, so that 64 frames of Deep Speech 2 become some ten thousand
operations that take minutes to compile and lose cuDNN's persistent kernels. Dropout between layers is not part of it (capture
puts keyed dropout between two calls), nor are packed sequences and projections, which stay unrolled. CUDA only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wholestep.ops.amounts import Amount
from wholestep.ops.call import Call
from wholestep.ops.record import record

KINDS = ("rnn_relu", "rnn_tanh", "lstm", "gru")
"""In cuDNN's order: the place is its number there."""
_RESERVED = {"rnn_relu": 2, "rnn_tanh": 2, "lstm": 6, "gru": 5}
"""Values of width H that a step leaves for the backward: gates and states. An estimate, for predictions of memory."""
MOST_WEIGHTS = 8

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define(
    "recurrent(Tensor x, Tensor h, Tensor? c, Tensor[] weights, str kind, bool both) -> "
    "(Tensor out, Tensor last_h, Tensor last_c, Tensor reserve, Tensor packed)"
)
LIBRARY.define(
    "recurrent_backward(Tensor? grad_out, Tensor? grad_h, Tensor? grad_c, Tensor x, Tensor h, Tensor? c, Tensor[] weights, "
    "Tensor out, Tensor reserve, Tensor packed, str kind, bool both) -> (Tensor dx, Tensor dh, Tensor dc, "
    + ", ".join(f"Tensor dweight{i}" for i in range(MOST_WEIGHTS))
    + ")"
)


def applies(x: Tensor, states: Sequence[Tensor], *, train: bool) -> bool:
    """Whether cuDNN takes the layer: its backward needs the training mode, and projections make h narrower than c."""
    narrow = len(states) == 2 and states[0].shape[-1] != states[1].shape[-1]
    return train and not narrow and x.dim() == 3 and torch.backends.cudnn.enabled


def layer(kind: str, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], both: bool) -> tuple[Tensor, ...]:
    """(states of all steps, last h[, last c]) of one layer; x is (T, B, I)."""
    h, c = states[0], states[1] if kind == "lstm" else None
    out, last_h, last_c, _, _ = torch.ops.ws.recurrent(x, h, c, list(weights), kind, both)
    return (out, last_h, last_c) if kind == "lstm" else (out, last_h)


def _settings(h: Tensor, kind: str, both: bool, sizes: Sequence[int]) -> tuple[Any, ...]:
    """From `mode` on: width, projection, layers, batch_first, dropout, train, both, sizes of packed batches, dropout's state."""
    return KINDS.index(kind), h.shape[2], 0, 1, False, 0.0, True, both, list(sizes), None


def _per_way(weights: Sequence[Tensor], both: bool) -> int:
    return len(weights) // (2 if both else 1)


def recurrent(
    x: Tensor, h: Tensor, c: Tensor | None, weights: list[Tensor], kind: str, both: bool, sizes: Sequence[int] = ()
) -> tuple[Tensor, ...]:
    """By cuDNN; the weights are copied into one piece, as it wants them. With `sizes`, x is packed (packed_recurrent.py)."""
    x, h, c = _dense(x, h, c)
    out, last_h, last_c, reserve, packed = torch.ops.aten._cudnn_rnn.default(
        x, weights, _per_way(weights, both), None, h, c, *_settings(h, kind, both, sizes)
    )
    return out, last_h, last_c if kind == "lstm" else x.new_empty(0), reserve, packed


def recurrent_backward(
    grad_out: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None, x: Tensor, h: Tensor, c: Tensor | None,
    weights: list[Tensor], out: Tensor, reserve: Tensor, packed: Tensor, kind: str, both: bool, sizes: Sequence[int] = (),
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of x, h, c and the weights; those that are not there are empty."""
    x, h, c, grad_out, grad_h, grad_c = _dense(x, h, c, grad_out, grad_h, grad_c if kind == "lstm" else None)
    # cuDNN writes into `reserve`, which nobody reads after this
    dx, dh, dc, dweights = torch.ops.aten._cudnn_rnn_backward.default(
        x, weights, _per_way(weights, both), packed, h, c, out, grad_out, grad_h, grad_c,
        *_settings(h, kind, both, sizes), reserve, [True, True, kind == "lstm", True],
    )  # fmt: skip
    # they lie in one piece, where not each begins at an address that vectorised code may assume
    return dx, dh, dc if kind == "lstm" else x.new_empty(0), *_filled([d.clone() for d in dweights], x)


def _dense(*tensors: Any) -> list[Any]:
    """As the results are: whoever calls may hand over other layouts (Inductor chooses its own)."""
    return [None if t is None else t.contiguous() for t in tensors]


def _filled(found: list[Tensor], like: Tensor) -> list[Tensor]:
    return [*found, *(like.new_empty(0) for _ in range(MOST_WEIGHTS - len(found)))]


LIBRARY.impl("recurrent", recurrent, "CUDA")
LIBRARY.impl("recurrent_backward", recurrent_backward, "CUDA")


# ---- without data, and derivatives ---------------------------------------------------------------------------


@torch.library.register_fake("ws::recurrent", lib=LIBRARY)
def _fake(x: Tensor, h: Tensor, c: Tensor | None, weights: list[Tensor], kind: str, both: bool) -> tuple[Tensor, ...]:
    steps, rows = x.shape[:2]
    ways, width = h.shape[0], h.shape[2]
    reserve = steps * rows * ways * width * _RESERVED[kind] * x.element_size()
    last = h.new_empty(h.shape)
    return (
        x.new_empty(steps, rows, ways * width), last, torch.empty_like(last) if kind == "lstm" else x.new_empty(0),
        x.new_empty(reserve, dtype=torch.uint8), x.new_empty(sum(math.prod(w.shape) for w in weights)),
    )  # fmt: skip


@torch.library.register_fake("ws::recurrent_backward", lib=LIBRARY)
def _backward_fake(
    grad_out: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None, x: Tensor, h: Tensor, c: Tensor | None,
    weights: list[Tensor], out: Tensor, reserve: Tensor, packed: Tensor, kind: str, both: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    dx, dh, *dweights = (t.new_empty(t.shape) for t in (x, h, *weights))
    return dx, dh, h.new_empty(h.shape) if c is not None else x.new_empty(0), *_filled(dweights, x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, h, c, weights, ctx.kind, ctx.both = inputs
    out, _, last_c, reserve, packed = output
    ctx.save_for_backward(x, h, c, out, reserve, packed, *weights)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(reserve, packed, *([] if ctx.kind == "lstm" else [last_c]))


def _autograd(
    ctx: Any, grad_out: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    x, h, c, out, reserve, packed, *weights = ctx.saved_tensors
    dx, dh, dc, *dweights = torch.ops.ws.recurrent_backward(
        grad_out, grad_h, grad_c, x, h, c, list(weights), out, reserve, packed, ctx.kind, ctx.both
    )
    return dx, dh, dc if c is not None else None, dweights[: len(weights)], None, None


def _no_second_derivative(ctx: Any, *_: Any) -> tuple[Any, ...]:
    raise NotImplementedError(
        "cuDNN's recurrent layers have no second derivative (a gradient penalty through an LSTM, GRU or RNN). "
        "Use torch.backends.cudnn.flags(enabled=False) around the forward, which unrolls the layer."
    )


torch.library.register_autograd("ws::recurrent", _autograd, setup_context=_setup_context, lib=LIBRARY)
torch.library.register_autograd("ws::recurrent_backward", _no_second_derivative, lib=LIBRARY)


# ---- what is known of them -------------------------------------------------------------------------------------


def products(call: Call) -> Amount:
    """The products of all time steps; gates are left out, as torch does. Every way: 2 T B G H (I + H), backward twice that."""
    *rows, _ = call.shape("x")
    return 2 * math.prod(rows) * sum(w.shape[0] * w.shape[1] for w in call.tensors("weights") if w.dim() == 2)


# sizes of what cuDNN keeps are known only to it, and a compiler would check them against the guess
record("ws::recurrent", kind="matmul", flops=products, compiled=False, unordered=frozenset({"cuda"}))
record(
    "ws::recurrent_backward",
    kind="matmul",
    flops=lambda call: 2 * products(call),
    compiled=False,
    unordered=frozenset({"cuda"}),
)
