"""ws::packed_recurrent: one layer of an LSTM, GRU or plain RNN over sequences of different lengths, packed one behind the other.

Legend: B sequences, the longest first; `sizes` (T,) on the CPU: how many of them reach step t, perhaps 0 at the end; R rows, the
sum of `sizes`; x (R, I), the rows of step 0, then those of step 1, ...; h and c (W, B, H) with W ways (2 when the layer is
read in both directions, else 1), c only for an LSTM; weights as nn.LSTM has them, per way: (G H, I), (G H, H), and two biases
(G H) or none, with G gates. Out: the states (R, W H), the last h and c of every sequence, and what the backward needs.

Why an operator: T and R are data, so tracing cannot take the layer apart over time; one graph serves all lengths. On a GPU it
is cuDNN's own packed mode. On the CPU the steps run here; the backward collects the gradients of all gates and then makes
each weight's gradient in one product, where autograd adds up one per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from wholestep.ops import recurrent
from wholestep.ops.record import record

GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
MOST_WEIGHTS = recurrent.MOST_WEIGHTS

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define(
    "packed_recurrent(Tensor x, Tensor sizes, Tensor h, Tensor? c, Tensor[] weights, str kind, bool both) -> "
    "(Tensor out, Tensor last_h, Tensor last_c, Tensor kept, Tensor packed)"
)
LIBRARY.define(
    "packed_recurrent_backward(Tensor? grad_out, Tensor? grad_h, Tensor? grad_c, Tensor x, Tensor sizes, Tensor h, Tensor? c, "
    "Tensor[] weights, Tensor out, Tensor kept, Tensor packed, str kind, bool both) -> (Tensor dx, Tensor dh, Tensor dc, "
    + ", ".join(f"Tensor dweight{i}" for i in range(MOST_WEIGHTS))
    + ")"
)


def reference(
    x: Tensor, sizes: Tensor, h: Tensor, c: Tensor | None, weights: Sequence[Tensor], kind: str, both: bool
) -> tuple[Tensor, ...]:
    """The specification: (states, last h[, last c]) by torch's own layer."""
    function: Callable[..., Any] = getattr(torch, kind)
    states = h if c is None else (h, c)
    length = int((sizes > 0).sum())
    return function(x, sizes[:length], states, list(weights), len(weights) > (4 if both else 2), 1, 0.0, True, both)


# ---- one way, on the CPU ---------------------------------------------------------------------------------------


def _steps(sizes: Tensor, backwards: bool) -> list[tuple[int, int]]:
    """(first row, rows) of every step, in the order in which they are taken."""
    found, first = [], 0
    for size in sizes.tolist():
        found.append((first, size))
        first += size
    found = [step for step in found if step[1]]
    return found[::-1] if backwards else found


def _previous(steps: list[tuple[int, int]], states: Tensor, before: Tensor) -> Tensor:
    """For every row the state of its sequence one step earlier, in the order of the rows; at first `before`."""
    out = torch.empty_like(states)
    last: tuple[int, int] = (0, 0)
    for first, rows in steps:
        known = min(rows, last[1])
        out[first : first + known] = states[last[0] : last[0] + known]
        out[first + known : first + rows] = before[known:rows]
        last = (first, rows)
    return out


