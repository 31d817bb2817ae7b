"""Eager's own error is measured again where a step fails by it: a gradient that is nothing but rounding is small by luck."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

import wholestep
from wholestep.compiler import compiler_for
from wholestep.options import options_of
from wholestep.verify.reference import nudged
from wholestep.verify.report import Report, TensorRow
from wholestep.verify.side_by_side import SideBySide
from wholestep.verify.truth import Batch


class Attending(nn.Module):
    """The gradient of the bias in front of the normalisation is zero; inputs are small, so that it is all rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.qkv, self.head = nn.Linear(2, 24), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).view(len(x), -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(x.mean(1))


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(1e-3 * torch.randn(4, 3, 6, 6), torch.randint(0, 10, (4,))) for _ in range(count)]


def test_another_kernel_is_not_to_blame_for_what_rounds_otherwise() -> None:
    torch.manual_seed(2)
    model = Attending()
    schedule = wholestep.schedule(model)
    schedule.kernel(take="math")
    report = schedule.verify(
        loss_fn, torch.optim.SGD(model.parameters(), lr=1e-3), batches(3), steps=3, backend="interpret"
    )
    assert report.ok, str(report)


def test_rounding_is_excused_and_nothing_else() -> None:
    model = Attending()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    (given,) = batches(1)
    compiler = compiler_for(model, loss_fn, optimizer, options_of({"backend": "interpret"}), [[given]])
    beside, batch = SideBySide(compiler, Report("", "interpret")), Batch("0", 0, [given])
    made = beside.make(batch)
    truth = beside.references.truth(made.captured, made.variant.capture.graph, batch)
    assert truth.exact is not None and truth.exact.gradients["conv.bias"].norm() < 1e-12
    noise = float(truth.eager.gradients["conv.bias"].norm())
    rows = [
        TensorRow("0", "gradient", "conv.bias", 1e-3 * noise, 0.0, False),
        TensorRow("0", "gradient", "conv.bias", 1e3 * noise, 0.0, False),
        TensorRow("0", "gradient", "conv.bias", math.inf, 0.0, False),
        TensorRow("0", "gradient", "nobody's", 1e-3 * noise, 0.0, False),
        TensorRow("0", "parameter", "conv.bias", 1e-3 * noise, 0.0, False),
        TensorRow("0", "gradient", "conv.bias", 0.5, 1.0, False),
    ]
    found = beside.references.measured_again(made.captured, batch, truth, rows)
    assert [row.ok for row in found] == [True, False, False, False, False, True]
    assert found[3:] == rows[3:]


def test_a_start_is_moved_by_less_than_a_rounding() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        eps, values = torch.finfo(dtype).eps, {"w": torch.randn(500).to(dtype), "zero": torch.zeros(3, dtype=dtype)}
        moved = nudged(values, eps, 0)
        off = (moved["w"].double() - values["w"].double()).abs()
        assert float(off.max()) > 0 and bool((off <= eps * values["w"].double().abs()).all())
        assert torch.equal(moved["zero"], values["zero"]) and moved["w"].dtype is dtype
        assert torch.equal(nudged(values, eps, 0)["w"], moved["w"]) and not torch.equal(
            nudged(values, eps, 1)["w"], moved["w"]
        )
