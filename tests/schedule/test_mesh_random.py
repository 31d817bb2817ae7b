"""Random models with random cuts, from a recipe to ranks side by side: trained as on one rank, or refused by one line."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.schedule.random_nets import Net, batch_of, loss_of

import wholestep
from wholestep import Mesh, WholestepError

pytestmark = pytest.mark.filterwarnings("ignore:.*stays whole")
STEPS = 3


def optimizer_of(pick: random.Random, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Two groups, one of them with weight decay. A large eps: a gradient of zero but for rounding moves nothing."""
    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) == deep] for deep in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
    if pick.random() < 0.5:
        return torch.optim.AdamW(groups, lr=0.01, eps=1e-2)
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True)


def trained(seed: int, ranks: int | None) -> dict[str, torch.Tensor]:
    """Losses, parameters, buffers and state after a few steps; None: without a mesh."""
    model = Net(seed).double()
    lines, pick = model.lines(), random.Random(seed)
    options: dict[str, Any] = {"accumulate": pick.choice((1, 2)), "clip_norm": pick.choice((None, 0.2, 100.0))}
    batch, optimizer = batch_of(seed, 3 * options["accumulate"]), optimizer_of(pick, model)
    if ranks is not None:
        sch = wholestep.schedule(model)
        for at, name, axis in lines:
            sch[at].shard(name, axis)
        options |= {"recipe": sch, "mesh": Mesh(tp=ranks)}
    step = wholestep.compile(model, loss_of, optimizer, batch, backend="interpret", seed=seed, check="off", **options)
    found = {f"loss {i}": step(batch).detach().clone() for i in range(STEPS)}
    state = {f"{i}/{k}": v for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()}
    return found | {n: v.detach().clone() for n, v in {**model.state_dict(), **state}.items()}


def outcome(seed: int, ranks: int) -> str:
    """Nothing, or why it is refused; what is trained otherwise raises."""
    try:
        ours = trained(seed, ranks)
    except WholestepError as error:
        text = str(error)
        assert "please report" not in text and "\n" not in text, text
        return text
    for name, value in trained(seed, None).items():
        torch.testing.assert_close(ours[name], value, rtol=1e-8, atol=1e-9, msg=lambda t, n=name: f"{seed}: {n}: {t}")
    return ""


@pytest.mark.parametrize("seed", [0, 2, 5, 7])
def test_trained_as_on_one_rank(seed: int) -> None:
    assert not outcome(seed, 2 + seed % 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 60))
def test_trained_as_on_one_rank_or_refused(seed: int) -> None:
    outcome(seed, 2 + seed % 3)
