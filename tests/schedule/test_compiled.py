"""Recipes through the compiler: what a Step runs, what its plan says, and what stays as it was."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.schedule.small_models import CARRIED, FastMLP, Net, linear_clamp, linear_relu, loss, made, wrong_linear
from torch import nn

import wholestep
from wholestep.errors import BadOption, BudgetTooSmall
from wholestep.graph.keys import layer_ranks, split_key, value_keys
from wholestep.graph.layers import layers_of
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import phase_of
from wholestep.graph.views import is_cheap_view
from wholestep.lower.in_place import write_state_in_place
from wholestep.lower.regions import Region, split_regions
from wholestep.passes.pipeline import Pipeline, name_of
from wholestep.schedule import Recipe, resolve
from wholestep.schedule.verb import make

QUICK: dict[str, Any] = {"backend": "interpret", "verbose": False, "check": "off"}


def compiled(model: Any, optimizer: Any, batch: Any, recipe: Any = None, **options: Any) -> Any:
    return wholestep.compile(model, loss, optimizer, batch, recipe=recipe, **{**QUICK, **options})


def layers_recomputed(step: Any) -> set[str]:
    """The layers of which the backward pass makes values again."""
    custom = [node.meta["custom"] for node in step.graph.operations() if node.meta.get("custom", {}).get("recomputed")]
    return {".".join(facts["module"].split(".")[:2]) for facts in custom}


def test_a_ratio_recomputes_so_many_layers() -> None:
    """Exactly round(ratio x 24) of 24, whatever the ratio; the graph is captured once."""
    model, _, batch = made(24)
    graph = compiled(model, None, batch).graph
    for percent in range(0, 101, 5):
        recipe = Recipe((make("recompute", "layers.*", ratio=percent / 100),))
        plan = resolve(recipe, model).settle(Plan(), graph)
        ranks = layer_ranks(value_keys(graph), layers_of(graph.graph.nodes))
        again: set[int] = set()
        for base, wanted in map(split_key, plan.recompute):
            again |= set(range(24) if wanted is None else wanted)
            assert len(ranks[base]) == 24
        assert len(again) == round(percent / 100 * 24)


@pytest.mark.parametrize("verb", ["replace_all", "fuse", "recompute"])
def test_operators_are_looked_for_where_a_glob_says(verb: str) -> None:
    """`layers.[12]` is two of three layers, and what lies inside of them."""
    model, optimizer, batch = made(3)
    sch = wholestep.schedule(model, example=(batch["ids"],))
    assert len(sch["layers.[12]"].find(linear_relu)) == 2
    given = {"what": linear_relu, "by": linear_clamp} if verb == "replace_all" else {"pattern": linear_relu}
    getattr(sch["layers.[12]"], verb)(**given)
    step = compiled(model, optimizer, batch, sch)
    facts = [(str(node.target), node.meta.get("custom") or {}) for node in step.graph.operations()]
    if verb == "replace_all":
        places = [
            custom["module"] for target, custom in facts if "clamp" in target and custom.get("phase") == "forward"
        ]
        assert {".".join(place.split(".")[:2]) for place in places} <= {"layers.1", "layers.2"} and len(places) >= 2
    else:
        marked = {custom["module"] for _, custom in facts if "matched" in custom}
        assert {".".join(place.split(".")[:2]) for place in marked} == {"layers.1", "layers.2"}


def test_every_nth_layer_and_a_value_in_the_first_ones() -> None:
    model, optimizer, batch = made(4)
    sch = wholestep.schedule(model)
    sch["layers.*"].recompute(every=3)
    step = compiled(model, optimizer, batch, sch)
    assert layers_recomputed(step) == {"layers.0", "layers.3"}
    assert "recipe     1 line of the schedule" in step.explain()
    assert any(key.endswith("@[0,3]") for key in step.plan.recompute)
    assert "line 1 of the schedule" in next(iter(step.plan.reasons.values()))
    sch.undo()
    sch["layers.*.mlp/relu@2"].recompute()
    step = compiled(model, optimizer, batch, sch)
    assert step.plan.recompute == ("layers.*.mlp/relu@2",) and layers_recomputed(step) == {"layers.0", "layers.1"}


def test_what_a_module_returns_is_kept_and_an_inner_line_counts() -> None:
    model, optimizer, batch = made(2)
    sch = wholestep.schedule(model)
    sch["layers.*.mlp"].recompute()
    assert "layers.*.mlp/mul" not in compiled(model, optimizer, batch, sch).plan.recompute
    sch.undo()
    sch["layers.*"].recompute()
    sch["layers.*.mlp"].recompute(ratio=0)
    plan = compiled(model, optimizer, batch, sch).plan
    assert plan.recompute and not any(".mlp" in key for key in plan.recompute)
    assert "layers.*/add" not in plan.recompute  # the layer's output


def test_only_what_a_pattern_matches_is_recomputed() -> None:
    model, optimizer, batch = made(2, act="gelu")
    sch = wholestep.schedule(model)
    sch["layers.1"].recompute(pattern=lambda x, w, b: F.linear(F.gelu(x), w, b))
    step = compiled(model, optimizer, batch, sch)
    # the product is what the matched operators return; the activation inside is recomputed
    assert step.plan.recompute == ("layers.*.mlp/gelu@[1]",) and layers_recomputed(step) == {"layers.1"}


def test_a_verb_beats_the_budget_and_the_budget_the_default() -> None:
    model, optimizer, batch = made(4)
    kept = wholestep.schedule(model)
    kept["layers.*"].recompute(ratio=0)
    with pytest.raises(BudgetTooSmall) as least:
        compiled(model, optimizer, batch, memory="1KiB")
    tight = least.value.smallest_bytes
    assert compiled(model, optimizer, batch, memory=tight).plan.recompute
    with pytest.raises(BudgetTooSmall):
        compiled(model, optimizer, batch, kept, memory=tight)
    again = wholestep.schedule(model)
    again["layers.*"].recompute()
    roomy = compiled(model, optimizer, batch, again, memory="64MiB")
    assert layers_recomputed(roomy) == {f"layers.{i}" for i in range(4)}


def test_options_that_contradict_a_line_are_named_with_it() -> None:
    model, optimizer, batch = made(2)
    sch = wholestep.schedule(model)
    sch.precision("bf16")
    with pytest.raises(
        BadOption, match=r"precision='fp16' contradicts line 1 of the schedule \(precision \(the model\)"
    ):
        compiled(model, optimizer, batch, sch, precision="fp16")
    sch.cudagraph(False)
    with pytest.raises(BadOption, match="cuda_graph=True contradicts line 2"):
        compiled(model, optimizer, batch, sch, cuda_graph=True)
    with pytest.raises(BadOption, match=r"recipe=3"):
        compiled(model, optimizer, batch, 3)
    lost = Plan(replace={"layers.*.mlp": "FastMLP()"})
    with pytest.raises(BadOption, match=r"made with a recipe that replaces layers.\*.mlp"):
        compiled(model, optimizer, batch, plan=lost)


def test_a_plan_beside_a_recipe_is_what_became_of_it() -> None:
    model, optimizer, batch = made(2)
    sch = wholestep.schedule(model)
    sch["layers.*"].recompute()
    sch["head"].precision("bf16")
    sch["layers.0.mlp"].replace(FastMLP(), params=CARRIED)
    step = compiled(model, optimizer, batch, sch)
    again = compiled(model, optimizer, batch, sch, plan=step.plan)
    assert again.program == step.program and step.plan.replace
    with pytest.raises(BadOption, match=r"something else about recompute than line 1 of the schedule \(recompute"):
        compiled(model, optimizer, batch, sch, plan=Plan(replace=step.plan.replace, precision=step.plan.precision))
    with pytest.raises(BadOption, match=r"something else about precision than line 2"):
        compiled(model, optimizer, batch, sch, plan=dataclasses.replace(step.plan, precision={"head": "fp32"}))


def test_precision_of_a_module_is_in_the_graph_and_in_the_plan() -> None:
    model, optimizer, batch = made(2, dropout=0.0)
    sch = wholestep.schedule(model)
    sch["layers.*.mlp"].precision("bf16")
    step = compiled(model, optimizer, batch, sch)
    products = [n for n in step.graph.operations() if "mm" in str(n.target)]
    narrow = {n.meta["custom"]["module"] for n in products if _dtype(n) is torch.bfloat16}
    wide = {n.meta["custom"]["module"] for n in products} - narrow
    assert narrow == {f"layers.{i}.mlp.{name}" for i in range(2) for name in ("fc1", "fc2")} and wide == {"head"}
    assert step.plan.precision == {"layers.*.mlp": "bf16"}


def _dtype(node: Any) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


def test_a_kernel_is_taken_or_never_taken() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attends(), Attends())
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 4, 8)

    def squared(model: Any, batch: Any) -> torch.Tensor:
        return model(batch).square().mean()

    def taken(sch: Any) -> dict[str, str]:
        step = wholestep.compile(model, squared, optimizer, batch, recipe=sch, **QUICK)
        step(batch)
        return {key: name for key, name in step.plan.kernel.items() if "/" in key}

    def implementations(sch: Any) -> list[str]:
        graph = wholestep.compile(model, squared, optimizer, batch, recipe=sch, **QUICK).graph
        return sorted(str(n.kwargs.get("implementation")) for n in graph.operations() if "attention" in str(n.target))

    (free,) = set(taken(None).values())
    sch = wholestep.schedule(model)
    sch["*"].kernel(forbid=free)
    others = taken(sch)
    assert others and free not in others.values()
    sch.undo()
    sch["0"].kernel(take="math")
    assert implementations(sch) == ["None", "None", "math", "math"]
    sch.undo()
    for first, second in (("take", "forbid"), ("forbid", "take")):  # of two lines about one call the narrower counts
        for at, wide in (("0", ""), ("0", "*")):
            sch = wholestep.schedule(model)
            for verb in (first, second):
                sch.record("kernel", at if verb == "take" else wide, **{verb: free})
            assert implementations(sch) == [free, free, "math", "math"], (first, at, wide)
            sch = wholestep.schedule(model)
            for verb in (first, second):
                sch.record("kernel", wide if verb == "take" else at, **{verb: free})
            assert implementations(sch) == [free, free, "math", "math"], (first, at, wide)
    sch = wholestep.schedule(model)
    sch["0"].kernel("flash")
    with pytest.raises(
        BadOption, match=r"line 1 of the schedule \(kernel 0 take='flash'\) names kernel 'flash'.*runs on cuda"
    ):
        taken(sch)
    sch.undo()
    sch["0.qkv"].kernel(forbid="math")
    with pytest.raises(BadOption, match="the step has no choice there"):
        taken(sch)
    sch.undo()
    sch["*"].kernel(forbid="flash")  # known, though a CPU has none
    assert set(taken(sch).values()) == {free}
    sch.undo()
    sch["*"].kernel(forbid="flsh")
    with pytest.raises(BadOption, match=r"no implementation has that name. did you mean flash\?"):
        taken(sch)
    for at in ("", "**"):  # the model, and a glob that names more than what chooses
        sch.undo()
        sch.record("kernel", at, take="math")
        assert set(taken(sch).values()) == {"math"}
    sch.undo()
    sch["*.qkv"].kernel(take="math")
    with pytest.raises(BadOption, match=r"line 1 of .*: the step has no choice there. there is one in \*/attention"):
        taken(sch)


def test_fused_modules_are_regions_of_their_own() -> None:
    model, optimizer, batch = made(2)
    sch = wholestep.schedule(model)
    sch["layers.*.mlp"].fuse()
    sch["head"].fuse(pattern=lambda x, w, b: F.linear(x, w, b))
    step = compiled(model, optimizer, batch, sch)
    regions = {node.meta["custom"]["region"] for node in step.graph.operations() if "region" in node.meta["custom"]}
    assert {"layers.0.mlp", "layers.1.mlp"} < regions and len(regions) == 3
    assert step.plan.fuse[0] == "layers.*.mlp"
    pieces = [piece for piece in split_regions(write_state_in_place(step.graph)) if isinstance(piece, Region)]
    inside = [{node.meta["custom"].get("region") for node in piece.body if _is_work(node)} for piece in pieces]
    fused = [names - {None} for names in inside if names - {None}]  # a sum of gradients knows no module
    assert len(fused) == 6 and all(len(names) == 1 for names in fused)  # forward and backward of each
    assert len({piece.signature for piece in pieces}) < len(pieces)  # equal layers are still compiled once
    with pytest.raises(BadOption, match=r"the plan fuses 'layers.9'"):
        compiled(model, optimizer, batch, plan=Plan(fuse=("layers.9",)))


def test_the_model_is_a_place_as_any_other() -> None:
    """Regions and precisions of the whole model, as a recipe or a plan names it: with the empty path."""
    model, optimizer, batch = made(2)
    sch = wholestep.schedule(model)
    sch.fuse()
    nodes = [node for node in compiled(model, optimizer, batch, sch).graph.operations() if phase_of(node) != "update"]
    assert {(node.meta.get("custom") or {}).get("region") for node in nodes} == {"the model"}
    step = compiled(model, optimizer, batch, plan=Plan(precision={"": "bf16"}))
    products = {_dtype(node) for node in step.graph.operations() if "mm" in str(node.target)}
    assert products == {torch.bfloat16}
    with pytest.raises(BadOption, match=r"fits 'haed'. did you mean head\?"):
        compiled(model, optimizer, batch, plan=Plan(precision={"haed": "bf16"}))


@pytest.mark.parametrize("left", [[], ["fuse_loss", "share_equal"]])
def test_precisions_are_carried_out_whatever_passes_are_left(left: list[str]) -> None:
    """They are a pass too, which stands before one that may be left out: `wholestep show` leaves out all."""
    model, optimizer, batch = made(2)
    sch = wholestep.schedule(model)
    sch["layers.*"].precision("bf16")
    kept = [one for one in wholestep.default_passes() if name_of(one) in left]
    step = compiled(model, optimizer, batch, sch, passes=Pipeline(kept), early_update=False)
    products = {
        (node.meta["custom"]["module"][:4], _dtype(node))
        for node in step.graph.operations()
        if "mm" in str(node.target)
    }
    assert {("laye", torch.bfloat16), ("head", torch.float32)} <= products


def _is_work(node: Any) -> bool:
    """Views of other regions' values are recomputed inside."""
    return node.op == "call_function" and not is_cheap_view(node)


