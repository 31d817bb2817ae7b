"""A step whose saved values wait on the host trains bit for bit as one that keeps them, and compiles as little."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.passes.away import all_away, movable, run_graph
from tests.passes.stacks import Stack, id_batches, next_token
from tests.passes.test_recompute import Small, batches, loss_fn
from torch import nn
from torch.utils._pytree import tree_leaves

import wholestep
from wholestep.errors import BadOption
from wholestep.graph.copies import copy_graph
from wholestep.graph.keys import value_keys
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph
from wholestep.lower.footprint.predict import predict_profile
from wholestep.lower.inductor import imperative_form
from wholestep.lower.regions import Region, split_regions
from wholestep.passes.offload import offload
from wholestep.passes.pipeline import Pipeline, default_pipeline
from wholestep.passes.trips import base_of
from wholestep.passes.update_early import update_early
from wholestep.plan.peak import timeline

ws = torch.ops.ws


def moved(graph: TrainingGraph) -> list[torch.fx.Node]:
    return [node for node in graph.operations() if node.target is ws.copy_out.default]


def away(graph: TrainingGraph) -> TrainingGraph:
    return offload(graph, all_away(graph))


@functools.cache
def captured(precision: str) -> TrainingGraph:
    """A prepared step: fused QKV, dropout, three layers."""
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepare = Pipeline(default_pipeline().passes)
    step = wholestep.compile(
        model, loss_fn, optimizer, batches(1)[0], precision=precision, backend="interpret", passes=prepare, check="off"
    )
    return step.graph


@functools.cache
def kept(precision: str) -> list[torch.Tensor]:
    return run_graph(applied(precision, Plan()))


def applied(precision: str, plan: Plan) -> TrainingGraph:
    return default_pipeline().carry_out(copy_graph(captured(precision)), plan)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_bit_stays_when_everything_leaves(precision: str) -> None:
    before, after = applied(precision, Plan()), applied(precision, all_away(captured(precision)))
    assert all(map(torch.equal, run_graph(after), kept(precision)))
    assert len(moved(after)) > 20
    assert predict_profile(after).peak_bytes < 0.85 * predict_profile(before).peak_bytes
    assert timeline(after).peak_bytes < timeline(before).peak_bytes


def test_a_fused_product_leaves_as_one_and_its_parts_are_seen_in_it_again() -> None:
    graph = applied("fp32", Plan(host=("blocks.*.qkv/addmm",)))
    assert all(map(torch.equal, run_graph(graph), kept("fp32")))
    copies = moved(graph)
    assert len(copies) == 3, "in the last layer too there are pieces between the two readers"
    assert all(list(node.args[0].meta["val"].shape)[-1] == 3 * 32 for node in copies)  # type: ignore[union-attr]
    for copy in copies:
        readers = [u for u in copy.args[0].users if u.meta["custom"]["phase"] == "backward"]  # type: ignore[union-attr]
        assert not readers, "what left the card is not read there later"


def test_only_the_first_layers_and_all_still_compile_once() -> None:
    regions: dict[str, int] = {}
    for name, plan in (
        ("kept", Plan(cut_layers=True)),
        ("one", Plan(host=("blocks.*/gelu@1",))),
        ("all", Plan(host=("blocks.*/gelu",))),
    ):
        graph = applied("fp32", plan)
        pieces = split_regions(imperative_form(graph))
        regions[name] = len({piece.signature for piece in pieces if isinstance(piece, Region)})
        assert len(moved(graph)) == {"kept": 0, "one": 1, "all": 2}[name]
    assert len(set(regions.values())) == 1, regions


def test_a_value_is_recomputed_from_one_that_comes_back() -> None:
    graph = applied("fp32", Plan(host=("blocks.*.up/addmm",), recompute=("blocks.*/gelu",)))
    assert all(map(torch.equal, run_graph(graph), kept("fp32")))
    again = [n for n in graph.operations() if n.meta["custom"].get("recomputed") and "gelu" in str(n.target)]
    sources = [base_of(n.args[0]) for n in again]  # type: ignore[arg-type]
    assert sum(n is not None and n.target is ws.in_done.default for n in sources) == 2, "one layer turns round at once"


def test_names_stay_when_recomputing_removes_values() -> None:
    """A cast that the backward alone reads goes when it is recomputed; the numbers of those behind it stay."""
    away = tuple(key for key in movable(captured("bf16")) if "_to_copy#" in key)
    gone = tuple(key for key in value_keys(captured("bf16")).values() if key.endswith("/_to_copy"))
    plain, both = (applied("bf16", Plan(host=away, recompute=again)) for again in ((), gone))
    names = [{node.args[0].name for node in moved(graph)} for graph in (plain, both)]  # type: ignore[union-attr]
    assert names[1] and names[1] <= names[0]
    assert all(map(torch.equal, run_graph(both), kept("bf16")))


class InPlace(nn.Module):
    """Values that are overwritten, returned, and read through views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).mul_(1.5).relu_() * 2
        h[:, ::2] += 0.5
        q, k, v = self.second(h.t().contiguous().t()).sigmoid().split(3, dim=1)
        return self.third(torch.cat([q * k, (v * 1).add_(1), q], 1)).sum(1)


