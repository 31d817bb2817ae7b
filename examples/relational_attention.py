"""Attention over relations and features of edges: a graph layer that no library has, as one message function.

Each edge has a relation and three numbers of its own (say, times). How much a node listens to an edge depends on both of its nodes,
on its relation and on its numbers. Wholestep computes products once per (node, relation) that occurs; beside it the same function
runs edge by edge in plain PyTorch, from the same start: equal losses, and how many times faster the step is, on one thread.

    python examples/relational_attention.py --steps 20
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep
from wholestep import relational as rel
from wholestep.data.relational_twins import twin

WIDE = 32


def message(e: Any, p: Any) -> Tensor:
    """From all edges at once: what each sends, times how much it is listened to."""
    m = torch.einsum("ei,eio->eo", e.src.x, p.W[e.type])
    logits = (e.dst.x * p.u[e.type]).sum(-1) + (m * p.v[e.type]).sum(-1) + (e.x * p.f[e.type]).sum(-1)
    return rel.edge_softmax(F.leaky_relu(logits))[:, None] * m


class Net(nn.Module):
    def __init__(self, graph: rel.RelGraph) -> None:
        super().__init__()
        sizes = {"W": (WIDE, WIDE), "u": (WIDE,), "v": (WIDE,), "f": (3,)}
        self.params = nn.ParameterDict({n: torch.randn(graph.num_relations, *s) * 0.2 for n, s in sizes.items()})
        self.x, self.head = nn.Parameter(torch.randn(graph.num_nodes, WIDE)), nn.Linear(WIDE, 4)
        self.layer = rel.layer(message)

    def forward(self, graph: rel.RelGraph, times: Tensor, *, plain: bool = False) -> Tensor:
        run = self.layer.reference if plain else self.layer
        return self.head(F.relu(run(graph, {"x": self.x}, dict(self.params.items()), {"x": times})))


def timed(step: Callable[[], Tensor], steps: int) -> tuple[list[float], float]:
    """Losses, and the processor seconds of the quickest step: other programs do not count."""
    losses, seconds = [], []
    for _ in range(steps):
        begun = time.process_time()
        losses.append(float(step()))
        seconds.append(time.process_time() - begun)
    return losses, min(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--backend", choices=["inductor", "interpret"], default="interpret")
    parser.add_argument(
        "--scale", type=float, default=0.2, help="of FB15k-237: 14,541 nodes, 310,116 edges, 237 relations"
    )
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = twin("fb15k-237", scale=given.scale)
    graph = rel.RelGraph(data.src, data.dst, data.etype, num_nodes=data.num_nodes, num_relations=data.num_relations)
    times, labels = torch.rand(graph.num_edges, 3), torch.randint(0, 4, (graph.num_nodes,))
    print(graph.report())
    model = Net(graph)
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, eager)]

    def loss(model: nn.Module, batch: dict[str, Tensor], plain: bool = False) -> Tensor:
        return F.cross_entropy(model(graph, batch["times"], plain=plain), batch["labels"])

    batch = {"times": times, "labels": labels}

    def plain_step() -> Tensor:
        optimizers[1].zero_grad()
        out = loss(eager, batch, plain=True)
        out.backward()
        optimizers[1].step()
        return out.detach()

    step = wholestep.compile(model, loss, optimizers[0], batch, backend=given.backend)
    ours, wholestep_s = timed(lambda: step(batch), given.steps)
    theirs, plain_s = timed(plain_step, given.steps)
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"loss {ours[0]:.3f} -> {ours[-1]:.3f} ({step.rung}), from plain PyTorch's at most {apart:.1e} apart")
    faster = plain_s / wholestep_s
    print(
        f"step: plain PyTorch {1000 * plain_s:.1f} ms, wholestep {1000 * wholestep_s:.1f} ms: {faster:.1f} times faster"
    )
    return 0 if apart < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