def test_values_of_which_ranks_have_parts_are_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, batch = made(2)
    sch = wholestep.schedule(model)
    sch["layers.0.mlp.fc1"].print_values("stdout")
    compiled(model, optimizer, batch, sch)(batch)
    model, optimizer, batch = made(2)
    sch = wholestep.schedule(model)
    sch["layers.*.mlp.fc1"].shard("weight", 0)
    sch["layers.*.mlp.fc1"].shard("bias", 0)
    sch["layers.*.mlp.fc2"].shard("weight", 1)
    sch["layers.0.mlp.fc1"].print_values("stdout")
    compiled(model, optimizer, batch, sch, mesh=wholestep.Mesh(tp=4))(batch)
    whole, *parts = capsys.readouterr().out.splitlines()
    assert parts and set(parts) == {whole}


def test_a_function_that_fails_in_the_place_of_a_module_is_named() -> None:
    model, optimizer, batch = made(2)
    sch = wholestep.schedule(model)
    sch["layers.0.mlp.fc1"].replace(lambda module, input: input)  # of the wrong width
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        compiled(model, optimizer, batch, sch)(batch)
    assert "line 1 of the schedule (replace layers.0.mlp.fc1" in caught.value.__notes__[0]


def test_values_are_printed_step_by_step(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, batch = made(2)
    sch = wholestep.schedule(model)
    sch["layers.0.mlp"].print_values("stdout")
    step = compiled(model, optimizer, batch, sch)
    for _ in range(3):
        step(batch)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.startswith("layers.0.mlp: from -") for line in lines), lines
    assert step.captures == 1
    sch.build()
    model(batch["ids"])
    assert capsys.readouterr().out.count("not finite") == 1
    sch.restore()


