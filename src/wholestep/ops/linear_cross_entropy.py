"""ws::linear_cross_entropy: cross-entropy of x @ weight.T + bias without the whole logits ever in memory.

Legend: N rows, H width, V classes. x (N, H), weight (V, H), bias (V) or None, target (N) int64 class numbers. Rows are
taken `chunk` at a time; one chunk's logits are made, used and dropped. Per row, with l the (soft-capped) logits in
float32 and s = label_smoothing:

    lse  = logsumexp(l)
    loss = lse - (1 - s) l[target] - s / V sum(l) + z_loss lse^2           0 where target == ignore_index
    dl   = g (softmax(l) (1 + 2 z_loss lse) - (1 - s) onehot(target) - s / V)      softcap c: l = c tanh(raw / c)

Operators: the forward gives (loss, lse); the backward makes every chunk of logits again; `..._and_gradients` makes each once
and gives the loss and all gradients, with the same bits as the two (passes/fuse_loss.py puts it in their place). Matrix
products run in the dtype of x and weight, as eager's do; the gradients of weight and bias add up over chunks in float32. Why:
the float32 logits of 16k tokens over 128k classes are 8 GiB, and eager holds several copies of them.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from wholestep.ops import weight_gradient
from wholestep.ops.call import Call
from wholestep.ops.linear_cross_entropy_rows import Rule, process_rows
from wholestep.ops.tuner import Question
from wholestep.ops.wide import wide_dtype

CHUNK_BYTES = 2**30
"""Of logits in one chunk, were they float32: 2048 rows of a 128k vocabulary. With 512 rows the weight's gradient, 1 GiB in
float32, was read and written 32 times in a step of 16k tokens, which took longer than the products."""
ROW_BYTES = 128
"""On a GPU a row of logits fills a multiple of this, with classes that do not exist: for 50257 classes of two bytes cuBLAS has
only kernels that are four times slower."""
ROW_MULTIPLE = 128
REDUCTIONS = ("mean", "sum")

_RULE = "int ignore_index, float label_smoothing, float z_loss, float softcap, str reduction, int chunk"
LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define(
    f"linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor target, {_RULE}) -> (Tensor loss, Tensor lse)"
)
LIBRARY.define(
    "linear_cross_entropy_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor lse, "
    f"{_RULE}, bool[] wanted, *, str implementation='') -> (Tensor dx, Tensor dweight, Tensor dbias)"
)
LIBRARY.define(
    "linear_cross_entropy_and_gradients(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor target, "
    f"{_RULE}, bool[] wanted, *, str implementation='') -> (Tensor loss, Tensor dx, Tensor dweight, Tensor dbias)"
)


def chunk_rows(rows: int | torch.SymInt, vocabulary: int) -> int:
    """Rows per chunk: at most CHUNK_BYTES of float32 logits, a multiple of 128, and chunks as equal as that allows."""
    most = max(CHUNK_BYTES // (4 * max(vocabulary, 1)) // ROW_MULTIPLE, 1) * ROW_MULTIPLE
    if isinstance(rows, torch.SymInt):  # a size that will change: asking for its value would fix it
        return most
    chunks = max(-(-rows // most), 1)
    return max(-(-rows // (chunks * ROW_MULTIPLE)), 1) * ROW_MULTIPLE


def check(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, reduction: str, chunk: int) -> None:
    """Refuse what has no meaning, with the values."""
    shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, target {tuple(target.shape)}"
    if x.dim() != 2 or weight.dim() != 2 or target.dim() != 1:
        raise ValueError(f"ws::linear_cross_entropy takes x (N, H), weight (V, H), target (N); got {shapes}")
    if x.shape[1] != weight.shape[1] or x.shape[0] != target.shape[0]:
        raise ValueError(f"ws::linear_cross_entropy: rows and widths must agree; got {shapes}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"ws::linear_cross_entropy: bias has shape {tuple(bias.shape)}, with {shapes}")
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != x.dtype):
        raise ValueError(
            f"ws::linear_cross_entropy: x is {x.dtype}, weight {weight.dtype}; they and bias must be one dtype"
        )
    if target.dtype != torch.int64:
        raise ValueError(f"ws::linear_cross_entropy: target is {target.dtype}, not class numbers (int64)")
    if reduction not in REDUCTIONS:
        raise ValueError(f"ws::linear_cross_entropy: reduction={reduction!r}; use one of {', '.join(REDUCTIONS)}")
    if chunk < 1:
        raise ValueError(f"ws::linear_cross_entropy: chunk={chunk}; use 1 row or more")


# ---- the chunks ----------------------------------------------------------------------------------------------


def _chunks(rows: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk))


def _reduced(losses: Tensor, target: Tensor, rule: Rule, reduction: str) -> Tensor:
    """0 / 0 where every target is ignored, as torch has it."""
    return losses.sum() if reduction == "sum" else losses.sum() / (target != rule.ignore_index).sum()


def _row_scale(grad: Tensor, target: Tensor, rule: Rule, reduction: str, dtype: torch.dtype) -> Tensor:
    """The gradient of one row's loss, 0-d; stays on the device."""
    scale = grad.to(dtype)
    return scale if reduction == "sum" else scale / (target != rule.ignore_index).sum()


