"""Tensor parallelism, from a recipe to ranks side by side, against eager PyTorch: dropout, clipping and accumulation too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.schedule.mesh_models import RECIPES, Made, bert, cut_model, gpt2, llama, mixtral, t5
from torch import fx, nn

import wholestep
from wholestep import Mesh, WholestepError
from wholestep.graph.mesh import RANKS

pytestmark = pytest.mark.filterwarnings("ignore:.*stays whole")  # two heads of keys for four ranks
QUICK = {(gpt2, 4), (llama, 4), (t5, 2), (mixtral, 2)}
WHOLE_RANGE = [(make, tp) for make in RECIPES for tp in (2, 4)]
EVERY = [
    *(pytest.param(make, tp, 2, id=f"{make.__name__}-{tp}") for make, tp in WHOLE_RANGE if (make, tp) in QUICK),
    *(
        pytest.param(make, tp, 5, marks=pytest.mark.slow, id=f"{make.__name__}-{tp}-5 steps")
        for make, tp in WHOLE_RANGE
    ),
]


@pytest.mark.parametrize(("make", "tp", "steps"), EVERY)
def test_gradients_and_updates_are_those_of_one_rank(make: Callable[[], Made], tp: int, steps: int) -> None:
    """Gradients by the float64 rule after every one of the steps."""
    model, batch, sch = cut_model(make)
    assert len(sch) <= 15
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report = wholestep.verify(
        model, None, optimizer, batch, recipe=sch, mesh=Mesh(tp=tp), steps=steps, accumulate=2, clip_norm=0.5, seed=1,
        eval_too=make is bert,
    )  # fmt: skip
    assert report.ok, report
    assert {row.step for row in report.rows if row.kind == "gradient"} >= {str(step) for step in range(steps)}
    losses = [row.error for row in report.rows if row.kind == "loss"]
    assert len(losses) >= steps and max(losses) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("make", "tp"), WHOLE_RANGE)
def test_five_steps_are_those_of_one_rank(make: Callable[[], Made], tp: int) -> None:
    found = []
    for mesh in (Mesh(tp=tp), None):
        model, batch, sch = cut_model(make)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        recipe = {} if mesh is None else {"mesh": mesh, "recipe": sch}
        step = wholestep.compile(
            model, None, optimizer, batch, backend="interpret", accumulate=2, clip_norm=0.5, seed=1, **recipe
        )
        found.append([float(step(batch)) for _ in range(5)])
    assert found[0][0] != found[0][4]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=0)


# ---- every id of a cut vocabulary ----


class Vocabulary(nn.Module):
    """An embedding whose every row counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids)


@pytest.mark.parametrize("tp", [2, 4])
def test_an_embedding_that_is_cut_is_exact_for_every_id(tp: int) -> None:
    model = Vocabulary()
    sch = wholestep.schedule(model)
    sch["embed"].shard("weight", 0)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        out = model(batch["ids"])
        return (out * batch["by"]).sum(), {"out": out}

    batch = {"ids": torch.arange(12), "by": torch.randn(12, 5)}
    step = wholestep.compile(model, loss, None, batch, recipe=sch, mesh=Mesh(tp=tp), backend="interpret")
    _, aux = step(batch)
    assert torch.equal(aux["out"], model.embed.weight)
    assert torch.equal(model.embed.weight.grad, batch["by"])


# ---- what goes together, and what is found ----


class Mlp(nn.Module):
    def __init__(self, p: float = 0.25) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.p = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(
            self.down(F.dropout(F.gelu(self.up(self.norm(x))), self.p, self.training)), self.p, self.training
        )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Mlp(), Mlp(), Mlp())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def square(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def made() -> tuple[Net, torch.optim.Optimizer, dict[str, torch.Tensor], Any]:
    torch.manual_seed(0)
    model = Net()
    sch = wholestep.schedule(model)
    sch["layers.*.up"].shard("weight", 0)
    sch["layers.*.up"].shard("bias", 0)
    sch["layers.*.down"].shard("weight", 1)
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), batch, sch


