"""Windows' biases: which are shared between the pictures of a batch, which stay, and that training is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.passes.alike import assert_trains_alike
from torch import nn

from wholestep.capture.dry import dry_capture
from wholestep.passes.share_bias import share_bias


class Windows(nn.Module):
    """Attention within windows, by relative position and masked by window, as Swin has it."""

    def __init__(self, *, masked: bool = True, learned: bool = False) -> None:
        super().__init__()
        self.qkv, self.table = nn.Linear(8, 24), nn.Parameter(torch.randn(2, 5, 5))
        mask = torch.where(torch.rand(3, 5, 5) > 0.6, -100.0, 0.0)
        self.mask = nn.Parameter(mask) if learned else mask
        self.masked = masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(-1, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        bias = self.table[None]
        if self.masked:
            pictures = x.shape[0] // 3
            bias = bias + self.mask.to(x.device)[None, :, None].expand(pictures, -1, -1, -1, -1).reshape(-1, 1, 5, 5)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def loss(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).square().mean()


def captured(device: str = "cuda", **options: bool) -> tuple[Any, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, batch = Windows(**options), torch.randn(12, 5, 8)
    return dry_capture(model, loss, torch.optim.SGD(model.parameters(), 0.1), batch, device=device).graph, model, batch


def tables(graph: Any) -> list[int]:
    """First sizes of the biases, forward and backward."""
    place = {"ws::biased_attention": 3, "ws::biased_attention_backward": 5}
    names = [(n, n.target._schema.name) for n in graph.operations() if hasattr(n.target, "_schema")]
    return [n.args[place[name]].meta["val"].shape[0] for n, name in names if name in place]


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [({}, [12, 12], [3, 3]), ({"masked": False}, [1, 1], [1, 1]), ({"learned": True}, [12, 12], [12, 12])],
    ids=["shifted windows", "plain windows", "a mask that learns"],
)
def test_which_are_shared(options: dict[str, bool], before: list[int], after: list[int]) -> None:
    graph = captured(**options)[0]
    assert tables(graph) == before
    assert tables(share_bias(graph)) == after


def test_a_cpu_keeps_plain_operators() -> None:
    assert tables(captured("cpu")[0]) == []


def test_the_same_training() -> None:
    plain, rewritten = captured("cpu")[0], share_bias(captured()[0])
    torch.manual_seed(1)
    assert_trains_alike(plain, rewritten, rtol=1e-4, atol=1e-5)