def wants_whole_rows(weight: Tensor) -> bool:
    return weight.is_cuda


def _missing_classes(weight: Tensor) -> int:
    """By which a row of logits is filled up."""
    return -weight.shape[0] % max(ROW_BYTES // weight.element_size(), 1) if wants_whole_rows(weight) else 0


def _product(weight: Tensor, chunk: int) -> weight_gradient.Product:
    """What adds up to the gradient of a weight, chunk by chunk, its classes filled up."""
    shape = (weight.shape[0] + _missing_classes(weight), weight.shape[1])
    return weight_gradient.Product(chunk, shape, weight.dtype, wide_dtype(weight.dtype), weight.device)


def asked(call: Call) -> Question | None:
    """The question that a node of a graph asks; None where nothing is added up."""
    rows, chunk = call["x"].shape[0], call["chunk"]
    if not call["wanted"][1] or (isinstance(rows, int) and 0 < rows <= chunk):
        return None
    return weight_gradient.question(_product(call["weight"], chunk))


class _Head:
    """Weight and bias, with classes that do not exist where that makes the products fast.

    Their weights are zero: so are their logits, which nobody reads as logits and which add nothing as gradients.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.classes, missing = weight.shape[0], _missing_classes(weight)
        self.weight = F.pad(weight, (0, 0, 0, missing)) if missing else weight
        self.bias = F.pad(bias, (0, missing)) if missing and bias is not None else bias

    def gradient_of_logits(self, x: Tensor, target: Tensor, rule: Rule, **options: Tensor) -> Tensor:
        """Makes the logits of some rows and overwrites them: `process_rows`, and the zeros behind them."""
        whole = F.linear(x, self.weight, self.bias)
        logits = whole[:, : self.classes]
        made = process_rows(logits, target, rule, **options)
        if whole.shape[1] == self.classes:
            return made
        if made.data_ptr() != whole.data_ptr():
            logits.copy_(made)
        return whole


class _Gradients:
    """The three gradients while chunks are added to them."""

    def __init__(self, x: Tensor, head: _Head, wanted: list[bool], chunk: int, implementation: str) -> None:
        one_chunk = 0 < x.shape[0] <= chunk
        weight, bias = head.weight, head.bias
        self.x, self.weight, self.one_chunk, self.classes = x, weight, one_chunk, head.classes
        dtype = weight.dtype if one_chunk else wide_dtype(weight.dtype)
        self.dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if wanted[0] else None
        make = torch.empty if one_chunk else torch.zeros
        self.dweight = make(weight.shape, dtype=dtype, device=x.device) if wanted[1] else None
        if self.dweight is not None and not one_chunk:
            self.add_product = weight_gradient.choose(_product(head.weight, chunk), implementation)
        self.dbias = None
        if wanted[2] and bias is not None:
            self.dbias = torch.zeros(bias.shape, dtype=wide_dtype(bias.dtype), device=x.device)

    def add(self, rows: slice, dlogits: Tensor) -> None:
        if self.dx is not None:
            torch.mm(dlogits, self.weight, out=self.dx[rows])
        if self.dweight is not None and self.one_chunk:
            torch.mm(dlogits.t(), self.x, out=self.dweight)  # nothing to add up: as eager, in one rounding
        elif self.dweight is not None:
            self.add_product(self.dweight, dlogits, self.x[rows])
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=self.dbias.dtype)

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """In the dtype of what they are gradients of; those not wanted are empty."""
        none = torch.empty(0, dtype=self.x.dtype, device=self.x.device)
        dweight = none if self.dweight is None else self.dweight[: self.classes].to(self.weight.dtype)
        dbias = torch.empty_like(none) if self.dbias is None else self.dbias[: self.classes].to(self.weight.dtype)
        return torch.empty_like(none) if self.dx is None else self.dx, dweight, dbias


def _dense(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """In all three operators alike: the layout decides which kernel makes a product, hence its bits."""
    return x.contiguous(), weight.contiguous()


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """(loss 0-d, lse (N)), both in float32 (float64 for float64)."""
    check(x, weight, bias, target, reduction, chunk)
    x, weight = _dense(x, weight)
    rule = Rule(ignore_index, label_smoothing, z_loss, softcap)
    losses, lse = (torch.empty(x.shape[0], dtype=wide_dtype(x.dtype), device=x.device) for _ in range(2))
    head = _Head(weight, bias)
    for rows in _chunks(x.shape[0], chunk):
        head.gradient_of_logits(x[rows], target[rows], rule, losses=losses[rows], lse=lse[rows])
    return _reduced(losses, target, rule, reduction), lse


def linear_cross_entropy_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    chunk: int,
    wanted: list[bool],
    *,
    implementation: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias, from the logits recomputed and the forward's lse."""
    x, weight = _dense(x, weight)
    rule = Rule(ignore_index, label_smoothing, z_loss, softcap)
    scale = _row_scale(grad, target, rule, reduction, lse.dtype)
    head = _Head(weight, bias)
    gradients = _Gradients(x, head, wanted, chunk, implementation)
    for rows in _chunks(x.shape[0], chunk):  # no name holds a chunk: it is gone before the next one is made
        gradients.add(rows, head.gradient_of_logits(x[rows], target[rows], rule, lse=lse[rows], scale=scale))
    return gradients.results()


def linear_cross_entropy_and_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    chunk: int,
    wanted: list[bool],
    *,
    implementation: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss and the gradients of x, weight and bias, every chunk of logits made once."""
    check(x, weight, bias, target, reduction, chunk)
    x, weight = _dense(x, weight)
    rule = Rule(ignore_index, label_smoothing, z_loss, softcap)
    losses, lse = (torch.empty(x.shape[0], dtype=wide_dtype(x.dtype), device=x.device) for _ in range(2))
    scale = _row_scale(grad, target, rule, reduction, lse.dtype)
    head = _Head(weight, bias)
    gradients = _Gradients(x, head, wanted, chunk, implementation)
    for rows in _chunks(x.shape[0], chunk):
        gradients.add(
            rows,
            head.gradient_of_logits(x[rows], target[rows], rule, losses=losses[rows], lse=lse[rows], scale=scale),
        )
    return _reduced(losses, target, rule, reduction), *gradients.results()


# ---- without data, and derivatives ---------------------------------------------------------------------------


@torch.library.register_fake("ws::linear_cross_entropy", lib=LIBRARY)
def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, label_smoothing: float,
    z_loss: float, softcap: float, reduction: str, chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check(x, weight, bias, target, reduction, chunk)
    loss, lse = (torch.empty(s, dtype=wide_dtype(x.dtype), device=x.device) for s in ((), (x.shape[0],)))
    return loss, lse


def _empty_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (x.shape, weight.shape, weight.shape[:1])
    needed = (wanted[0], wanted[1], wanted[2] and bias is not None)
    dx, dweight, dbias = (
        torch.empty(shape if one else (0,), dtype=x.dtype, device=x.device)
        for shape, one in zip(shapes, needed, strict=True)
    )
    return dx, dweight, dbias


@torch.library.register_fake("ws::linear_cross_entropy_backward", lib=LIBRARY)
def _backward_fake(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, lse: Tensor, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float, reduction: str, chunk: int, wanted: list[bool], *,
    implementation: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _empty_gradients(x, weight, bias, wanted)


@torch.library.register_fake("ws::linear_cross_entropy_and_gradients", lib=LIBRARY)
def _fused_fake(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float, reduction: str, chunk: int, wanted: list[bool], *,
    implementation: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    check(x, weight, bias, target, reduction, chunk)
    loss = torch.empty((), dtype=wide_dtype(x.dtype), device=x.device)
    return loss, *_empty_gradients(x, weight, bias, wanted)


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    x, weight, bias, target, *rule = inputs
    _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(x, weight, bias, target, lse)
    ctx.rule = rule


def _autograd(ctx: torch.autograd.function.FunctionCtx, grad: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 10
    x, weight, bias, target, lse = ctx.saved_tensors
    wanted = [bool(needed) for needed in ctx.needs_input_grad[:3]]
    found = torch.ops.ws.linear_cross_entropy_backward(grad, x, weight, bias, target, lse, *ctx.rule, wanted)
    return (*(g if needed else None for g, needed in zip(found, wanted, strict=True)), *(None,) * 7)


def _no_second_derivative(ctx: torch.autograd.function.FunctionCtx, *_: object) -> tuple[Tensor | None, ...]:
    raise NotImplementedError(
        "The second derivative of ws::linear_cross_entropy is not implemented (a gradient penalty or Hessian through the "
        "loss). Use chunked_loss=False, which keeps F.linear and F.cross_entropy."
    )


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("linear_cross_entropy", linear_cross_entropy, _device)
    LIBRARY.impl("linear_cross_entropy_backward", linear_cross_entropy_backward, _device)
    LIBRARY.impl("linear_cross_entropy_and_gradients", linear_cross_entropy_and_gradients, _device)
torch.library.register_autograd("ws::linear_cross_entropy", _autograd, setup_context=_setup_context, lib=LIBRARY)
for _name in ("linear_cross_entropy_backward", "linear_cross_entropy_and_gradients"):
    torch.library.register_autograd(f"ws::{_name}", _no_second_derivative, lib=LIBRARY)
