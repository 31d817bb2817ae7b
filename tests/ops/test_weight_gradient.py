"""The forms of a weight's gradient: which can be taken, which are exact, and on a GPU that the fastest exact one is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from wholestep.errors import BadOption
from wholestep.ops import weight_gradient
from wholestep.ops.tuner import MEASURED, ONLY_ONE, Tuner
from wholestep.ops.weight_gradient import FORMS, Product, choose, question

CPU = torch.device("cpu")


def product(dtype: torch.dtype, device: torch.device = CPU, rows: int = 64) -> Product:
    return Product(rows, (48, 32), dtype, torch.float64 if dtype == torch.float64 else torch.float32, device)


def wide(total: Tensor, left: Tensor, right: Tensor) -> None:
    """As cuBLAS does it."""
    total += left.float().t() @ right.float()


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "plain"), (torch.float64, "plain"), (torch.bfloat16, "rounded"), (torch.float16, "rounded")],
)
def test_a_cpu_has_one_form_of_each(dtype: torch.dtype, name: str) -> None:
    choice = Tuner().choose(question(product(dtype)))
    assert (choice.name, choice.source) == (name, ONLY_ONE) and choose(product(dtype)) is FORMS[name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_that_is_rounded_is_told_from_an_exact_one(dtype: torch.dtype) -> None:
    given = weight_gradient._stand_ins(product(dtype, rows=512), 1)
    assert given is not None and weight_gradient._disagreement(wide, given) is None
    assert "differs from the reference by" in (weight_gradient._disagreement(FORMS["rounded"], given) or "")


def test_an_exact_form_wins_over_a_rounded_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(FORMS, "mm", wide)
    monkeypatch.setattr(weight_gradient, "why_not", lambda name, product: "no" if name == "plain" else None)
    monkeypatch.setattr(weight_gradient, "TUNER", Tuner())
    assert choose(product(torch.bfloat16)) is wide  # what it calls cuBLAS for raises here
    (choice,) = weight_gradient.TUNER.choices.values()
    assert set(choice.seconds) == {"mm"} and set(choice.ruled_out) == {"plain", "addmm", "rounded"}


def test_fewer_rows_of_the_total_are_stand_ins_too() -> None:
    total, left, right = weight_gradient._stand_ins(product(torch.bfloat16), 4) or ()
    assert (total.shape, left.shape, right.shape) == ((12, 32), (64, 12), (64, 32))
    assert weight_gradient._stand_ins(product(torch.bfloat16), 64) is None


def test_a_form_that_is_named_is_taken_or_refused() -> None:
    assert choose(product(torch.bfloat16), "rounded") is FORMS["rounded"]
    with pytest.raises(BadOption, match=r"'addmm' for weight gradient .*it runs on cuda, the call is on cpu"):
        choose(product(torch.bfloat16), "addmm")
    with pytest.raises(BadOption, match=r"did you mean rounded\?"):
        choose(product(torch.bfloat16), "round")


@pytest.mark.gpu
def test_cuda_adds_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path))
    asked = question(Product(2048, (4096, 1024), torch.bfloat16, torch.float32, torch.device("cuda", 0)))
    choice = Tuner().choose(asked)
    assert choice.source == MEASURED and choice.name in ("addmm", "mm") and set(choice.seconds) == {"addmm", "mm"}, (
        choice
    )
    assert "differs from the reference by" in choice.ruled_out["rounded"]
