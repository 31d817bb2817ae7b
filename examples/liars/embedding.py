"""An embedding split over its vocabulary, as Slapo splits it, and with the mask its hooks made.

Each shard looks up the ids it owns, shifted to its own rows, and zeroes the rest; the sum over shards is the embedding.
Slapo's hook after the look-up made the mask again from ids that the hook before it had already shifted: the first
shard masks nothing, the second everything, and every id of the second gets row 0
(https://github.com/awslabs/slapo/pull/80 says so for two of its models). Here the two shards lie in one process, where
their sum is an addition instead of an all-reduce.
"""

from __future__ import annotations

import functools

import torch

from wholestep.graph.training_graph import TrainingGraph
from wholestep.passes.pipeline import compiler_pass

from .splice import replace

aten = torch.ops.aten
SHARDS = 2


def look_up(weight: torch.Tensor, ids: torch.Tensor, *, mask_twice: bool) -> torch.Tensor:
    """The rows of `ids`, from `SHARDS` slices of the table."""
    rows = weight.shape[0] // SHARDS
    total = torch.zeros(*ids.shape, weight.shape[1], dtype=weight.dtype, device=weight.device)
    for first in range(0, rows * SHARDS, rows):
        foreign = (ids < first) | (ids >= first + rows)
        local = torch.where(foreign, 0, ids - first)
        found = torch.nn.functional.embedding(local, weight[first : first + rows])
        if mask_twice:
            foreign = (local < first) | (local >= first + rows)
        total = total + found.masked_fill(foreign.unsqueeze(-1), 0.0)
    return total


def _rewritten(graph: TrainingGraph, mask_twice: bool) -> TrainingGraph:
    for node in [n for n in graph.operations() if n.target is aten.embedding.default]:
        weight, ids = node.args[:2]
        replace(graph, node, functools.partial(look_up, mask_twice=mask_twice), weight, ids)
    return graph


@compiler_pass(numerics="bitwise")
def shard_embedding(graph: TrainingGraph) -> TrainingGraph:
    """embedding(weight, ids) => the sum of masked look-ups in two halves of the table."""
    return _rewritten(graph, False)


@compiler_pass(numerics="bitwise")
def shard_embedding_masking_twice(graph: TrainingGraph) -> TrainingGraph:
    """The same, the mask of the result made from the shifted ids."""
    return _rewritten(graph, True)
