"""A relational graph network: R-GCN (Schlichtkrull et al., 2017) that tells the kinds of nodes from who is linked to whom.

In: sizes. Out: a Training on the whole graph at once. The graph is synthetic: nodes belong to hidden kinds, and a relation links
most nodes of one kind to nodes of the kind that this relation leads to. The network is plain gather and index_add for the peers.
For Wholestep its layer is a message function; the graph's tables are built before training, for its links stay the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep import relational as rel
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


def message(e: Any, p: Any) -> Tensor:
    """A neighbour through the matrix of the link's relation."""
    return (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1)


class MessageLayer(RelationalLayer):
    """The same layer, with the same parameters, as a message function."""

    def __init__(self, relations: int, inside: int, outside: int) -> None:
        super().__init__(relations, inside, outside)
        self.mean = rel.layer(message, aggregate="mean per relation")

    def forward(self, x: Tensor, graph: rel.RelGraph) -> Tensor:  # type: ignore[override]
        return self.own(x) + self.mean(graph, {"x": x}, {"W": self.weight})


class RGCN(nn.Module):
    """Learned vectors of the nodes, two relational layers; logits of the kinds out."""

    def __init__(self, layer: type[RelationalLayer], *, nodes: int, relations: int, width: int, kinds: int) -> None:
        super().__init__()
        self.node = nn.Embedding(nodes, width)
        nn.init.normal_(self.node.weight, std=width**-0.5)
        self.first, self.second = layer(relations, width, width), layer(relations, width, kinds)

    def forward(self, *links: Any) -> Tensor:
        """What its layers take beside the nodes."""
        return self.second(F.relu(self.first(self.node.weight, *links)), *links)


def kind_loss(model: Any, batch: Batch) -> Tensor:
    """Cross-entropy of the kind of those nodes whose kind is known."""
    logits = model(batch["source"], batch["target"], batch["share"])
    return F.cross_entropy(logits[batch["known"]], batch["kinds"])


def kind_loss_by_tables(model: Any, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(model(batch["graph"])[batch["known"]], batch["kinds"])


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


def tables(links: Batch, nodes: int, relations: int) -> rel.RelGraph:
    """The same links as a RelGraph, on their device."""
    relation = torch.arange(relations, device=links["source"].device).repeat_interleave(links["source"].shape[1])
    ends = links["source"].reshape(-1), links["target"].reshape(-1)
    return rel.RelGraph(*ends, relation, num_nodes=nodes, num_relations=relations)


def build_rgcn(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
    """R-GCN on all links in every step; which nodes' kinds are known differs from batch to batch."""
    links = moved(relational_graph(sizes["nodes"], sizes["relations"], sizes["links"], sizes["kinds"], seed), device)
    return _training(sizes, device, seed, RelationalLayer, kind_loss, links)


def build_rgcn_by_tables(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
    """The same for Wholestep."""
    nodes, relations = sizes["nodes"], sizes["relations"]
    links = moved(relational_graph(nodes, relations, sizes["links"], sizes["kinds"], seed), device)
    graph = {"graph": tables(links, nodes, relations)}
    return _training(sizes, device, seed, MessageLayer, kind_loss_by_tables, graph)


def _training(
    sizes: dict[str, Any],
    device: torch.device,
    seed: int,
    layer: type[RelationalLayer],
    loss_fn: Any,
    links: dict[str, Any],
) -> Training:
    nodes, relations, kinds = sizes["nodes"], sizes["relations"], sizes["kinds"]
    model = drawn(
        seed, device, lambda: RGCN(layer, nodes=nodes, relations=relations, width=sizes["width"], kinds=kinds)
    )

    def make(number: int) -> dict[str, Any]:
        known = torch.randint(0, nodes, (sizes["known"],), generator=generator_for(seed, number, "known"))
        return links | moved({"known": known, "kinds": known % kinds}, device)

    batches = cycled(make, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=sizes["lr"], fused=device.type == "cuda" or None)
    part = Part(name="model", model=model, loss_fn=loss_fn, optimizer=optimizer, example_batch=batches(0))
    return one_part(part, batches, units=relations * sizes["links"], precision=sizes["precision"])
