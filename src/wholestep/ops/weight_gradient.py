"""total += left.T @ right, in the precision of `total`, where the factors may be bf16 or fp16 and `total` float32.

Why: a weight's gradient that is summed over chunks must not be rounded to bf16 at every chunk. The forms, of which the tuner takes
the fastest that is exact:

    plain     all of one type: addmm
    addmm     cuBLAS adds in float32 by itself (`addmm` with out_dtype, torch 2.10 or later)
    mm        the product comes in float32, a slice of rows at a time
    rounded   it comes in the factors' type, a slice at a time: the CPU, and where torch offers nothing else

In: the sizes of a call, once per operator. Out: the form, called for every chunk.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from wholestep.ops.tuner import TUNER, Candidate, Question, refuse_unusable, source_of

aten = torch.ops.aten
WHAT = "weight gradient"
SLICE_BYTES = 64 * 2**20
"""Of a product that is made before it is added: small beside the total."""
TOLERANCE = 5e-5
"""Relative error of the norm: float32 sums of many terms stay below, a product rounded to bf16 (2e-3) or fp16 (2e-4) does not."""
CHECKED = 256
"""Rows of the total that are compared with the reference."""

Form = Callable[[Tensor, Tensor, Tensor], None]
"""total (V, H), left (R, V), right (R, H)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """What a choice may depend on."""

    rows: int
    """Of one chunk."""
    shape: tuple[int, int]
    """Of the total."""
    dtype: torch.dtype
    """Of the factors."""
    total: torch.dtype
    device: torch.device = dataclasses.field(repr=False)
    """Not remembered: the answer is the card's, wherever it is plugged in."""

    def __str__(self) -> str:
        return f"{self.shape} over {self.rows} rows in {str(self.dtype).removeprefix('torch.')}"


def add_plain(total: Tensor, left: Tensor, right: Tensor) -> None:
    total.addmm_(left.t(), right)


def add_by_cublas(total: Tensor, left: Tensor, right: Tensor) -> None:
    aten.addmm.dtype_out(total, left.t(), right, total.dtype, out=total)


def add_slices(total: Tensor, left: Tensor, right: Tensor, *, wide: bool) -> None:
    step = max(SLICE_BYTES // max(4 * right.shape[1], 1), 1)
    for start in range(0, total.shape[0], step):
        part = slice(start, start + step)
        factor = left[:, part].t()
        total[part] += torch.mm(factor, right, out_dtype=total.dtype) if wide else torch.mm(factor, right)


FORMS: dict[str, Form] = {
    "plain": add_plain,
    "addmm": add_by_cublas,
    "mm": functools.partial(add_slices, wide=True),
    "rounded": functools.partial(add_slices, wide=False),
}
"""In the order of trust."""


def why_not(name: str, product: Product) -> str | None:
    """The reason for which a form cannot be taken."""
    if product.dtype == product.total:
        return None if name == "plain" else "factors and total are of one type"
    if name == "plain":
        return "factors and total are of different types"
    if name in ("addmm", "mm") and product.device.type != "cuda":
        return f"it runs on cuda, the call is on {product.device.type}"
    if (name == "addmm" and "dtype_out" not in aten.addmm.overloads()) or (
        name == "mm" and "dtype" not in aten.mm.overloads()
    ):
        return f"torch {torch.__version__} does not have it"
    return None


def choose(product: Product, kernel: str = "") -> Form:
    """The form for this product, or the one that a plan names."""
    if kernel:
        refuse_unusable(kernel, WHAT, str(product), {name: why_not(name, product) for name in FORMS})
        return FORMS[kernel]
    known = TUNER.choices.get((WHAT, product)) or TUNER.choose(question(product))
    return FORMS[known.name]


def question(product: Product) -> Question:
    return Question(
        what=WHAT,
        call=product,
        candidates=[
            Candidate(
                name=name,
                supports=functools.partial(why_not, name, product),
                wrong=functools.partial(_disagreement, form),
                prepare=functools.partial(_call, form),
            )
            for name, form in FORMS.items()
        ],
        reference="rounded" if product.dtype != product.total else "plain",
        stand_ins=functools.partial(_stand_ins, product),
        device=product.device,
        source=source_of(sys.modules[__name__]),
        float64=product.dtype == torch.float64,
    )


# ---- on stand-ins --------------------------------------------------------------------------------------------


def _stand_ins(product: Product, parts: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """total, left, right; of a `parts`-th of the total's rows."""
    rows, width = product.shape[0] // parts, product.shape[1]
    if rows == 0:
        return None
    generator = torch.Generator(device=product.device).manual_seed(rows)
    left, right = (
        torch.empty(product.rows, size, dtype=product.dtype, device=product.device).normal_(generator=generator)
        for size in (rows, width)
    )
    return torch.zeros(rows, width, dtype=product.total, device=product.device), left, right


def _disagreement(form: Form, given: tuple[Tensor, Tensor, Tensor]) -> str | None:
    """How far the form is from a float64 product of the first rows; float32's own may be computed in less, as torch is set."""
    total, left, right = given
    form(total.zero_(), left, right)
    expected = left[:, :CHECKED].double().t() @ right.double()
    error = (total[:CHECKED] - expected).norm() / expected.norm().clamp(min=1e-6)
    return None if bool(error <= TOLERANCE) else f"differs from the reference by {float(error):.1e}"


def _call(form: Form, given: tuple[Tensor, Tensor, Tensor]) -> Callable[[], None]:
    return functools.partial(form, *given)
