"""Ranks side by side: an MLP made one rank's program by hand, so that nothing but the engine is under test."""

from __future__ import annotations

import copy
import importlib
import itertools
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import wholestep
from wholestep import Mesh, WholestepError
from wholestep.errors import NotBuiltYet, UnsupportedModel, UnsupportedOptimizer, WholestepWarning
from wholestep.graph.mesh import LAYOUT, RANKS, Cut, Ranks
from wholestep.lower.lockstep import RanksDiffer

ws = torch.ops.ws
RESOLVER = importlib.import_module("wholestep.schedule.resolve")


class Mlp(nn.Module):
    """Norm, a layer that is cut by columns, dropout, a layer that is cut by rows."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.p = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6), p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.dropout(F.gelu(self.up(self.norm(x))), self.p, self.training))


def loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def by_hand(ranks: Ranks, syncs: Any, root: Any, module: fx.GraphModule, paths: Any, *, enters: bool = True) -> None:
    """`schedule/sharding` in miniature, for the model above."""
    graph, parts = module.graph, ranks.mesh.tp
    up, down = [n for n in graph.nodes if n.target is torch._C._nn.linear]
    if enters:
        with graph.inserting_before(up):
            up.update_arg(0, graph.call_function(ws.enter.default, (up.args[0], "tp", parts)))
    for node in itertools.takewhile(lambda node: node is not down, graph.nodes):
        if node.target in (torch._C._nn.linear, torch._C._nn.gelu, F.dropout):
            node.meta[LAYOUT] = Cut(1, "tp").fact()
    x, weight, bias = down.args
    with graph.inserting_before(down):
        partial = graph.call_function(torch._C._nn.linear, (x, weight))
        whole = graph.call_function(ws.all_reduce.default, (partial, "tp", parts))
        result = graph.call_function(torch.add, (whole, bias))
    for node in (partial, whole, result):
        node.meta = dict(down.meta)
    down.replace_all_uses_with(result)
    graph.erase_node(down)
    module.recompile()
    module.meta[RANKS] = ranks


@pytest.fixture(autouse=True)
def _localised_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RESOLVER, "localised", by_hand)


def made(optimizer: Any = torch.optim.AdamW, p: float = 0.3, **options: Any) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    model = Mlp(p)
    batch = {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}
    sch = wholestep.schedule(model)
    sch["up"].shard("weight", 0)
    sch["up"].shard("bias", 0)
    sch["down"].shard("weight", 1)
    return model, optimizer(model.parameters(), lr=1e-2, **options), batch, sch


def trained(mesh: Mesh | None, steps: int = 3, optimizer: Any = torch.optim.AdamW, **options: Any) -> tuple[list, Any]:
    model, chosen, batch, sch = made(optimizer)
    recipe = {} if mesh is None else {"recipe": sch, "mesh": mesh}
    step = wholestep.compile(model, loss, chosen, batch, backend="interpret", seed=3, cache=False, **recipe, **options)
    losses = [float(step(batch)) for _ in range(steps)]
    assert step.rung == "whole step"
    return losses, model


@pytest.mark.parametrize(("tp", "options"), [
    (1, {}), (4, {}), (2, {"clip_norm": 0.1}), (2, {"accumulate": 2}), (4, {"precision": "bf16"}),
    (2, {"nonfinite": "skip"}), (2, {"precision": "fp16"}),
], ids=str)  # fmt: skip
def test_ranks_train_what_one_rank_trains(tp: int, options: dict[str, Any]) -> None:
    wide = options.get("precision", "fp32") == "fp32"
    losses, model = trained(Mesh(tp=tp), **options)
    wanted, alone = trained(None, **options)
    torch.testing.assert_close(losses, wanted, rtol=1e-5 if wide else 1e-2, atol=0)
    for name, parameter in model.named_parameters():
        # AdamW moves a parameter whose gradient is all rounding by as much as any other
        torch.testing.assert_close(parameter, alone.get_parameter(name), rtol=0, atol=1e-5 if wide else 3e-2)


@pytest.mark.parametrize("kind", ["SGD", "RMSprop", "Adagrad", "NAdam"])
def test_optimizers_update_parts(kind: str) -> None:
    optimizer = getattr(torch.optim, kind)
    losses, _ = trained(Mesh(tp=2), optimizer=optimizer)
    torch.testing.assert_close(losses, trained(None, optimizer=optimizer)[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("fused", [{"fused": True}], ids=str)
def test_torchs_own_kernels_update_parts(fused: dict[str, bool]) -> None:
    _, optimizer, batch, sch = made(torch.optim.AdamW, **fused)
    report = sch.verify(loss, optimizer, batch, mesh=Mesh(tp=2), steps=2)
    assert report.ok, report


def test_gradients_buffers_and_updates_against_eager() -> None:
    model, optimizer, batch, sch = made()
    before = copy.deepcopy(model.state_dict())
    report = wholestep.verify(model, loss, optimizer, batch, recipe=sch, mesh=Mesh(tp=4), clip_norm=0.5)
    assert report.ok and report.backend == "interpret", report
    assert {row.kind for row in report.rows} >= {"loss", "gradient", "parameter", "state", "random"}
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))


def test_state_stays_the_users() -> None:
    model, optimizer, batch, sch = made()
    keys, ids = list(model.state_dict()), [id(p) for p in model.parameters()]
    step = wholestep.compile(model, loss, optimizer, batch, recipe=sch, mesh=Mesh(tp=2), backend="interpret")
    step(batch)
    assert list(model.state_dict()) == keys and [id(p) for p in model.parameters()] == ids
    state = optimizer.state[model.up.weight]
    assert state["exp_avg"].shape == (8, 6) and bool(state["exp_avg"].ne(0).all()) and float(state["step"]) == 1
    assert step.graph.ranks.cuts["up.weight"].dim == 0 and "Mesh(tp=2) side by side" in step.explain()
    model.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()})
    assert float(step(batch)) == float(batch["y"].square().mean())


def test_gradients_are_handed_over_whole() -> None:
    model, _, batch, sch = made()
    step = wholestep.compile(model, loss, None, batch, recipe=sch, mesh=Mesh(tp=2), backend="interpret", seed=3)
    step(batch)
    found = {n: p.grad for n, p in model.named_parameters()}
    alone, _, _, _ = made()
    wholestep.compile(alone, loss, None, batch, backend="interpret", seed=3)(batch)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_a_missing_backward_sync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    without = lambda *args: by_hand(*args, enters=False)  # noqa: E731
    monkeypatch.setattr(RESOLVER, "localised", without)
    model, optimizer, batch, sch = made()
    before = copy.deepcopy(model.state_dict())
    step = wholestep.compile(
        model, loss, optimizer, batch, recipe=sch, mesh=Mesh(tp=2), backend="interpret", check="off"
    )
    with pytest.raises(RanksDiffer, match=r"a missing backward sync: the gradient of norm\.\w+ differs between rank 0 and rank 1"
                       r"; the next cut is line 1 of the schedule \(shard up"):  # fmt: skip
        step(batch)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))
    report = sch.verify(loss, optimizer, batch, mesh=Mesh(tp=2), steps=1, edge_batches=[])
    assert not report.ok and report.first_departure.kind in ("ranks", "gradient")
    assert "shard up" in str(report.first_departure.guilty_verb) or "shard up" in " ".join(report.notes)


def test_ranks_that_draw_by_themselves_differ_from_the_whole() -> None:
    model, optimizer, batch, sch = made()
    sch[""].fork_rng()
    step = wholestep.compile(
        model, loss, optimizer, batch, recipe=sch, mesh=Mesh(tp=2), backend="interpret", seed=3, check="off"
    )
    forked = [float(step(batch)) for _ in range(2)]
    again, optimizer, _, sch = made()
    sch[""].fork_rng()
    step = wholestep.compile(
        again, loss, optimizer, batch, recipe=sch, mesh=Mesh(tp=2), backend="interpret", seed=3, check="off"
    )
    assert [float(step(batch)) for _ in range(2)] == forked != trained(Mesh(tp=2), 2)[0]


class Whole(nn.Module):
    """Drops values that every rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.mlp(x), 0.2)


