"""Products: linear layers, matrix products, einsum, convolutions, experts. Dimensions have labels; one label is cut.

Where the result has the label, it is cut there; where the label is summed over, the result is a partial sum. An operand that is
whole gives its part along the label; one that does not have it is entered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from wholestep.schedule.sharding.layout import PARTIAL, Cut, Layout
from wholestep.schedule.sharding.program import Program
from wholestep.schedule.sharding.registry import rule
from wholestep.schedule.sharding.values import Called, Value

Label: TypeAlias = str | int | None
"""None: a dimension that cannot be cut there."""
Operand: TypeAlias = tuple[Value, Sequence[Label]]


def contracted(
    p: Program, operands: Sequence[Operand], out: Sequence[Label], make: Callable[[list[Value], Layout], Value]
) -> Value:
    """What `make` writes of the operands as one rank needs them."""
    operands = [(p.reduced(value), labels) for value, labels in operands]
    label, cut = _label(p, operands)
    if label is None or cut is None:
        return make([value for value, _ in operands], operands[0][0].layout)
    locals_: list[Value] = []
    for value, labels in operands:
        if value.cut is not None:
            locals_.append(value)
        elif label in labels:
            locals_.append(p.part(value, cut.at(list(labels).index(label))))
        else:
            locals_.append(p.entered(value))
    return make(locals_, cut.at(list(out).index(label)) if label in out else PARTIAL)


def _label(p: Program, operands: Sequence[Operand]) -> tuple[Label, Cut | None]:
    """The label that is cut, in which all operands have to agree."""
    found: tuple[Label, Value] | None = None
    for value, labels in operands:
        if value.cut is None:
            continue
        label = labels[value.cut.dim]
        if label is None:
            p.refuse(f"an input is {value.layout}, which is not followed{p.because(value)}", p.gather_hint(value))
        if found is None:
            found = label, value
            continue
        before = found[1]
        assert before.cut is not None
        if label != found[0]:
            texts = [f"{one.layout}{p.because(one)}" for one in (before, value)]
            hint = (
                "cut the second along the dimension that is summed over (row after column), or gather: "
                + p.gather_hint(before)
            )
            p.refuse(f"one input is {texts[0]}, another {texts[1]}", hint)
        if not before.cut.like(value.cut):
            few, many = (value, before) if len(value.cut.blocks) < len(before.cut.blocks) else (before, value)
            assert many.cut is not None
            text = f"its inputs are cut in other blocks: {value.cut.blocks[:6]} and {before.cut.blocks[:6]}"
            p.recut(few, many.cut.blocks, text, "cut both parameters in the same blocks: blocks=")
    return (None, None) if found is None else (found[0], found[1].cut)


def with_bias(p: Program, product: Value, bias: Value | None) -> Value:
    """Behind the sum over ranks, for it is added once; in the type of the product, as autocast has it inside of the operator."""
    if bias is None:
        return product
    found = p.summed(product)
    if bias.example.dtype != found.example.dtype:
        bias = p.emit("to", bias, found.example.dtype, layout=bias.layout)
    return p.call(torch.add, found, bias)


@rule("linear")
def linear(p: Program, call: Called) -> Any:
    x, weight, bias = call.first, call.get("weight"), call.get("bias")
    rows = tuple(range(x.dim - 1))
    out: tuple[Label, ...] = (*rows, "o") if weight.dim == 2 else rows
    columns: tuple[Label, ...] = ("o", "k") if weight.dim == 2 else ("k",)
    operands: list[Operand] = [(x, (*rows, "k")), (weight, columns)]
    label, _ = _label(p, [(p.reduced(value), labels) for value, labels in operands])
    if bias is not None and label != "k":
        operands.append((bias, ("o",)))
        return contracted(p, operands, out, lambda v, layout: p.emit(F.linear, *v, layout=layout))
    product = contracted(p, operands, out, lambda v, layout: p.emit(F.linear, *v, layout=layout))
    return with_bias(p, product, bias)


@rule("matmul", "mm", "bmm", "mv", "dot")
def matmul(p: Program, call: Called) -> Any:
    return product(p, call.at(0), call.at(1))


def product(p: Program, x: Value, y: Value) -> Value:
    """torch.matmul with its broadcasting."""
    left, right, out = _matmul_labels(x.shape, y.shape)
    return contracted(p, [(x, left), (y, right)], out, lambda v, layout: p.emit(torch.matmul, *v, layout=layout))


def _matmul_labels(x: tuple[int, ...], y: tuple[int, ...]) -> tuple[list[Label], list[Label], list[Label]]:
    rank = max(len(x), len(y))
    batch: list[Label] = [max(rank - 2, 0) - d for d in range(max(rank - 2, 0))]  # counted from the right
    left: list[Label] = [
        label if size != 1 else None for label, size in zip(batch[len(batch) - max(len(x) - 2, 0) :], x)
    ]
    right: list[Label] = [
        label if size != 1 else None for label, size in zip(batch[len(batch) - max(len(y) - 2, 0) :], y)
    ]
    left += ["m", "k"] if len(x) > 1 else ["k"]
    right += ["k", "n"] if len(y) > 1 else ["k"]
    out = [*batch, *(["m"] if len(x) > 1 else []), *(["n"] if len(y) > 1 else [])]
    return left, right, out


@rule("addmm", "baddbmm")
def addmm(p: Program, call: Called) -> Any:
    """beta * bias + alpha * (x @ y)."""
    bias, x, y = call.first, *(call.get(f"mat{i}", call.get(f"batch{i}")) for i in (1, 2))
    alpha, beta = call.get("alpha", 1), call.get("beta", 1)
    if call.writes:
        p.refuse_cut(call.name, next(value for value in call.values if not value.is_whole))
    left, right, out = _matmul_labels(x.shape, y.shape)
    label, _ = _label(p, [(p.reduced(x), left), (p.reduced(y), right)])
    if label == "k" or bias.is_partial:
        found = product(p, x, y)
        found = found if alpha == 1 else p.call(torch.mul, found, alpha)
        return with_bias(p, found, bias if beta == 1 else p.call(torch.mul, bias, beta))
    spread = [name if size != 1 else None for name, size in zip(out[len(out) - bias.dim :], bias.shape)]
    write = lambda v, layout: p.emit(call.target, *v, layout=layout, alpha=alpha, beta=beta)  # noqa: E731
    return contracted(p, [(bias, spread), (x, left), (y, right)], out, write)


@rule("einsum")
def einsum(p: Program, call: Called) -> Any:
    equation, given = call.args[0], call.args[1:]
    operands = list(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else list(given)
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    repeated = any(len(set(term)) != len(term) for term in terms)
    if not arrow or "." in equation or repeated:
        p.refuse_cut(f"einsum {equation!r}", next(value for value in operands if not value.is_whole))
    labelled: list[Operand] = [(value, list(term)) for value, term in zip(operands, terms, strict=True)]
    return contracted(p, labelled, list(out), lambda v, layout: p.emit(torch.einsum, equation, *v, layout=layout))


@rule(
    "transformers::grouped_mm_fallback", "ws::grouped_mm", "_grouped_mm", "grouped_mm", "torch.nn.functional.grouped_mm"
)
def grouped_mm(p: Program, call: Called) -> Any:
    """Rows (t, k) of several experts (e, k, n): the width of each expert is cut, and rows go to experts as before."""
    x, weight = call.at(0), call.at(1)
    if weight.dim != 3 or x.dim != 2 or len(call.values) != 3:
        p.refuse_cut(call.name, next(value for value in call.values if not value.is_whole))
    ends = call.values[2]

    def write(values: list[Value], layout: Layout) -> Value:
        swapped = {x: values[0], weight: values[1], ends: ends}
        return p.again(call, layout, swapped.__getitem__)

    return contracted(p, [(x, (None, "k")), (weight, (None, "k", "n"))], ("t", "n"), write)


@rule("conv1d", "conv2d", "conv3d")
def convolution(p: Program, call: Called) -> Any:
    """Over channels: in (summed over) or out, or both where every channel is by itself."""
    x, weight, bias, groups = call.first, call.get("weight"), call.get("bias"), call.get("groups", 1)
    by_channel = groups == x.shape[1] == weight.shape[0]
    if x.dim != weight.dim or (groups != 1 and not by_channel):
        p.refuse_cut(call.name, next(value for value in call.values if not value.is_whole))
    space: list[Label] = [None] * (weight.dim - 2)
    given = {name: call.get(name) for name in ("stride", "padding", "dilation") if name in call.arguments}
    inner: tuple[Label, Label] = ("o", None) if by_channel else ("i", "i")
    operands: list[Operand] = [(x, ("b", inner[0], *space)), (weight, ("o", inner[1], *space))]

    def write(values: list[Value], layout: Layout) -> Value:
        own = groups // p.parts if by_channel and isinstance(layout, Cut) and layout.dim == 1 else groups
        return p.emit(call.target, *values, layout=layout, **given, groups=own)

    label, _ = _label(p, [(p.reduced(value), labels) for value, labels in operands])
    if bias is not None and label != "i":
        return contracted(p, [*operands, (bias, ("o",))], ("b", "o", *space), write)
    found = contracted(p, operands, ("b", "o", *space), write)
    return with_bias(p, found, None if bias is None else p.call(torch.reshape, bias, (-1, *(1 for _ in space))))