def test_values_that_are_written_in_place_in_a_model_without_layers() -> None:
    def run(passes: Any) -> tuple[list[float], list[Any], Any]:
        torch.manual_seed(0)
        model = InPlace()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        given = [torch.randn(5, 7, generator=torch.Generator().manual_seed(i)) for i in range(4)]
        step = wholestep.compile(
            model,
            lambda m, x: m(x).square().mean(),
            optimizer,
            given[0],
            passes=passes,
            backend="interpret",
            cache=False,
        )
        return [float(step(x)) for x in given], list(model.parameters()), step.graph

    losses, state, graph = run([away])
    kept_losses, kept, _ = run([])
    assert losses == kept_losses and all(map(torch.equal, state, kept))
    assert moved(graph)


AS_OPTIONS: list[dict[str, Any]] = [
    {"precision": "bf16"}, {"clip_norm": 0.1, "nonfinite": "skip"}, {"accumulate": 2}, {"early_update": False},
]  # fmt: skip


@pytest.mark.parametrize("options", AS_OPTIONS, ids=str)
def test_values_and_state_with_other_options(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tied weights, several groups, updates behind every layer, half of the values recomputed from what comes back."""
    monkeypatch.setattr("wholestep.passes.stream_state.MOST_BYTES", 3000)

    def run(plan: Plan) -> tuple[list[float], list[Any], Any]:
        torch.manual_seed(0)
        model = Stack(tied=True)
        matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
        optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "lr": 1e-3}], lr=1e-2, amsgrad=True)
        pipeline = default_pipeline()
        if options.get("early_update") is None:
            pipeline = pipeline.replaced("update_early", functools.partial(update_early, min_bytes=0))
        given = id_batches(6, rows=4)
        step = wholestep.compile(
            model, next_token, optimizer, given[0], plan=plan, passes=pipeline, backend="interpret", cache=False,
            check="off", offload_path=tmp_path if plan.file else None, **options,
        )  # fmt: skip
        pairs = [given[i : i + 2] for i in (0, 2, 4)] if "accumulate" in options else given
        losses = [float(step(batch)) for batch in pairs]
        return losses, tree_leaves((model.state_dict(), optimizer.state_dict())), step

    kept_losses, kept_state, step = run(Plan())
    plan = all_away(step.graph, half_recomputed=True)
    plan = dataclasses.replace(plan, host=plan.host[::2], file=plan.host[1::2], state={"*": "host"})
    losses, state, after = run(plan)
    assert losses == kept_losses
    for one, other in zip(state, kept_state, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert moved(after.graph) and after.regions["file_bytes"] and not list(tmp_path.iterdir())


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadOption, match=r"moves 'blocks.\*/gelu1'.*did you mean blocks.\*/gelu"):
        applied("fp32", Plan(host=("blocks.*/gelu1",)))
    with pytest.raises(BadOption, match=r"'blocks.\*/gelu@9', and there are 3 such layers"):
        applied("fp32", Plan(file=("blocks.*/gelu@9",)))


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("blocks.*/view", "is a view"),
        ("blocks.*.first/native_layer_norm", "no single tensor"),
        ("blocks.*.drop/dropout", "is not read by the backward pass"),
    ],
)
def test_what_can_never_leave_is_refused(key: str, told: str) -> None:
    with pytest.raises(BadOption, match=told):
        applied("fp32", Plan(host=(key,)))


def test_a_value_has_one_place() -> None:
    with pytest.raises(BadOption, match=r"a/b is listed under recompute and under host"):
        Plan(recompute=("a/b",), host=("a/b@3",))
    with pytest.raises(BadOption, match=r"a/b is listed under host and under file"):
        Plan(host=("a/b",), file=("a/b",))


def test_what_is_movable() -> None:
    known = {"blocks.*/gelu", "blocks.*.up/addmm", "blocks.*.qkv/addmm", "tokens/embedding"}
    assert known <= set(movable(captured("fp32")))