# ---- the model stays the user's ----


def test_two_steps_of_one_model_do_not_meet() -> None:
    model, optimizer, batch = made(2, dropout=0.0)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    changed = wholestep.schedule(model)
    changed["layers.*.mlp"].replace(lambda module, x, scale=1.0: module.fc2(F.relu(module.fc1(x))) * 2.0)
    doubled, plain = compiled(model, optimizer, batch, changed), compiled(model, optimizer, batch)
    assert doubled.program != plain.program
    with torch.no_grad():
        expected = loss(model, batch)
    assert torch.equal(plain(batch), expected)
    with torch.no_grad():
        expected = loss(model, batch)
    assert not torch.equal(doubled(batch), expected)
    assert list(model.state_dict()) == keys and all(a is b for a, b in zip(model.parameters(), parameters))
    assert all(type(m) is type(n) for m, n in zip(model.modules(), Net(2).modules()))
    assert doubled.captures == plain.captures == 1


def test_a_step_of_a_replaced_module_follows_its_parameters_and_mode() -> None:
    model, optimizer, batch = made(2, dropout=0.0)
    sch = wholestep.schedule(model)
    sch["layers.*.mlp"].replace(FastMLP(), params=CARRIED)
    step, plain = compiled(model, optimizer, batch, sch), compiled(model, optimizer, batch)
    step(batch)
    model.layers[0].mlp.fc1.weight.data = torch.zeros_like(model.layers[0].mlp.fc1.weight)
    with torch.no_grad():
        expected = loss(model, batch)
    assert torch.equal(step(batch), expected) and step.plan.replace == {"layers.*.mlp": "FastMLP()"}
    assert plain.plan.replace == {}


