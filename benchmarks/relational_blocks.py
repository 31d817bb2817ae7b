"""Sampled blocks of a typed graph: what drawing and planning them takes beside the training step, captures, and padding.

In: a twin of a known graph by its name, fan-out, batch size, width. Out: one row of JSON.

    plan_ms   drawing a block and building its tables, alone: a pass over all of them without steps
    step_ms   one training step of a two-layer R-GCN on a block that is there: forward, backward, Adam
    loop_ms   both, as `for block in blocks: step(block)` has them; on a GPU a block is made while the step before it runs
    share     of the step's time that planning adds to it: loop_ms / step_ms - 1; wanted: below 0.1
    alone     plan_ms / step_ms
    together  how many blocks are made at once
    captures  in all; captures_in_loop: while the loop was timed, which then is no measurement

The network: learned vectors of all nodes, W (relations, width, width) twice, one product to 16 kinds; losses over the seeds. On a
CPU times are those of this process on its processor: where others use it too, take `--threads 1`.

    python benchmarks/relational_blocks.py --graph am --device cuda --out FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep
from wholestep import relational as rel
from wholestep.data.relational_twins import twin

KINDS = 16


class Network(nn.Module):
    def __init__(self, nodes: int, relations: int, width: int) -> None:
        super().__init__()
        self.node = nn.Parameter(torch.randn(nodes, width))
        self.W = nn.ParameterList(torch.randn(relations, width, width) * width**-0.5 for _ in range(2))
        self.kind = nn.Linear(width, KINDS)
        message = lambda e, p: (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1)  # noqa: E731
        self.mean = rel.layer(message, aggregate="mean per relation")

    def forward(self, block: rel.Block) -> Tensor:
        x = self.node.index_select(0, block.nodes)
        for W in self.W:
            x = F.relu(x + self.mean(block.graph, {"x": x}, {"W": W}))
        return self.kind(x[: block.seeds.shape[0]])


def loss_of(model: Any, block: rel.Block) -> Tensor:
    return F.cross_entropy(model(block), torch.where(block.is_seed, block.seeds % KINDS, -100))


def timed(call: Callable[[], Any], device: str) -> float:
    """Milliseconds, the device idle before and after; of this process on its processor where there is no GPU."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    if device == "cuda":
        torch.cuda.synchronize()
    began = clock()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (clock() - began)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    made = twin(given.graph, scale=given.scale)
    graph = rel.RelGraph(made.src, made.dst, made.etype, num_nodes=made.num_nodes, num_relations=made.num_relations)
    graph = graph.to(given.device)
    torch.manual_seed(0)
    wanted = given.blocks * given.batch_size
    seeds = torch.randperm(graph.num_nodes)[:wanted].to(given.device)
    generator = torch.Generator(given.device).manual_seed(0)
    finding: list[rel.Blocks] = []
    options = {"fanout": tuple(given.fanout), "batch_size": given.batch_size, "generator": generator}
    find_ms = timed(lambda: finding.append(rel.blocks(graph, seeds, **options)), given.device)
    blocks = finding[0]
    with torch.device(given.device):
        model = Network(graph.num_nodes, graph.num_relations, given.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=given.device == "cuda" or None)
    few = [block for block, _ in zip(blocks, range(4), strict=False)]
    step = wholestep.compile(
        model, loss_of, optimizer, few[0], backend=given.backend, precision=given.precision, verbose=False
    )
    for _ in range(3):  # a CUDA graph is chosen over several steps
        for block in few:
            step(block)
    step_ms = [timed(lambda block=block: step(block), given.device) for _ in range(5) for block in few]  # type: ignore[misc]
    count = len(blocks)
    plan_ms = [timed(lambda: [None for _ in blocks], given.device) / count for _ in range(3)]
    for _ in blocks:  # whatever is captured or compiled for other buckets is so before the clock runs
        step(_)
    captures = step.captures
    loop_ms = timed(lambda: [step(block) for block in blocks], given.device) / count
    row = {
        "graph": given.graph, "scale": given.scale, "nodes": graph.num_nodes, "edges": graph.num_edges,
        "relations": graph.num_relations, "fanout": given.fanout, "batch_size": given.batch_size, "width": given.width,
        "blocks": count, "step_ms": statistics.median(step_ms), "plan_ms": statistics.median(plan_ms), "loop_ms": loop_ms,
        "find_buckets_ms": find_ms, "captures": step.captures, "captures_in_loop": step.captures - captures,
        "steps": step.count, "rung": step.rung, "together": blocks.together,
        "buckets": [sizes._asdict() for sizes in blocks.buckets], "padding": blocks.report().splitlines(),
    }  # fmt: skip
    row |= {"share": row["loop_ms"] / row["step_ms"] - 1, "alone": row["plan_ms"] / row["step_ms"]}
    where = torch.cuda.get_device_name() if given.device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return row | {"backend": given.backend, "precision": given.precision, "device": where, "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="am", help="a twin: aifb, mutag, bgs, am, mag, wikikg2, biokg, fb15k-237")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--fanout", type=int, nargs="+", default=[10, 10])
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "interpret"))
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    row = measured(given)
    text = json.dumps(row, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