def _forward(
    x: Tensor, steps: list[tuple[int, int]], h: Tensor, c: Tensor | None, weights: Sequence[Tensor], kind: str
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(states, last h, last c, gates and what else the backward needs, side by side)"""
    w_input, w_hidden, *biases = weights
    from_input = torch.nn.functional.linear(x, w_input, biases[0] if biases else None)
    b_hidden = biases[1] if biases else None
    width = h.shape[1]
    out = x.new_empty(x.shape[0], width)
    kept = x.new_empty(x.shape[0], _kept_width(kind, width))
    h, c = h.clone(), None if c is None else c.clone()
    for first, rows in steps:
        part = slice(first, first + rows)
        given = torch.nn.functional.linear(h[:rows], w_hidden, b_hidden)
        if kind == "lstm":
            assert c is not None
            gates = (from_input[part] + given).view(rows, 4, width)
            i, f, o = gates[:, 0].sigmoid(), gates[:, 1].sigmoid(), gates[:, 3].sigmoid()
            g = gates[:, 2].tanh()
            c[:rows] = f * c[:rows] + i * g
            new = o * c[:rows].tanh()
            kept[part] = torch.cat([i, f, g, o, c[:rows]], dim=1)
        elif kind == "gru":
            ours, theirs = from_input[part].view(rows, 3, width), given.view(rows, 3, width)
            r, z = (ours[:, 0] + theirs[:, 0]).sigmoid(), (ours[:, 1] + theirs[:, 1]).sigmoid()
            n = (ours[:, 2] + r * theirs[:, 2]).tanh()
            new = (h[:rows] - n) * z + n
            kept[part] = torch.cat([r, z, n, theirs[:, 2]], dim=1)
        else:
            new = from_input[part] + given
            new = new.tanh() if kind == "rnn_tanh" else new.relu()
        h[:rows] = new
        out[part] = new
    return out, h, c, kept


def _kept_width(kind: str, width: int) -> int:
    return {"lstm": 5, "gru": 4}.get(kind, 0) * width


def _backward(
    grad_out: Tensor, grad_h: Tensor, grad_c: Tensor | None, x: Tensor, steps: list[tuple[int, int]], h: Tensor, c: Tensor | None,
    weights: Sequence[Tensor], out: Tensor, kept: Tensor, kind: str,
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:  # fmt: skip
    """Gradients of x, h, c and the weights."""
    w_input, w_hidden, *biases = weights
    width = h.shape[1]
    before = _previous(steps, out, h)
    cells = _previous(steps, kept[:, 4 * width :], c) if c is not None else None
    at_input = x.new_empty(x.shape[0], GATES[kind] * width)
    at_hidden = torch.empty_like(at_input) if kind == "gru" else at_input
    dh, dc = grad_h.clone(), None if grad_c is None else grad_c.clone()
    for first, rows in reversed(steps):
        part = slice(first, first + rows)
        d = dh[:rows] + grad_out[part]
        passed: Tensor | None = None
        if kind == "lstm":
            assert dc is not None and cells is not None
            i, f, g, o, cell = kept[part].view(rows, 5, width).unbind(1)
            squashed = cell.tanh()
            at_cell = dc[:rows] + d * o * (1 - squashed * squashed)
            gates = (at_cell * g * i * (1 - i), at_cell * cells[part] * f * (1 - f), at_cell * i * (1 - g * g),
                     d * squashed * o * (1 - o))  # fmt: skip
            dc[:rows] = at_cell * f
            at_input[part] = torch.cat(gates, dim=1)
        elif kind == "gru":
            r, z, n, inner = kept[part].view(rows, 4, width).unbind(1)
            at_n = d * (1 - z) * (1 - n * n)
            at_r, at_z = at_n * inner * r * (1 - r), d * (before[part] - n) * z * (1 - z)
            at_input[part] = torch.cat([at_r, at_z, at_n], dim=1)
            at_hidden[part] = torch.cat([at_r, at_z, at_n * r], dim=1)
            passed = d * z
        else:
            new = out[part]
            at_input[part] = d * (1 - new * new) if kind == "rnn_tanh" else d * (new > 0)
        dh[:rows] = at_hidden[part] @ w_hidden
        if passed is not None:
            dh[:rows] += passed
    found = [at_input.t() @ x, at_hidden.t() @ before]
    if biases:
        found += [at_input.sum(0), at_hidden.sum(0)]
    return at_input @ w_input, dh, dc, found


# ---- the operators ---------------------------------------------------------------------------------------------


def _ways(weights: Sequence[Tensor], both: bool) -> list[Sequence[Tensor]]:
    count = len(weights) // (2 if both else 1)
    return [weights[start : start + count] for start in range(0, len(weights), count)]


def packed_recurrent(
    x: Tensor, sizes: Tensor, h: Tensor, c: Tensor | None, weights: list[Tensor], kind: str, both: bool
) -> tuple[Tensor, ...]:
    if x.is_cuda:
        length = int((sizes > 0).sum())
        return recurrent.recurrent(x, h, c, weights, kind, both, sizes[:length].tolist())
    found = [
        _forward(x, _steps(sizes, way == 1), h[way], None if c is None else c[way], mine, kind)
        for way, mine in enumerate(_ways(weights, both))
    ]
    out, kept = (torch.cat([way[i] for way in found], dim=1) for i in (0, 3))  # type: ignore[misc]
    last_h = torch.stack([way[1] for way in found])
    last_c = torch.stack([way[2] for way in found]) if c is not None else x.new_empty(0)  # type: ignore[misc]
    return out, last_h, last_c, kept, x.new_empty(0)


def packed_recurrent_backward(
    grad_out: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None, x: Tensor, sizes: Tensor, h: Tensor, c: Tensor | None,
    weights: list[Tensor], out: Tensor, kept: Tensor, packed: Tensor, kind: str, both: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of x, h, c and the weights; those that are not there are empty."""
    if x.is_cuda:
        length = int((sizes > 0).sum())
        return recurrent.recurrent_backward(
            grad_out, grad_h, grad_c, x, h, c, weights, out, kept, packed, kind, both, sizes[:length].tolist()
        )
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grad_h = torch.zeros_like(h) if grad_h is None else grad_h
    if c is not None:
        grad_c = torch.zeros_like(c) if grad_c is None else grad_c
    ways = _ways(weights, both)
    width, wide = h.shape[2], kept.shape[1] // len(ways)
    found = [
        _backward(
            grad_out[:, way * width : (way + 1) * width], grad_h[way], None if c is None else grad_c[way],  # type: ignore[index]
            x, _steps(sizes, way == 1), h[way], None if c is None else c[way], mine,
            out[:, way * width : (way + 1) * width], kept[:, way * wide : (way + 1) * wide], kind,
        )
        for way, mine in enumerate(ways)
    ]  # fmt: skip
    dx = found[0][0] if len(found) == 1 else found[0][0] + found[1][0]
    dc = torch.stack([way[2] for way in found]) if c is not None else x.new_empty(0)  # type: ignore[misc]
    dweights = [weight for way in found for weight in way[3]]
    return dx, torch.stack([way[1] for way in found]), dc, *recurrent._filled(dweights, x)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("packed_recurrent", packed_recurrent, _device)
    LIBRARY.impl("packed_recurrent_backward", packed_recurrent_backward, _device)


@torch.library.register_fake("ws::packed_recurrent", lib=LIBRARY)
def _fake(
    x: Tensor, sizes: Tensor, h: Tensor, c: Tensor | None, weights: list[Tensor], kind: str, both: bool
) -> tuple[Tensor, ...]:
    rows, (ways, _, width) = x.shape[0], h.shape
    last = h.new_empty(h.shape)
    if x.is_cuda:  # what cuDNN keeps: an estimate
        kept = x.new_empty(rows * ways * width * recurrent._RESERVED[kind] * x.element_size(), dtype=torch.uint8)
        packed = x.new_empty(sum(w.numel() for w in weights))
    else:
        kept, packed = x.new_empty(rows, ways * _kept_width(kind, width)), x.new_empty(0)
    return (
        x.new_empty(rows, ways * width),
        last,
        torch.empty_like(last) if c is not None else x.new_empty(0),
        kept,
        packed,
    )


@torch.library.register_fake("ws::packed_recurrent_backward", lib=LIBRARY)
def _backward_fake(
    grad_out: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None, x: Tensor, sizes: Tensor, h: Tensor, c: Tensor | None,
    weights: list[Tensor], out: Tensor, kept: Tensor, packed: Tensor, kind: str, both: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    dx, dh, *dweights = (t.new_empty(t.shape) for t in (x, h, *weights))
    return dx, dh, h.new_empty(h.shape) if c is not None else x.new_empty(0), *recurrent._filled(dweights, x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, sizes, h, c, weights, ctx.kind, ctx.both = inputs
    out, _, last_c, kept, packed = output
    ctx.save_for_backward(x, sizes, h, c, out, kept, packed, *weights)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(kept, packed, *([] if c is not None else [last_c]))


def _autograd(
    ctx: Any, grad_out: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    x, sizes, h, c, out, kept, packed, *weights = ctx.saved_tensors
    dx, dh, dc, *dweights = torch.ops.ws.packed_recurrent_backward(
        grad_out, grad_h, grad_c, x, sizes, h, c, list(weights), out, kept, packed, ctx.kind, ctx.both
    )
    return dx, None, dh, dc if c is not None else None, dweights[: len(weights)], None, None


torch.library.register_autograd("ws::packed_recurrent", _autograd, setup_context=_setup_context, lib=LIBRARY)
torch.library.register_autograd("ws::packed_recurrent_backward", recurrent._no_second_derivative, lib=LIBRARY)


def _cases() -> Iterator[tuple[Any, ...]]:
    for kind, gates in GATES.items():
        for both in (False, True):
            ways, sizes = 1 + both, torch.tensor([3, 2, 2, 1])
            weights = [torch.randn(gates * 4, n) for _ in range(ways) for n in (5, 4)]
            h = torch.randn(ways, 3, 4)
            yield torch.randn(8, 5), sizes, h, torch.randn(ways, 3, 4) if kind == "lstm" else None, weights, kind, both


record(
    "ws::packed_recurrent",
    reference=reference,  # the first results; the rest is kept for the backward
    cases=_cases,
    tolerance=1e-5,
    kind="matmul",
    flops=recurrent.products,
    compiled=False,
    unordered=frozenset({"cuda"}),
)
record(
    "ws::packed_recurrent_backward",
    kind="matmul",
    flops=lambda call: 2 * recurrent.products(call),
    compiled=False,
    unordered=frozenset({"cuda"}),
)