def test_the_first_step_is_checked_against_the_model_as_written() -> None:
    model, optimizer, batch = made(2)
    sch = wholestep.schedule(model)
    sch.replace_all(linear_relu, wrong_linear)
    step = compiled(model, optimizer, batch, sch, check="first")
    with pytest.raises(wholestep.WholestepError, match=r"[Dd]iffer"):
        step(batch)


@pytest.mark.parametrize("backend", ["interpret", pytest.param("inductor", marks=pytest.mark.slow)])
def test_matched_operators_are_replaced_before_autodiff(backend: str) -> None:
    model, optimizer, batch = made(2)
    sch = wholestep.schedule(model)
    sch["layers.1"].replace(by=linear_clamp, pattern=linear_relu)
    step = compiled(model, optimizer, batch, sch, backend=backend, check="first")
    targets = [str(node.target) for node in step.graph.operations()]
    assert targets.count("aten.clamp.default") == 1 and targets.count("aten.relu.default") == 1
    step(batch)  # equal to eager, backward and all


def test_a_replacement_that_does_not_fit_is_an_error() -> None:
    model, optimizer, batch = made(2)
    sch = wholestep.schedule(model)
    with pytest.raises(BadOption, match="must take the inputs of the pattern: x, w, b"):
        sch.replace_all(linear_relu, lambda x, w: x)
    sch.replace_all(linear_relu, lambda x, w, b: F.linear(x, w, b)[..., :2])
    with pytest.raises(BadOption, match=r"returns \['\(4, 5, 2\) torch.float32'\] where the model computes"):
        compiled(model, optimizer, batch, sch)
    sch.undo()
    sch.replace_all(lambda x, w: F.silu(F.linear(x, w)), lambda x, w: F.silu(F.linear(x, w)))
    with pytest.raises(BadOption, match=r"nothing in the forward pass matches. it has no silu"):
        compiled(model, optimizer, batch, sch)
    sch.undo()
    sch.replace(by=linear_clamp, pattern=linear_relu)
    with pytest.raises(BadOption, match="2 places match"):
        compiled(model, optimizer, batch, sch)


class LinearReLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias).relu()


def test_a_module_takes_the_place_of_operators_with_their_parameters() -> None:
    model, optimizer, batch = made(2)
    sch = wholestep.schedule(model)
    with pytest.raises(BadOption, match="has a parameter 'bias' of its own"):
        sch.replace_all(linear_relu, LinearReLU(), params={"weight": "w"})
    with pytest.raises(BadOption, match="the pattern has no input 'c'"):
        sch.replace_all(linear_relu, LinearReLU(), params={"weight": "w", "bias": "c"})
    sch.replace_all(linear_relu, LinearReLU(), params={"weight": "w", "bias": "b"})
    report = wholestep.verify(model, loss, optimizer, batch, steps=1, eval_too=False, recipe=sch, backend="interpret")
    assert report.ok, str(report)


def test_an_empty_recipe_and_the_defaults_change_nothing() -> None:
    for layers in (1, 3):
        model, optimizer, batch = made(layers)
        plain = compiled(model, optimizer, batch).program
        auto = wholestep.recipes.auto(model)
        assert compiled(model, optimizer, batch, Recipe()).program == plain
        assert compiled(model, optimizer, batch, auto).program == plain
        assert len(auto) >= 3
        assert dataclasses.replace(auto.recipe).lines == tuple(auto.lines)


