"""A data-parallel step over two processes, its gradients reduced in one bucket, and not reduced at all.

Two ranks (gloo, on this machine) hold the same model and a batch each. A hook on every parameter averages its gradient
over the ranks, so the eager step and the captured one both hold the all-reduce. Without it every rank trains alone, and
no loss of the step shows it. Reported where training code calls the module inside the DDP wrapper, for example
https://github.com/huggingface/trl/issues/7245; here a rewrite takes collectives for nodes that copy their input.

`verify` runs on both ranks at once. It does so with `optimizer=None`: a Step over several processes leaves the update
to the caller.
"""

from __future__ import annotations

import datetime
import json
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.multiprocessing
import torch.nn.functional as F
from torch import nn

import wholestep
from wholestep.graph.training_graph import TrainingGraph
from wholestep.passes.pipeline import compiler_pass

from .splice import insert, put_in_place

c10d = torch.ops._c10d_functional
RANKS = 2
PATIENCE = datetime.timedelta(seconds=60)
"""Should one rank fail and the other not, they would wait for each other."""


def averaged(gradient: torch.Tensor) -> torch.Tensor:
    return collectives.all_reduce(gradient, "sum", dist.group.WORLD) / RANKS


@compiler_pass(numerics="bitwise")
def reduce_gradients_in_one_bucket(graph: TrainingGraph) -> TrainingGraph:
    """An all-reduce per gradient => one all-reduce of all of them, end to end."""
    waits = [n for n in graph.operations() if n.target is c10d.wait_tensor.default]
    averages = [next(iter(wait.users)) for wait in waits]
    gradients = [wait.args[0].args[0] for wait in waits]

    def in_one_bucket(*parts: torch.Tensor) -> list[torch.Tensor]:
        bucket = averaged(torch.cat([part.reshape(-1) for part in parts]))
        pieces = bucket.split([part.numel() for part in parts])
        return [piece.reshape(part.shape) for piece, part in zip(pieces, parts)]

    reduced = insert(graph, graph.output_node, in_one_bucket, *gradients, like=waits[-1])
    for wait, average, new in zip(waits, averages, reduced):
        put_in_place(graph, average, new)
        begun = wait.args[0]
        graph.graph.erase_node(wait)
        graph.graph.erase_node(begun)
    graph.module.recompile()
    return graph


@compiler_pass(numerics="bitwise")
def drop_collectives(graph: TrainingGraph) -> TrainingGraph:
    """wait(all_reduce(x)) => x, which has the same shape and dtype."""
    for wait in [n for n in graph.operations() if n.target is c10d.wait_tensor.default]:
        begun = wait.args[0]
        put_in_place(graph, wait, begun.args[0])
        graph.graph.erase_node(begun)
    graph.module.recompile()
    return graph


class Classifier(nn.Module):
    """Two layers, with names that a report can give."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.body(x)))


def classifier_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def run_rank(rank: int, folder: str, backend: str, steps: int) -> None:
    """What each process does: the same model, a batch of its own, an honest verification and a lying one."""
    torch.set_num_threads(1)
    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=RANKS, timeout=PATIENCE)
    torch.manual_seed(0)
    model = Classifier()
    for parameter in model.parameters():
        parameter.register_hook(averaged)
    torch.manual_seed(1 + rank)
    batch = {"x": torch.randn(6, 8), "y": torch.randint(0, 4, (6,))}
    found = {}
    for name, rewrite in (("honest", reduce_gradients_in_one_bucket), ("lying", drop_collectives)):
        began = time.perf_counter()
        report = wholestep.verify(
            model, classifier_loss, None, batch, steps=steps, passes=[rewrite], backend=backend, eval_too=False
        )
        found[name] = {
            "report": json.loads(report.to_json()),
            "said": str(report),
            "seconds": time.perf_counter() - began,
        }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def on_two_ranks(backend: str, steps: int) -> list[dict]:
    """What both ranks found."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (folder, backend, steps), nprocs=RANKS)
        return [json.loads(Path(folder, f"rank{rank}.json").read_text("utf-8")) for rank in range(RANKS)]
