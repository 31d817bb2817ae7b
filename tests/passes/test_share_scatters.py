"""Gradients of gathers: which become products, which stay, and that training is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.passes.alike import assert_trains_alike
from torch import nn

from wholestep.capture.dry import dry_capture
from wholestep.passes.share_scatters import share_scatters


class Relative(nn.Module):
    """Scores by relative position, as DeBERTa has them: one index for all of a batch."""

    def __init__(self, *, shared: bool = True) -> None:
        super().__init__()
        self.position, self.shared = nn.Linear(4, 9), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        places = torch.arange(length)
        index = (places[:, None] - places[None, :] + 4).clamp(0, 8).expand(batch, length, length)
        if not self.shared:
            index = (index + (x[..., :1] > 0)).clamp(0, 8)
        return self.position(x).gather(-1, index)


def loss(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).square().mean()


def captured(model: nn.Module, rows: int, device: str = "cuda") -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return dry_capture(model, loss, optimizer, torch.randn(rows, 6, 4), device=device).graph


def scatters(graph: Any) -> list[str]:
    return [str(node.target) for node in graph.operations() if "scatter" in str(node.target)]


@pytest.mark.parametrize(
    ("rows", "shared", "device", "expected"),
    [
        (8, True, "cuda", "ws.scatter_shared.default"),
        (2, True, "cuda", "aten.scatter_add.default"),
        (8, False, "cuda", "aten.scatter_add.default"),
        (8, True, "cpu", "aten.scatter_add.default"),
    ],
    ids=["shared", "few rows", "an index of each row's own", "on a CPU"],
)
def test_which_are_rewritten(rows: int, shared: bool, device: str, expected: str) -> None:
    assert scatters(share_scatters(captured(Relative(shared=shared), rows, device))) == [expected]


def test_a_start_that_is_not_zero_stays() -> None:
    graph = captured(Relative(), 8)
    node = next(n for n in graph.operations() if n.target is torch.ops.aten.scatter_add.default)
    with graph.graph.inserting_before(node):
        ones = graph.graph.call_function(torch.ops.aten.full.default, (list(node.meta["val"].shape), 1))
    ones.meta = dict(node.meta)
    node.update_arg(0, ones)
    assert scatters(share_scatters(graph)) == ["aten.scatter_add.default"]


def test_the_same_training() -> None:
    torch.manual_seed(0)
    model = Relative()
    plain, rewritten = captured(model, 8, "cpu"), share_scatters(captured(model, 8, "cuda"))
    assert_trains_alike(plain, rewritten, rtol=1e-5, atol=1e-6)
