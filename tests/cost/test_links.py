"""Collectives cost time on links: ring formulas."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import fx

from wholestep.cost.devices import find_device
from wholestep.cost.node_costs import cost_of
from wholestep.cost.roofline import HOP_SECONDS, bound

ws = torch.ops.ws


def called(name: str, parts: int, *dim: int) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(1024, 1024, device="meta")
    node = graph.call_function(getattr(ws, name).default, (x, *dim, "tp", parts))
    node.meta["val"] = node.target(x.meta["val"], *node.args[1:])  # type: ignore[operator]
    return node


@pytest.mark.parametrize(("name", "dim", "share", "hops"), [
    ("all_reduce", (), 2 * 3 / 4, 6), ("all_gather", (0,), 3, 3), ("reduce_scatter", (0,), 3 / 4, 3), ("own_part", (0,), 0, 0),
])  # fmt: skip
def test_what_a_rank_sends(name: str, dim: tuple[int, ...], share: float, hops: int) -> None:
    cost = cost_of(called(name, 4, *dim))
    assert cost.kind == "collective" and cost.sent == share * 4 * 2**20 and cost.hops == hops
    device = find_device("h200")
    found = bound(cost, device)
    if hops:
        assert found.limit == "link" and found.seconds == cost.sent / 450e9 + hops * HOP_SECONDS
        slow = dataclasses.replace(device, nvlink_bandwidth=0.0)
        assert bound(cost, slow).seconds > found.seconds and slow.peer_bandwidth == device.link_bandwidth
    else:
        assert found.limit == "memory"
