"""R-GCN: a typed graph in, logits of the kind of every node out.

Nodes have no features: each has an embedding that is learned, and what all share is added to it, so that a node that was never
labelled still tells its neighbours by which relations it is joined to them. A layer is the mean of the messages that come in, each
through the matrix of its relation, beside the node itself. With `bases` the matrices are mixtures of a few.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep import relational as rel
from wholestep.data.pygraph import FILES, KINDS, RELATIONS
from wholestep.errors import BadOption


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RGCNConfig:
    """Sizes of an R-GCN."""

    width: int = 32
    bases: int = 0
    """Matrices that those of the relations are mixed from; 0: each relation has its own."""
    dropout: float = 0.0
    classes: int = len(KINDS)
    relations: int = 2 * len(RELATIONS)
    nodes: int = 0
    """0: as many as the graph has."""
    files: int = FILES
    """Files of the library that the graph is read from."""

    def __post_init__(self) -> None:
        for name, least in (("width", 1), ("bases", 0), ("classes", 2), ("relations", 1), ("nodes", 0), ("files", 1)):
            if getattr(self, name) < least:
                raise BadOption(f"{name}={getattr(self, name)}", hint=f"use {least} or more")
        if not 0 <= self.dropout < 1:
            raise BadOption(f"dropout={self.dropout}", hint="use 0 or more, and less than 1")


def message(e: Any, p: Any) -> Tensor:
    return (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1)


class Relational(nn.Module):
    """One layer."""

    def __init__(self, config: RGCNConfig) -> None:
        super().__init__()
        width, relations, bases = config.width, config.relations, config.bases
        self.mixture = nn.Parameter(torch.randn(relations, bases) / bases**0.5) if bases else None
        self.matrices = nn.Parameter(torch.randn(bases or relations, width, width) / width**0.5)
        self.itself = nn.Linear(width, width)
        self.mean = rel.layer(message, aggregate="mean")

    def forward(self, graph: rel.RelGraph, x: Tensor) -> Tensor:
        matrices = self.matrices
        if self.mixture is not None:
            matrices = (self.mixture @ matrices.flatten(1)).view(-1, *matrices.shape[1:])
        return self.mean(graph, {"x": x}, {"W": matrices}) + self.itself(x)


class RGCN(nn.Module):
    """The whole model."""

    def __init__(self, config: RGCNConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(0.1 * torch.randn(config.nodes, config.width))
        self.shared = nn.Parameter(torch.randn(config.width))
        self.layers = nn.ModuleList(Relational(config) for _ in range(2))
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, graph: rel.RelGraph) -> Tensor:
        x = self.embedding + self.shared
        for layer in self.layers:
            x = F.dropout(F.relu(layer(graph, x)), self.config.dropout, self.training)
        return self.head(x)


def kind_loss(model: Any, batch: dict[str, Any]) -> Tensor:
    """Mean cross-entropy of the right kind, over the nodes whose kind is told."""
    return F.cross_entropy(model(batch["graph"])[batch["nodes"]], batch["labels"])
