"""What lean layers keep for the backward, to the byte, against what PyTorch keeps; and that the bits are PyTorch's."""

from __future__ import annotations

import argparse
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.nn.lean_models import HIDDEN, Block, Net, differing, outcome, saved_bytes, twins
from torch import Tensor, nn

import wholestep

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
B, S, HEADS = 2, 5, 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_keeps_ten_of_sixteen_tensors_of_its_input(dtype: torch.dtype) -> None:
    x = torch.randn(B, S, HIDDEN, dtype=dtype, requires_grad=True)
    plain, lean = twins(Block, dtype)
    unit = x.numel() * x.element_size()
    # two numbers per row for each norm (at most float32), one per query and head
    norm_stats = 2 * 2 * B * S * 4
    logsumexp = B * HEADS * S * 4
    small = saved_bytes(plain, x) - 16 * unit
    assert saved_bytes(lean, x) == 10 * unit + small
    assert 0 < small <= norm_stats + logsumexp


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [True, False])
def test_a_converted_model_has_the_bits_of_the_plain_one(dtype: torch.dtype, training: bool) -> None:
    plain, lean = twins(Net, dtype)
    x = torch.randn(B, S, HIDDEN, dtype=dtype)
    assert differing(outcome(plain.train(training), x), outcome(lean.train(training), x)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", [True, False])
def test_autocast_gives_the_dtypes_and_bits_of_eager(dtype: torch.dtype, inside: bool) -> None:
    plain, lean = twins(Net)
    x = torch.randn(B, S, HIDDEN)
    found = []
    for model in (plain, lean):
        with torch.autocast("cpu", dtype):
            out = model(x)
            assert out.dtype == dtype
            if inside:
                out.float().square().sum().backward()
        if not inside:
            out.float().square().sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters()} | {"output": out.detach()})
    assert differing(*found) == []


def test_training_for_some_steps_gives_the_same_parameters() -> None:
    plain, lean = twins(Net)
    for model in (plain, lean):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(5)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(B, S, HIDDEN)).square().mean().backward()
            optimizer.step()
    assert differing(plain.state_dict(), lean.state_dict()) == []


PAIRS = {
    "gelu": (lambda x, w, b: F.linear(F.gelu(x), w, b), wholestep.nn.gelu_linear),
    "gelu tanh": (
        lambda x, w, b: F.linear(F.gelu(x, approximate="tanh"), w, b),
        lambda x, w, b: wholestep.nn.gelu_linear(x, w, b, approximate="tanh"),
    ),
    "silu": (lambda x, w, b: F.linear(F.silu(x), w, b), wholestep.nn.silu_linear),
    "layer norm": (
        lambda x, w, b: F.linear(F.layer_norm(x, x.shape[-1:]), w, b),
        lambda x, w, b: wholestep.nn.layer_norm_linear(x, None, None, w, b),
    ),
    "rms norm": (
        lambda x, w, b: F.linear(F.rms_norm(x, x.shape[-1:]), w, b),
        lambda x, w, b: wholestep.nn.rms_norm_linear(x, None, w, b),
    ),
}


class Pair(nn.Module):
    """One function of (x, weight, bias) as a module."""

    def __init__(self, function: object, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1, 1, 7 * 5).view(7, 5).to(dtype))
        self.bias = nn.Parameter(torch.linspace(0, 1, 7).to(dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)  # type: ignore[operator]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (0, 5)])
def test_a_pair_keeps_its_input_and_has_the_bits_of_the_two_functions(
    name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = (3 * torch.randn(shape)).to(dtype)
    eager, lean = (Pair(function, name != "silu", dtype) for function in PAIRS[name])
    assert differing(outcome(eager, x), outcome(lean, x)) == []
    kept = saved_bytes(lean, x.requires_grad_())
    size = x.numel() * x.element_size()
    statistics = 2 * (x.numel() // 5) * max(4, x.element_size()) if name == "layer norm" else 0
    assert size <= kept <= size + statistics
    assert saved_bytes(eager, x) >= kept + size


def test_swiglu_keeps_gate_and_up() -> None:
    def eager(g: Tensor, u: Tensor) -> Tensor:
        return F.linear(F.silu(g) * u, weight)

    weight = nn.Parameter(torch.randn(4, 6))
    found, kept = [], []
    for function in (eager, lambda g, u: wholestep.nn.swiglu_linear(g, u, weight)):
        g, u = (torch.randn(3, 6, generator=torch.Generator().manual_seed(s), requires_grad=True) for s in (1, 2))
        weight.grad = None
        out = function(g, u)
        out.square().sum().backward()
        found.append({"out": out.detach(), "g": g.grad, "u": u.grad, "w": weight.grad})
        module = nn.Module()
        module.forward = function  # type: ignore[assignment]
        kept.append(saved_bytes(module, g, u))
    assert differing(*found) == []
    assert kept == [4 * 3 * 6 * 4, 2 * 3 * 6 * 4]


def test_a_frozen_weight_keeps_no_input_at_all() -> None:
    plain, lean = twins(lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))
    for model in (plain, lean):
        model[1].requires_grad_(False)
        model[3].requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=True)
    assert saved_bytes(lean, x) == saved_bytes(plain, x)
    assert differing(outcome(plain, x), outcome(lean, x)) == []


def test_second_derivatives_are_right() -> None:
    make = lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2))  # noqa: E731
    lean = twins(make, torch.float64)[1]
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    arguments = (x, *lean.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: lean(x), arguments)
    assert torch.autograd.gradgradcheck(lambda x, *_: lean(x), arguments)


def test_second_derivatives_through_a_replayed_function_are_right() -> None:
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(4, dtype=torch.float64, requires_grad=True)
    gate, up = (torch.randn(2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def function(gate: Tensor, up: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        return wholestep.nn.swiglu_linear(wholestep.nn.rms_norm(gate, (4,), scale, 1e-6), up, weight)

    assert torch.autograd.gradgradcheck(function, (gate, up, scale, weight))


ROOT = Path(__file__).resolve().parents[2]


def test_the_page_says_what_the_benchmark_prints() -> None:
    page = (ROOT / "docs" / "lean-layers.md").read_text("utf-8")
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "lean_layers.py"))
    rows = benchmark["table"](argparse.Namespace(hidden=256, tokens=128, batch=2), "cpu")
    for row, expected in zip(rows, (10, 10, 11.25), strict=True):
        assert expected <= row["converted_bytes"] / row["T_bytes"] <= expected + 0.05
        for name in ("eager_bytes", "converted_bytes"):
            assert f"{row[name] / row['T_bytes']:.2f} T ({row[name]:,}" in page


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "lean-layers.md").read_text("utf-8")
    example = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert example is not None
    exec(compile(example.group(1), "lean-layers.md", "exec"), {})
    assert "4 swapped, 0 left" in capsys.readouterr().out


def test_the_names_load_on_first_use_and_lead_somewhere() -> None:
    code = "import wholestep, sys; wholestep.nn; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert all(callable(getattr(wholestep.nn, name)) for name in wholestep.nn.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'LayerNrom'"):
        _ = wholestep.nn.LayerNrom


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_cuda_a_block_has_the_bits_of_the_plain_one_and_keeps_less(dtype: torch.dtype) -> None:
    plain, lean = twins(lambda: Block(64, 4).cuda(), dtype)
    x = torch.randn(2, 16, 64, device="cuda", dtype=dtype, requires_grad=True)
    assert differing(outcome(plain, x), outcome(lean, x)) == []
    assert saved_bytes(plain, x) - saved_bytes(lean, x) == 6 * x.numel() * x.element_size()
