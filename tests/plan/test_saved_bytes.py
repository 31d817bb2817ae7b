"""Bytes kept per pre-norm block in bf16, without a second matrix product or attention: to the byte.

T = batch x length x width x 2 bytes. What a block must keep of its own: q, k, v (3), the attention's result (1) and its
log-sum-exp, the second norm's input (1), the input of GELU (4); its own input belongs to the block before.
"""

from __future__ import annotations

import torch
from tests.passes.test_recompute import Block
from torch import nn

from wholestep.capture.dry import dry_capture
from wholestep.cost.devices import find_device
from wholestep.graph.copies import copy_graph
from wholestep.graph.keys import value_keys
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph, phase_of
from wholestep.graph.views import is_cheap_view
from wholestep.passes.pipeline import default_pipeline
from wholestep.plan.memory import MemoryPlanner
from wholestep.plan.peak import timeline
from wholestep.plan.problem import make_problem
from wholestep.plan.seconds import Clock

BATCH, LENGTH, WIDTH, HEADS = 4, 128, 128, 4
T = BATCH * LENGTH * WIDTH * 2


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))
        for block in self.blocks:
            block.drop.p = 0.0
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def prepared() -> TrainingGraph:
    model = Blocks()
    batch = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16)
    made = dry_capture(model, lambda m, b: m(b).float().square().mean(), torch.optim.SGD(model.parameters()), batch)
    return default_pipeline().run(made.graph)[0]


def kept_of_blocks(graph: TrainingGraph) -> dict[str, int]:
    """Per block: bytes made in its forward and read by the backward; storages once, its output left to the next block."""
    line = timeline(graph)
    keys = value_keys(graph)
    found: dict[str, int] = {}
    for storage, size in line.sizes.items():
        node = line.works[line.born[storage]].node
        last = line.works[line.last[storage]].node
        if phase_of(node) == "forward" and phase_of(last) == "backward" and keys[node].startswith("blocks.*"):
            path = (node.meta["custom"]["module"] or "").split(".")[1]
            found[path] = found.get(path, 0) + size
    return found


def matrix_work(graph: TrainingGraph) -> int:
    names = ("aten.mm", "aten.addmm", "aten.bmm", "ws.attention")
    return sum(str(node.target).startswith(names) for node in graph.operations() if not is_cheap_view(node))


def test_a_block_keeps_nine_of_eagers_fifteen() -> None:
    graph = prepared()
    problem = make_problem(graph, timeline(graph), Clock(find_device("h200")))
    for unit in problem.units.values():
        heavy = any(name in unit.key for name in ("/mm", "/addmm", "/bmm", "/attention"))
        unit.allowed = unit.allowed and not heavy
    least = MemoryPlanner(problem).least()
    lean = default_pipeline().carry_out(copy_graph(graph), Plan(recompute=least.again))
    assert matrix_work(lean) == matrix_work(graph)
    statistics = (
        BATCH * HEADS * LENGTH * 4 + 2 * 512
    )  # log-sum-exp in float32; seed and offset, an allocator block each
    kept = kept_of_blocks(lean)
    assert len(kept) == 4
    for block in ("0", "1", "2"):  # the last one's output is read by the loss
        own = kept[block] - T  # less its output, which is the next block's input
        assert own == 9 * T + statistics, f"{own / T:.3f} T"
        assert own <= 9.1 * T
    before = kept_of_blocks(graph)["1"] - T
    assert before >= 15 * T
