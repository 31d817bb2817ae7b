"""Small models of equal layers for the passes that look at layers, and how to compile them with chosen passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tests.runtime.twins import Side
from torch import nn

from wholestep.graph.training_graph import TrainingGraph
from wholestep.passes.pipeline import Pass, Pipeline, compiler_pass
from wholestep.passes.update_early import update_early

WIDTH, VOCABULARY, LENGTH = 16, 13, 6


class Block(nn.Module):
    """Enough operators to count as a layer of its own."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)) * 1.5) + 0.5)


class Stack(nn.Module):
    """Embedding, blocks, head; `tied` shares the embedding with the head."""

    def __init__(self, layers: int = 4, *, tied: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.unused = nn.Linear(width, 3)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_token(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def id_batches(count: int = 5, rows: int = 3) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(11)
    return [torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=source) for _ in range(count)]


def side_of(optimizer: Callable[[nn.Module], Any], **options: Any) -> Callable[[], Side]:
    def side() -> Side:
        model = Stack(**options)
        return Side(model, optimizer(model), next_token)

    return side


@compiler_pass(numerics="bitwise", for_updates=True)
@functools.wraps(update_early)
def early_at_every_layer(graph: TrainingGraph) -> TrainingGraph:
    """update_early without its least size, which tests' layers are far below."""
    return update_early(graph, min_bytes=0)


def early(*before: Pass, after: Sequence[Pass] = ()) -> Pipeline:
    return Pipeline([*before, early_at_every_layer, *after])


def updates(graph: TrainingGraph) -> list[Any]:
    ws = torch.ops.ws
    return [node for node in graph.operations() if node.target in (ws.adamw.default, ws.sgd.default)]


def targets(graph: TrainingGraph) -> list[str]:
    return [str(node.target) for node in graph.operations()]