def test_ranks_may_not_draw_differently_for_the_same_value() -> None:
    _, _, batch, _ = made()
    model = Whole()
    sch = wholestep.schedule(model)
    sch["mlp.up"].shard("weight", 0)
    sch["mlp.up"].shard("bias", 0)
    sch["mlp.down"].shard("weight", 1)
    sch[""].fork_rng()
    with pytest.raises(WholestepError, match="fork_rng: a value that is the same along 'tp' would differ"):
        wholestep.compile(model, loss, None, batch, recipe=sch, mesh=Mesh(tp=2), backend="interpret")


class HalfMuon(torch.optim.Adafactor):
    """Not torch's own: its update runs in Python, on whole parameters."""


def test_optimizers_that_need_the_whole_are_refused_by_name() -> None:
    model, optimizer, batch, sch = made(torch.optim.Adafactor)
    with pytest.raises(UnsupportedOptimizer, match=r"Adafactor needs whole parameters, and up.weight is cut \(line 1"):
        wholestep.compile(model, loss, optimizer, batch, recipe=sch, mesh=Mesh(tp=2), backend="interpret")
    model, optimizer, batch, sch = made(HalfMuon)
    with pytest.warns(match="the update runs in eager PyTorch"):
        step = wholestep.compile(model, loss, optimizer, batch, recipe=sch, mesh=Mesh(tp=2), backend="interpret")
    assert float(step(batch)) > float(step(batch))


