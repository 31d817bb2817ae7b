"""Small typed graphs with what real ones have: hubs, loops, edges twice, nodes without any, relations without any."""

from __future__ import annotations

import torch

from wholestep.relational import RelGraph


def edges_of(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    """(src, dst, etype, nodes, relations)."""
    generator = torch.Generator().manual_seed(3)

    def some(count: int, most: int) -> torch.Tensor:
        return torch.randint(0, most, (count,), generator=generator)

    if name == "plain":
        return some(90, 20), some(90, 20), some(90, 4), 20, 4
    if name == "hubs":  # one source of everything, and one destination
        src, dst = some(120, 30), some(120, 30)
        return torch.where(some(120, 2) == 0, 0, src), torch.where(some(120, 3) == 0, 7, dst), some(120, 5), 30, 5
    if name == "empty relations, isolated nodes":
        return some(40, 10), some(40, 10) + 5, 2 * some(40, 3), 25, 9
    if name == "loops, edges twice":
        src = some(30, 8)
        return torch.cat([src, src, src]), torch.cat([src, src, 7 - src]), torch.cat([some(30, 2)] * 3), 8, 2
    if name == "one relation":
        return some(50, 12), some(50, 12), torch.zeros(50, dtype=torch.int64), 12, 1
    if name == "many relations":
        return some(300, 40), some(300, 40), some(300, 500), 40, 500
    if name == "few destinations":
        return some(80, 30), some(80, 4), some(80, 3), 30, 3
    if name == "either side":
        few, many = some(80, 2), some(80, 30)
        return torch.cat([few, many]), torch.cat([many, few]), torch.cat([some(80, 2), some(80, 2) + 2]), 30, 4
    if name == "few sources":
        return some(80, 4), some(80, 30), some(80, 3), 30, 3
    if name == "no edges":
        return some(0, 1), some(0, 1), some(0, 1), 6, 3
    assert name == "one edge"
    return torch.tensor([1]), torch.tensor([0]), torch.tensor([2]), 2, 3


NAMES = (
    "plain", "hubs", "empty relations, isolated nodes", "loops, edges twice", "one relation", "many relations", "few destinations",
    "few sources", "either side", "no edges", "one edge",
)  # fmt: skip


def made(name: str) -> RelGraph:
    src, dst, etype, nodes, relations = edges_of(name)
    return RelGraph(src, dst, etype, num_nodes=nodes, num_relations=relations)