class Projections(nn.Module):
    """Three products of one input; the first is read before the last is made."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.tanh(self.q(x)) @ self.k(x).transpose(-2, -1)
        return scores.softmax(-1) @ self.v(x)


def three(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return F.linear(x, q), F.linear(x, k), F.linear(x, v)


def one_product(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return F.linear(x, torch.cat([q, k, v])).chunk(3, -1)


def test_three_products_become_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Projections(), Projections())
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 4, 8)
    sch = wholestep.schedule(model, example=batch)
    assert [found.module for found in sch.find(three)] == ["0", "1"]
    sch.replace_all(three, one_product)

    def squared(model: Any, batch: Any) -> torch.Tensor:
        return model(batch).square().mean()

    report = wholestep.verify(model, squared, optimizer, batch, steps=1, recipe=sch, backend="interpret")
    assert report.ok, str(report)
    step = wholestep.compile(model, squared, optimizer, batch, recipe=sch, **QUICK)
    products = [n for n in step.graph.operations() if str(n.target) == "aten.mm.default" and _phase(n) == "forward"]
    assert len(products) == 2


def _phase(node: Any) -> str:
    return str(node.meta["custom"]["phase"])


def test_matches_that_feed_each_other_are_all_replaced() -> None:
    """The second reads what the first computed, which is another value by then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 8)
    sch = wholestep.schedule(model, example=batch)
    sch.replace_all(linear_relu, linear_clamp)

    def squared(model: Any, batch: Any) -> torch.Tensor:
        return model(batch).square().mean()

    assert len(sch.find(linear_relu)) == 3
    report = wholestep.verify(model, squared, optimizer, batch, steps=1, recipe=sch, backend="interpret")
    assert report.ok, str(report)
    step = wholestep.compile(model, squared, optimizer, batch, recipe=sch, **QUICK)
    assert sum("clamp" in str(node.target) for node in step.graph.operations() if _phase(node) == "forward") == 3