OPTIONS: list[dict[str, Any]] = [
    {"precision": "bf16", "plan": wholestep.Plan(recompute=("layers.*/gelu",))},
    {"nonfinite": "skip", "clip_norm": 0.3, "early_update": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: next(iter(o)))
def test_ranks_go_together_with_the_other_options(options: dict[str, Any]) -> None:
    model, optimizer, batch, sch = made()
    report = wholestep.verify(model, square, optimizer, batch, recipe=sch, mesh=Mesh(tp=2), steps=2, **options)
    assert report.ok, report


def test_lines_about_values_and_modules_go_together_with_shard() -> None:
    _, optimizer, batch, sch = made()
    sch["layers.*"].recompute(ratio=1.0)
    sch["layers.1"].precision("bf16")
    report = sch.verify(square, optimizer, batch, mesh=Mesh(tp=2), steps=1)
    assert report.ok, report


class Convolved(nn.Module):
    """Channels are cut: running statistics of all of them stay whole in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
        self.each = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.up(x)))
        return self.down(
            self.each(self.norm(x))
        )  # of the same layer twice: the second adds to what the first has written


def test_norms_of_channels_keep_their_running_statistics() -> None:
    torch.manual_seed(0)
    model = Convolved()
    sch = wholestep.schedule(model)
    for at, param, axis in (("up", "weight", 0), ("up", "bias", 0), ("norm", "weight", 0), ("down", "weight", 1)):
        sch[at].shard(param, axis)
    batch = {"x": torch.randn(6, 3, 6, 6), "y": torch.randn(6, 4, 4, 4)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    report = sch.verify(square, optimizer, batch, mesh=Mesh(tp=4), steps=3, accumulate=2, eval_too=True)
    assert report.ok, report
    names = {row.name for row in report.rows if row.kind == "buffer"}
    assert {"norm.running_mean", "norm.running_var", "each.running_mean", "norm.num_batches_tracked"} <= names, names


def test_a_line_that_departs_is_named() -> None:
    _, optimizer, batch, sch = made()

    def wrong(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (8,), w, b, 1e-2)

    sch["layers.1"].replace(by=wrong, pattern=lambda x, w, b: F.layer_norm(x, (8,), w, b, 1e-5))
    report = sch.verify(square, optimizer, batch, mesh=Mesh(tp=2), steps=1, edge_batches=[])
    assert not report.ok and "replace layers.1" in str(report.first_departure.guilty_verb), report
    assert report.first_departure.module.startswith("layers.1")


def without_enter(module: fx.GraphModule) -> None:
    for node in list(module.graph.nodes):
        if node.target in (torch.ops.ws.enter, torch.ops.ws.enter.default):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()


def test_a_missing_backward_sync_is_caught_with_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from wholestep.schedule import cuts

    whole = cuts.localise

    def forgetful(module: fx.GraphModule, *args: Any, **options: Any) -> Any:
        found = whole(module, *args, **options)
        without_enter(module)
        return found

    monkeypatch.setattr(cuts, "localise", forgetful)
    model, optimizer, batch, sch = made()
    step = wholestep.compile(
        model, square, optimizer, batch, recipe=sch, mesh=Mesh(tp=2), backend="interpret", check="off"
    )
    with pytest.raises(WholestepError, match=r"a missing backward sync: .*layers\.2\.norm.*\(shard layers\.\*\.up"):
        step(batch)
    report = sch.verify(square, optimizer, batch, mesh=Mesh(tp=2), steps=1, edge_batches=[])
    assert not report.ok and "shard layers.*.up" in str(report.first_departure.guilty_verb), report


def test_an_explicit_sync_is_checked() -> None:
    model, optimizer, batch, sch = made()
    sch["layers.*.down"].sync("all_reduce")
    sch["layers.*.up"].sync("all_reduce", when="backward")
    step = wholestep.compile(model, square, optimizer, batch, recipe=sch, mesh=Mesh(tp=2), backend="interpret")
    step(batch)
    sch["layers.*.norm"].sync("all_reduce")
    with pytest.raises(WholestepError, match=r"line 6 of the schedule .*follows no exchange there"):
        wholestep.compile(model, square, optimizer, batch, recipe=sch, mesh=Mesh(tp=2), backend="interpret")


def test_shard_twice_is_refused() -> None:
    sch = made()[-1]
    with pytest.raises(WholestepError, match=r"layers.0.up.weight is cut already"):
        sch["layers.0.up"].shard("weight", 1)


def test_a_recipe_of_a_file_runs_on_a_mesh(tmp_path: Path) -> None:
    model, optimizer, batch, sch = made()
    sch["layers.*"].fork_rng()
    with pytest.raises(WholestepError, match=r"layers\.0.*would differ|would differ.*layers\.0"):
        wholestep.compile(model, square, optimizer, batch, recipe=sch, mesh=Mesh(tp=2), backend="interpret")
    sch.undo("fork_rng")
    sch.save(tmp_path / "recipe.toml")
    step = wholestep.compile(
        model, square, optimizer, batch, recipe=tmp_path / "recipe.toml", mesh=Mesh(tp=2), backend="interpret"
    )
    step(batch)
    assert step.graph.ranks.mesh == Mesh(tp=2) and len(step.graph.ranks.cuts) == 9


def test_graphs_of_a_mesh_are_kept_on_disk_apart() -> None:
    losses = []
    for mesh in (Mesh(tp=2), Mesh(tp=4), Mesh(tp=2)):
        model, optimizer, batch, sch = made()
        step = wholestep.compile(model, square, optimizer, batch, recipe=sch, mesh=mesh, backend="interpret", seed=1)
        assert step.graph.ranks.mesh == mesh
        losses.append(float(step(batch)))
    torch.testing.assert_close(losses, [losses[0]] * 3, rtol=1e-6, atol=0)
    assert RANKS not in model.__dict__


def test_a_plan_of_a_mesh_holds_for_that_mesh() -> None:
    model, optimizer, batch, sch = made()
    options: dict[str, Any] = {"backend": "interpret", "check": "off"}
    plan = wholestep.compile(model, square, optimizer, batch, recipe=sch, mesh=Mesh(tp=2), **options).plan
    assert plan.mesh == {"tp": 2}
    assert plan.shard == {"layers.*.up.weight": "0 tp", "layers.*.up.bias": "0 tp", "layers.*.down.weight": "1 tp"}
    wholestep.compile(model, square, optimizer, batch, recipe=sch, mesh=Mesh(tp=2), plan=plan, **options)
    with pytest.raises(WholestepError, match=r"the plan was made for mesh \{'tp': 2\}, now it is \{'tp': 4\}"):
        wholestep.compile(model, square, optimizer, batch, recipe=sch, mesh=Mesh(tp=4), plan=plan, **options)
    with pytest.raises(WholestepError, match=r"made with a recipe that cuts layers.\*.up.weight"):
        wholestep.compile(model, square, optimizer, batch, plan=plan, **options)
    with pytest.raises(WholestepError, match="a plan with stages"):
        wholestep.compile(model, square, optimizer, batch, plan=wholestep.Plan(stages={"layers.1": "1"}), **options)


def test_plan_tells_the_bytes_of_one_rank(tmp_path: Path) -> None:
    from wholestep.cost.target import find_target
    from wholestep.train.fit import Question, will_it_fit
    from wholestep.train.fit_text import fit_lines

    recipe = tmp_path / "shards.toml"
    rows = [
        f'{{ shard = "model.layers.*.{at}", axis = {axis} }},'
        for at, axis in (
            ("self_attn.[qkv]_proj", 0),
            ("self_attn.o_proj", 1),
            ("mlp.gate_proj", 0),
            ("mlp.up_proj", 0),
            ("mlp.down_proj", 1),
        )
    ]
    recipe.write_text("\n".join(["format = 1", "verbs = [", *rows, "]", "[end]"]))
    target = find_target("h200")
    fits = [
        will_it_fit(
            Question(
                model="hf:llama", sets=("num_hidden_layers=2", "vocab_size=256"), batch=2, seq=16, target=target,
                budget_bytes=target.device.memory_bytes, **more,
            ),
            find_batch=False,
        )
        for more in ({"recipe": str(recipe), "mesh": Mesh(tp=4)}, {})
    ]  # fmt: skip
    ranked, alone = (fit.frontier[fit.shown] for fit in fits)
    assert 0.2 < ranked.breakdown["weights"] / alone.breakdown["weights"] < 0.3
    assert ranked.plan.mesh == {"tp": 4} and "each of 4 ranks (Mesh(tp=4))" in fit_lines(fits[0])[0]
