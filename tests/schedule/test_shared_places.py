"""Lines about modules with two names, and several lines about the same operators: each counts, or both are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep
from wholestep.errors import BadOption
from wholestep.graph.plan import Plan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.RMSNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + F.silu(self.gate(y)) * self.up(y)


class Net(nn.Module):
    """Its last norm is called twice, and has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.again = self.blocks[1].norm

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.tanh(self.again(x))


def gated(x: Tensor, gate: Tensor, a: Tensor, up: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate, a)) * F.linear(x, up, b)


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def planned(say: Callable[[Any], object]) -> Plan:
    torch.manual_seed(0)
    model, batch = Net(), {"x": torch.randn(4, 8)}
    sch = wholestep.schedule(model)
    say(sch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = wholestep.compile(model, loss_fn, optimizer, batch, recipe=sch, backend="interpret")
    step(batch)
    return step.plan


@pytest.mark.parametrize(
    "say",
    [
        lambda at: at.precision("bf16"),
        lambda at: at.fuse(),
        lambda at: at.recompute(),
        lambda at: at.offload(),
    ],
)
def test_a_second_name_is_the_same_place(say: Callable[[Any], object]) -> None:
    """Graphs know a module by its first name."""
    first, second = (planned(lambda sch, name=name: say(sch[name])) for name in ("blocks.1.norm", "again"))
    for field in ("precision", "fuse", "recompute", "host"):
        assert getattr(first, field) == getattr(second, field)
    assert first.precision or first.fuse or first.recompute or first.host


def test_two_names_contradict_each_other() -> None:
    def say(sch: Any) -> None:
        sch["again"].precision("bf16")
        sch["blocks.1.norm"].precision("fp32")

    with pytest.raises(BadOption, match=r"contradicts line 1 .*both are about blocks\.1\.norm"):
        planned(say)


@pytest.mark.parametrize("verbs", [("fuse", "recompute"), ("recompute", "fuse")])
def test_two_lines_match_the_same_operators(verbs: tuple[str, str]) -> None:
    def say(sch: Any) -> None:
        for verb in verbs:
            getattr(sch["blocks.*"], verb)(pattern=gated)

    plan = planned(say)
    assert {"blocks.0/silu", "blocks.1/silu"} <= set(plan.recompute)
    assert plan.fuse == ("matched: fuse blocks.* pattern=gated",)
