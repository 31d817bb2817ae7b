"""Finds cross-entropy over the output of a linear layer while the user's code runs, and computes it in chunks of rows.

In: every call of a torch function, from `modes.FunctionLevel`. Out: for a cross-entropy that fits, the loss by
`ws::linear_cross_entropy`; for everything else what torch gives. Outputs of F.linear are remembered, and followed through casts
that widen, views, slices of leading dimensions, transposes and soft-capping; the loss then applies the same row operations to
the linear layer's input. The plain logits are still made while tracing, and are dead code unless somebody else reads them.

Whatever is not certain leaves the ordinary path: class weights, probabilities as targets, a tensor that was written to or has
a gradient hook, logits cut from the graph by detach() or no_grad().
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wholestep import compat
from wholestep.capture.row_operations import Rows, follow_rows
from wholestep.errors import CaptureRefused
from wholestep.graph.notes import Note
from wholestep.ops.linear_cross_entropy import chunk_rows

WHOLE_LOGITS_BYTES = 256 * 2**20
"""Float32 logits below this stay whole: one chunk would hold them anyway."""

_CASTS = (Tensor.float, Tensor.to, Tensor.type, Tensor.contiguous, Tensor.clone, torch.clone)
_LOG_SOFTMAX = (F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax)
_TANH = (torch.tanh, Tensor.tanh, F.tanh)
_DIVISIONS = (torch.div, Tensor.div, Tensor.__truediv__, torch.true_divide, Tensor.true_divide)
_PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply)
_WIDER = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 2}


@dataclasses.dataclass(frozen=True, slots=True)
class Logits:
    """A tensor that is rows of `linear(x, weight, bias)`, and how it came from there."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    """Of the linear layer's output: what autocast, if any, made of its inputs."""
    rows: Rows
    divided: float = 0.0
    """Divided by this for soft-capping; with `bounded`, tanh was taken; with `softcap`, it is whole."""
    bounded: bool = False
    softcap: float = 0.0
    normalised: bool = False
    """log_softmax was taken over the classes."""
    read: tuple[tuple[Tensor, int], ...] = ()
    """x, weight and bias with their versions: they must not have been written to since."""
    made: tuple[tuple[Tensor, int], ...] = ()
    """The same for the logits and what was made of them on the way here."""
    module: str | None = None
    """Path of the linear layer: what is said of it, such as its precision, is said of the product in the loss."""

    @property
    def is_whole(self) -> bool:
        """Not in the middle of soft-capping."""
        return bool(self.softcap) or not (self.divided or self.bounded)

    def untouched(self) -> bool:
        watched = any(t._backward_hooks or (not t.is_leaf and t.retains_grad) for t, _ in self.made)
        return not watched and all(t._version == version for t, version in (*self.read, *self.made))


