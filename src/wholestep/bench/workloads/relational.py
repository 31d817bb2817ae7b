"""A relational graph network: R-GCN (Schlichtkrull et al., 2017) that tells the kinds of nodes from who is linked to whom.

In: sizes. Out: a Training on the whole graph at once. The graph is synthetic: nodes belong to hidden kinds, and a relation links
most nodes of one kind to nodes of the kind that this relation leads to. The network is plain gather and index_add.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.bench.workload import Part, Training, one_part
from wholestep.bench.workloads.making import cycled, drawn, moved
from wholestep.data.draws import generator_for
from wholestep.data.windows import Batch

FAITHFUL = 0.8
"""Share of the links that follow their relation's rule."""


class RelationalLayer(nn.Module):
    """Every node gathers, per relation, the mean of its neighbours through that relation's matrix."""

    def __init__(self, relations: int, inside: int, outside: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(relations, inside, outside))
        nn.init.xavier_uniform_(self.weight)
        self.own = nn.Linear(inside, outside)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, share: Tensor) -> Tensor:
        """source, target, share: [relations, links]; share is 1 over the links of that relation into the target."""
        out = self.own(x)
        for relation, weight in enumerate(self.weight):
            messages = (x[source[relation]] @ weight) * share[relation, :, None]
            out = out.index_add(0, target[relation], messages.to(out.dtype))
        return out


class RGCN(nn.Module):
    """Learned vectors of the nodes, two relational layers; logits of the kinds out."""

    def __init__(self, *, nodes: int, relations: int, width: int, kinds: int) -> None:
        super().__init__()
        self.node = nn.Embedding(nodes, width)
        nn.init.normal_(self.node.weight, std=width**-0.5)
        self.first, self.second = RelationalLayer(relations, width, width), RelationalLayer(relations, width, kinds)

    def forward(self, source: Tensor, target: Tensor, share: Tensor) -> Tensor:
        hidden = F.relu(self.first(self.node.weight, source, target, share))
        return self.second(hidden, source, target, share)


def kind_loss(model: Any, batch: Batch) -> Tensor:
    """Cross-entropy of the kind of those nodes whose kind is known."""
    logits = model(batch["source"], batch["target"], batch["share"])
    return F.cross_entropy(logits[batch["known"]], batch["kinds"])


def relational_graph(nodes: int, relations: int, links: int, kinds: int, seed: int) -> Batch:
    """Links as [relations, links], with the share of each, and the kind of every node (node number modulo kinds)."""
    generator = generator_for(seed, 0, "graph")
    source = torch.randint(0, nodes, (relations, links), generator=generator)
    leads_to = torch.randint(0, kinds, (relations, 1), generator=generator)
    anywhere = torch.randint(0, nodes, (relations, links), generator=generator)
    kind = (source + leads_to) % kinds
    right = (anywhere // kinds * kinds + kind).clamp(max=nodes - 1)
    target = torch.where(torch.rand(relations, links, generator=generator) < FAITHFUL, right, anywhere)
    count = torch.zeros(relations, nodes).scatter_add(1, target, torch.ones(relations, links))
    return {"source": source, "target": target, "share": 1 / count.gather(1, target)}


def build_rgcn(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
    """R-GCN on all links in every step; which nodes' kinds are known differs from batch to batch."""
    nodes, relations, kinds = sizes["nodes"], sizes["relations"], sizes["kinds"]
    graph = moved(relational_graph(nodes, relations, sizes["links"], kinds, seed), device)
    model = drawn(seed, device, lambda: RGCN(nodes=nodes, relations=relations, width=sizes["width"], kinds=kinds))

    def make(number: int) -> Batch:
        known = torch.randint(0, nodes, (sizes["known"],), generator=generator_for(seed, number, "known"))
        return graph | moved({"known": known, "kinds": known % kinds}, device)

    batches = cycled(make, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=sizes["lr"], fused=device.type == "cuda" or None)
    part = Part(name="model", model=model, loss_fn=kind_loss, optimizer=optimizer, example_batch=batches(0))
    return one_part(part, batches, units=relations * sizes["links"], precision=sizes["precision"])
