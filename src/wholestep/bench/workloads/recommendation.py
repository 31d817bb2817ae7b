"""Recommendation: neural collaborative filtering (NeuMF), and a click model with many embedding tables (DLRM).

In: sizes. Out: a Training. The logs are synthetic: popular rows are common, and every user, item and category has a hidden taste
that decides, with the dense features, what is clicked.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.bench.workload import Part, Training, one_part
from wholestep.bench.workloads.making import cycled, drawn, moved, skewed
from wholestep.data.draws import generator_for
from wholestep.data.windows import Batch

DENSE = 13
"""Dense features, as in the Criteo logs."""


def _perceptron(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers with ReLU after each."""
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(sizes):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers)


class NeuMF(nn.Module):
    """He et al., 2017: a product of embeddings beside a perceptron over other embeddings; one logit out."""

    def __init__(self, *, users: int, items: int, factors: int, layers: Sequence[int]) -> None:
        super().__init__()
        self.user_factor, self.item_factor = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.user, self.item = nn.Embedding(users, layers[0] // 2), nn.Embedding(items, layers[0] // 2)
        for table in (self.user_factor, self.item_factor, self.user, self.item):
            nn.init.normal_(table.weight, std=0.01)
        self.perceptron, self.head = _perceptron(layers), nn.Linear(factors + layers[-1], 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        product = self.user_factor(users) * self.item_factor(items)
        mixed = self.perceptron(torch.cat([self.user(users), self.item(items)], dim=1))
        return self.head(torch.cat([product, mixed], dim=1)).squeeze(1)


def neumf_loss(model: Any, batch: Batch) -> Tensor:
    """Was it clicked?"""
    return F.binary_cross_entropy_with_logits(model(batch["users"], batch["items"]), batch["clicked"])


def build_neumf(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
    """NeuMF with Adam over whole tables."""
    rows, users, items = sizes["batch"], sizes["users"], sizes["items"]
    model = drawn(
        seed, device, lambda: NeuMF(users=users, items=items, factors=sizes["factors"], layers=sizes["layers"])
    )
    tastes = generator_for(seed, 0, "tastes")
    user_taste, item_taste = torch.randn(users, generator=tastes), torch.randn(items, generator=tastes)

    def make(number: int) -> Batch:
        generator = generator_for(seed, number, "clicks")
        who, what = skewed(users, (rows,), generator), skewed(items, (rows,), generator)
        clicked = (user_taste[who] + item_taste[what] > 0).float()
        return moved({"users": who, "items": what, "clicked": clicked}, device)

    batches = cycled(make, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=sizes["lr"], fused=device.type == "cuda" or None)
    part = Part(name="model", model=model, loss_fn=neumf_loss, optimizer=optimizer, example_batch=batches(0))
    return one_part(part, batches, units=rows, precision=sizes["precision"])


class DLRM(nn.Module):
    """Naumov et al., 2019: embeddings of the categories and of the dense features, multiplied pair by pair; one logit out."""

    def __init__(self, *, tables: int, rows: int, bottom: Sequence[int], top: Sequence[int]) -> None:
        super().__init__()
        width = bottom[-1]
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        for table in self.tables:
            nn.init.uniform_(table.weight, -(rows**-0.5), rows**-0.5)
        first, second = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("second", second, persistent=False)
        self.bottom = _perceptron([DENSE, *bottom])
        self.top = _perceptron([width + len(first), *top])
        self.head = nn.Linear(top[-1], 1)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """categories: [tables, rows, ids per bag]."""
        summary = self.bottom(dense)
        vectors = torch.stack([summary, *(table(ids) for table, ids in zip(self.tables, categories))], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        pairs = products[:, self.first, self.second]
        return self.head(self.top(torch.cat([summary, pairs], dim=1))).squeeze(1)


def dlrm_loss(model: Any, batch: Batch) -> Tensor:
    """Was it clicked?"""
    return F.binary_cross_entropy_with_logits(model(batch["dense"], batch["categories"]), batch["clicked"])


def build_dlrm(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
    """DLRM with plain SGD, which keeps no state beside its tables."""
    rows, tables, size = sizes["batch"], sizes["tables"], sizes["rows"]
    model = drawn(seed, device, lambda: DLRM(tables=tables, rows=size, bottom=sizes["bottom"], top=sizes["top"]))
    hidden = generator_for(seed, 0, "tastes")
    taste, weight = torch.randn(size, generator=hidden), torch.randn(DENSE, generator=hidden)

    def make(number: int) -> Batch:
        generator = generator_for(seed, number, "clicks")
        dense = torch.randn(rows, DENSE, generator=generator)
        categories = skewed(size, (tables, rows, sizes["ids"]), generator)
        clicked = (dense @ weight + taste[categories[0]].sum(dim=1) > 0).float()
        return moved({"dense": dense, "categories": categories, "clicked": clicked}, device)

    batches = cycled(make, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=sizes["lr"], fused=device.type == "cuda" or None)
    part = Part(name="model", model=model, loss_fn=dlrm_loss, optimizer=optimizer, example_batch=batches(0))
    return one_part(part, batches, units=rows, precision=sizes["precision"])