class ChunkedLoss:
    """One run of the user's code: what is remembered, what was found."""

    def __init__(self, wish: bool | None, whole_bytes: int) -> None:
        self.wish, self.whole_bytes = wish, whole_bytes
        self.notes: list[Note] = []
        # by id: every Logits holds its tensors, so an id stays theirs; all go when the run ends, and they hold no data
        self._known: dict[int, Logits] = {}
        self._used: set[int] = set()

    def call(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """The function's result; a loss that fits is computed in chunks."""
        result = func(*args, **kwargs)
        if self.wish is False:
            return result
        if func is F.linear:
            self._remember_linear(result, *args, **kwargs)
        if not args or not isinstance(args[0], Tensor):
            return result
        source = self._known.get(id(args[0]))
        if source is None:
            return result
        if func is F.cross_entropy or func is F.nll_loss:
            loss = self._loss(func, source, result, args, kwargs)
            return result if loss is None else loss
        if func in (Tensor.register_hook, Tensor.retain_grad) and id(args[0]) in self._used:
            raise CaptureRefused(
                "the gradient of logits is asked for after their loss: chunked_loss=False keeps them whole"
            )
        if isinstance(result, Tensor) and result is not args[0] and _is_cut(result) == _is_cut(args[0]):
            found = _followed(source, func, args, kwargs, result)
            if found is not None:
                self._known[id(result)] = dataclasses.replace(found, made=(*found.made, (result, result._version)))
        return result

    def _remember_linear(self, result: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        if result.dtype not in (*_WIDER, torch.float64) or weight.dim() != 2 or result.dim() == 0:
            return
        read = tuple((t, t._version) for t in (input, weight, bias) if t is not None)
        made, rows = ((result, result._version),), Rows((), result.dim() - 1)
        self._known[id(result)] = Logits(
            input, weight, bias, result.dtype, rows, read=read, made=made, module=compat.noted("module")
        )

    def _loss(self, func: Callable, source: Logits, plain: Tensor, args: tuple, kwargs: dict) -> Tensor | None:
        """The chunked loss, or None where it does not fit; `plain` is the ordinary one, which gives dtype and shape."""
        given = _arguments(func, *args, **kwargs)
        if given is None or not source.is_whole or source.normalised != (func is F.nll_loss):
            return None
        logits, target, ignore_index, label_smoothing, reduction = given
        if not _fits(source, logits, target) or not self._large(logits):
            return None
        width, vocabulary = source.weight.shape[1], source.weight.shape[0]
        rows = source.rows.apply(source.x).movedim(source.rows.class_dim, -1).reshape(-1, width).to(source.dtype)
        bias = None if source.bias is None else source.bias.to(source.dtype)
        chunk = chunk_rows(rows.shape[0], vocabulary)
        with compat.annotate(module=source.module) if source.module else contextlib.nullcontext():
            loss, _ = torch.ops.ws.linear_cross_entropy(
                rows, source.weight.to(source.dtype), bias, target.reshape(-1),
                ignore_index, label_smoothing, 0.0, source.softcap, reduction, chunk,
            )  # fmt: skip
        self._used.update(id(tensor) for tensor, _ in source.made)
        self._note(rows.shape[0], vocabulary, chunk)
        return loss.to(plain.dtype)

    def _large(self, logits: Tensor) -> bool:
        return self.wish is True or 4 * compat.traced_size(logits.numel()) >= self.whole_bytes

    def _note(self, rows: Any, vocabulary: int, chunk: int) -> None:
        count = compat.traced_size(rows)
        chunks, size = max(-(-count // chunk), 1), f"{4 * count * vocabulary / 2**30:.3g} GiB"
        told = (
            f"{chunks} chunks of {chunk} rows, logits never whole ({size})"
            if chunks > 1
            else f"1 chunk ({size} of logits)"
        )
        self.notes.append(Note("capture", f"loss: linear + cross-entropy in {told}"))


def _followed(source: Logits, func: Callable, args: tuple, kwargs: dict, result: Tensor) -> Logits | None:
    """What `result` is when it still is rows of logits; None when it is something else."""
    tensor = args[0]
    if source.normalised:
        rows = follow_rows(source.rows, func, args, kwargs, result)
        return None if rows is None else dataclasses.replace(source, rows=rows)
    if func in _CASTS:
        same = result.shape == tensor.shape and result.device == tensor.device
        return source if same and _widens(tensor.dtype, result.dtype) else None
    if func in _LOG_SOFTMAX:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        over_classes = isinstance(dim, int) and dim % max(tensor.dim(), 1) == source.rows.class_dim
        fits = over_classes and source.is_whole and _widens(tensor.dtype, result.dtype)
        return dataclasses.replace(source, normalised=True) if fits else None
    if func in _TANH:
        fits = bool(source.divided) and not source.bounded
        return dataclasses.replace(source, bounded=True) if fits else None
    number = _factor(args, kwargs)
    if func in _DIVISIONS:
        fits = number > 0.0 and source.is_whole and not source.softcap
        return dataclasses.replace(source, divided=number) if fits else None
    if func in _PRODUCTS:
        fits = source.bounded and not source.softcap and number == source.divided
        return dataclasses.replace(source, softcap=number) if fits else None
    rows = follow_rows(source.rows, func, args, kwargs, result)
    return None if rows is None else dataclasses.replace(source, rows=rows)


def _arguments(
    func: Callable, input: Tensor, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, int, float, str] | None:  # fmt: skip
    """What the loss is asked for, None where the chunked one has no such thing."""
    plain = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
    numbers = isinstance(target, Tensor) and target.dtype == torch.int64
    return (input, target, ignore_index, label_smoothing, reduction) if plain and numbers else None


def _fits(source: Logits, logits: Tensor, target: Tensor) -> bool:
    class_dim = 0 if logits.dim() == 1 else 1
    leaves = [t for t in (source.x, source.weight, source.bias) if t is not None]
    # a loss that eager would not differentiate must not be differentiated here
    cut = _is_cut(logits) and torch.is_grad_enabled() and any(t.requires_grad for t in leaves)
    one_device = all(t.device == logits.device for t in (*leaves, target))
    return source.rows.class_dim == class_dim and not cut and one_device and source.untouched()


def _is_cut(tensor: Tensor) -> bool:
    """No gradient flows back from here; a view made under no_grad() says that it requires one all the same."""
    return tensor.grad_fn is None


def _factor(args: tuple, kwargs: dict) -> float:
    """The number of `logits / number` or `logits * number`; 0 when it is none."""
    if len(args) != 2 or kwargs or isinstance(args[1], bool) or not isinstance(args[1], int | float):
        return 0.0
    return float(args[1])


def _widens(before: torch.dtype, after: torch.dtype) -> bool:
    return after == before or _WIDER.get(after, 0) > _WIDER.get(before, 3)