# fmt: off
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"mesh": Mesh(tp=2), "backend": "inductor"}, NotBuiltYet, r"backend='inductor' with mesh=Mesh\(tp=2\)"),
    ({"mesh": Mesh(tp=2), "dynamic": True}, NotBuiltYet, "dynamic=True with mesh"),
    ({"mesh": Mesh(tp=2), "clip_norm": 1.0, "clip_scope": "layer"}, NotBuiltYet, "clip_scope='layer' with mesh"),
    ({"mesh": Mesh(pp=2)}, NotBuiltYet, r"Mesh\(pp=2\): an axis 'pp' of several ranks is not built yet"),
    ({"mesh": Mesh(dp=2)}, NotBuiltYet, r"Mesh\(dp=2\): an axis 'dp' of several ranks is not built yet"),
    ({"mesh": 2}, WholestepError, "mesh=2. give a wholestep.Mesh"),
    ({"mesh": None}, WholestepError, r"line 1 of the schedule .*there is no mesh.*mesh=wholestep.Mesh\(tp=2\)"),
    ({"mesh": Mesh(tp=3)}, WholestepError, "of size 8, cannot be cut into 3 equal parts. 2 ranks would do"),
]
# fmt: on


@pytest.mark.parametrize(("options", "error", "text"), REFUSED, ids=str)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    model, optimizer, batch, sch = made()
    with pytest.raises(error, match=text):
        wholestep.compile(model, loss, optimizer, batch, recipe=sch, **{"backend": "interpret", **options})


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model, optimizer, batch, sch = made()
    with pytest.raises(NotBuiltYet, match="WORLD_SIZE=2, several processes, with mesh"):
        wholestep.compile(model, loss, optimizer, batch, recipe=sch, mesh=Mesh(tp=2), backend="interpret")


def test_several_ranks_never_fall_to_eager() -> None:
    model, optimizer, batch, sch = made()

    def odd(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        value = loss(model, batch)
        return value if sys._getframe(0).f_lineno > float(value) else value * 2

    with pytest.raises(UnsupportedModel, match=r"Mesh\(tp=2\) needs the whole step, which was not captured"):
        wholestep.compile(model, odd, optimizer, batch, recipe=sch, mesh=Mesh(tp=2), backend="interpret")


def test_hooks_on_parts_are_refused() -> None:
    model, optimizer, batch, sch = made()
    model.up.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(UnsupportedModel, match=r"up.weight is cut .*a hook on it would see a part"):
        wholestep.compile(model, loss, optimizer, batch, recipe=sch, mesh=Mesh(tp=2), backend="interpret")


def test_a_mesh_without_a_recipe_runs_the_same_on_every_rank() -> None:
    model, optimizer, batch, _ = made()
    with pytest.warns(WholestepWarning, match=r"Mesh\(tp=2\): no line of a recipe cuts a parameter"):
        step = wholestep.compile(model, loss, optimizer, batch, mesh=Mesh(tp=2), backend="interpret", seed=3)
    assert [float(step(batch)) for _ in range(3)] == trained(None)[0]
