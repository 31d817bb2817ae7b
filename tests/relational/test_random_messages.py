"""Message functions put together at random: over index spaces the same as edge by edge, with all gradients, or refused."""

from __future__ import annotations

import os
import random

import pytest
import torch
from tests.relational.graphs import NAMES, edges_of
from tests.relational.random_messages import TYPES, message_of, tensors

from wholestep import relational as rel
from wholestep.errors import UnsupportedModel
from wholestep.relational.layer import AGGREGATES

SEEDS = int(os.environ.get("WHOLESTEP_RANDOM_MESSAGES", "4"))
FIRST = int(os.environ.get("WHOLESTEP_RANDOM_MESSAGES_FROM", "0"))


def graph_of(name: str, choose: random.Random) -> rel.RelGraph:
    src, dst, etype, nodes, relations = edges_of(name)
    ntype = torch.tensor([choose.randrange(TYPES) for _ in range(nodes)], dtype=torch.int64)
    ntype = ntype.sort()[0] if choose.random() < 0.3 else ntype
    return rel.RelGraph(src, dst, etype, ntype=ntype, num_nodes=nodes, num_relations=relations, num_types=TYPES)


def difference(seed: int, mixing: float = 0.03) -> str | None:
    """None where both are equal, or what was refused."""
    choose = random.Random(seed)
    graph = graph_of(choose.choice(NAMES), choose)
    layer = rel.layer(message_of(seed, mixing), aggregate=choose.choice(AGGREGATES))
    nodes, params, edges = tensors(graph, seed)
    wanted = layer.reference(graph, nodes, params, edges)
    try:
        found = layer(graph, nodes, params, edges)
    except UnsupportedModel as refusal:
        return str(refusal)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-7)
    if not wanted.requires_grad:
        assert not found.requires_grad
        return None
    leaves = [t for t in (*nodes.values(), *params.values(), *edges.values()) if t.requires_grad]
    pull = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(seed), dtype=wanted.dtype)
    grads = [
        torch.autograd.grad((out * pull).sum(), leaves, allow_unused=True, materialize_grads=True)
        for out in (found, wanted)
    ]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(
            one, other, atol=1e-8 * max(1.0, float(other.abs().max()) if other.numel() else 0), rtol=1e-6
        )
    return None


def check(seed: int) -> None:
    told = difference(seed)
    if told is not None:  # by its line; without what mixes edges nothing is refused
        assert "random_messages.py:" in told, told
        assert difference(seed, mixing=0.0) is None


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_equal_or_refused(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST + SEEDS, 60))
def test_many_are_equal_or_refused(seed: int) -> None:
    check(seed)
