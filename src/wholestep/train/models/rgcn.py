"""R-GCN: a typed graph in, logits of the kind of every node out.

Nodes have no features: each has an embedding that is learned, and what all share is added to it, so that a node that was never
labelled still tells its neighbours by which relations it is joined to them. A layer is the mean of the messages that come in, each
through the matrix of its relation, beside the node itself. With `bases` the matrices are mixtures of a few.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep import relational as rel
from wholestep.train.models.configs import RGCNConfig


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
