"""A step that makes its saved values again trains bit for bit as one that keeps them, and holds less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.fuzz.check import assert_right
from tests.fuzz.program import Case
from torch import nn

import wholestep
from wholestep.errors import BadOption
from wholestep.graph.keys import value_keys
from wholestep.graph.plan import Plan
from wholestep.graph.segments import backward_segments
from wholestep.graph.training_graph import TrainingGraph, phase_of
from wholestep.graph.views import is_cheap_view
from wholestep.lower.footprint.predict import predict_profile
from wholestep.ops.record import may_recompute
from wholestep.passes.pipeline import Pipeline, default_pipeline
from wholestep.passes.recompute import recompute


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.second(x)))))


class Small(nn.Module):
    def __init__(self, layers: int = 3, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["next"].flatten())


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return [{"ids": torch.randint(0, 50, (8, 33)), "next": torch.randint(0, 50, (8, 33))} for _ in range(count)]


def everything(graph: TrainingGraph) -> Plan:
    """All that may be computed again, but what layers hand on to each other."""
    keys = value_keys(graph)
    values = [n for n in keys if not is_cheap_view(n) and may_recompute(n)]
    last = {path: keys[n] for n in values for path in [keys[n].partition("/")[0]] if path.endswith("*")}
    return Plan(recompute=tuple(sorted({keys[n] for n in values} - set(last.values()))))


def trained(
    passes: Any, precision: str, backend: str = "interpret"
) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = wholestep.compile(
        model,
        loss_fn,
        optimizer,
        batches(1)[0],
        precision=precision,
        backend=backend,
        passes=passes,
        cache=False,
        seed=3,
    )
    losses = [float(step(batch)) for batch in batches(5)]
    return losses, model.state_dict(), step.graph


def remake(graph: TrainingGraph) -> TrainingGraph:
    return recompute(graph, everything(graph))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_bit_stays_when_everything_is_made_again(precision: str) -> None:
    kept_losses, kept, before = trained([], precision)
    losses, state, after = trained([remake], precision)
    assert losses == kept_losses
    assert all(torch.equal(value, kept[name]) for name, value in state.items())
    copies = [n for n in after.operations() if (n.meta["custom"] or {}).get("recomputed")]
    targets = {str(n.target) for n in copies}
    assert {
        "aten.native_layer_norm.default",
        "ws.dropout.default",
        "aten.gelu.default",
        "ws.attention.default",
    } <= targets
    assert all(phase_of(n) == "backward" for n in copies)
    assert predict_profile(after).peak_bytes < predict_profile(before).peak_bytes


def test_nothing_is_shared_between_layers() -> None:
    _, _, graph = trained([remake], "fp32")
    segment = {node: where for where, node in backward_segments(graph)}
    for node in graph.operations():
        if (node.meta["custom"] or {}).get("recomputed"):
            assert {segment[user] for user in node.users} == {segment[node]}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_code_holds_the_equality_rule(precision: str) -> None:
    """Everything recomputed, dropout on, through Inductor: 2 to 3 minutes on two cores."""
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepared = wholestep.compile(
        model, loss_fn, optimizer, batches(1)[0], precision=precision, backend="interpret", check="off",
        passes=Pipeline(default_pipeline().passes),
    )  # fmt: skip
    report = wholestep.verify(
        model,
        loss_fn,
        optimizer,
        batches(3),
        precision=precision,
        backend="inductor",
        plan=everything(prepared.graph),
        steps=5,
    )
    assert report.ok, str(report)


def test_unknown_values_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(BadOption, match=r"blocks.\*/gelu1.*did you mean blocks.\*/gelu"):
        trained([lambda graph: recompute(graph, Plan(recompute=("blocks.*/gelu1",)))], "fp32")


def test_in_the_first_of_the_equal_layers_alone() -> None:
    kept_losses, kept, _ = trained([], "fp32")
    copies = {}
    for key in ("blocks.*/gelu", "blocks.*/gelu@1"):
        losses, state, graph = trained([lambda graph, key=key: recompute(graph, Plan(recompute=(key,)))], "fp32")
        assert losses == kept_losses and all(torch.equal(value, kept[name]) for name, value in state.items())
        copies[key] = [n for n in graph.operations() if n.meta["custom"].get("recomputed") and "gelu" in str(n.target)]
    assert len(copies["blocks.*/gelu"]) == len(Small().blocks) > len(copies["blocks.*/gelu@1"]) == 1
    assert "blocks.0" in copies["blocks.*/gelu@1"][0].meta["custom"]["module"]
    with pytest.raises(BadOption, match=r"'blocks.\*/gelu@9', and there are 3 such layers"):
        trained([lambda graph: recompute(graph, Plan(recompute=("blocks.*/gelu@9",)))], "fp32")


def test_random_numbers_without_a_key_are_never_drawn_again() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    assert not may_recompute(graph.call_function(torch.ops.aten.bernoulli.default, (x,)))
    assert may_recompute(graph.call_function(torch.ops.aten.gelu.default, (x,)))
    q = (x, x, x, None, True, 1.0)
    assert may_recompute(graph.call_function(torch.ops.ws.attention.default, (*q, 0.0, None)))
    assert not may_recompute(graph.call_function(torch.ops.ws.attention.default, (*q, 0.1, x)))


class Overwritten(nn.Module):
    """Nobody reads what the layer returned: it was written over before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(1, 4), nn.Parameter(torch.randn(2, 4))

    def forward(self, x: torch.Tensor) -> Any:
        part = self.layer(x).select(-1, 0).add_(0.5)
        return (self.weight * 1.5).square().mean(), {"part": part}


def test_the_output_of_a_module_that_nobody_reads_may_go() -> None:
    assert_right(Case(Overwritten, lambda: (torch.randn(2, 1),), guards=False, plan_seed=168), stage="recompute")
