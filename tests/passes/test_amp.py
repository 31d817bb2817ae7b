"""amp: a float32 graph becomes a mixed one; eager autocast is the reference, a float64 run the yardstick."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.zoo.case import Built
from tests.zoo.models import ZOO
from torch import nn

import wholestep
from wholestep.errors import BadOption
from wholestep.graph.training_graph import OutputKind, Role, TrainingGraph, phase_of
from wholestep.passes.amp import amp
from wholestep.passes.pipeline import Pipeline, default_pipeline
from wholestep.passes.precision_audit import precision_audit, summary, table

pytestmark = pytest.mark.filterwarnings("ignore::wholestep.errors.WholestepWarning", "error:amp.*stay as captured")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 20
WITH_AMP = default_pipeline().insert_before("fold_constants", amp)


class Small(nn.Module):
    """An embedding, a tied head, layer norm, softmax written out, an explicit power."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm, self.up, self.head = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        weights = (hidden @ hidden.transpose(1, 2)).softmax(-1)
        hidden = hidden + self.up(self.norm(weights @ hidden)).pow(2)
        return self.head(hidden)


def small_loss(model: nn.Module, ids: torch.Tensor) -> Any:
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten()), {"logits": logits}


IDS = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(1))


def small(passes: Any, **options: Any) -> wholestep.Step:
    torch.manual_seed(0)
    model = Small()
    optimizer = options.pop("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    options = {"backend": "interpret", "cache": False, **options}
    return wholestep.compile(model, small_loss, optimizer, IDS, passes=passes, **options)


def of(graph: TrainingGraph, name: str) -> list[torch.fx.Node]:
    return [n for n in graph.operations() if f".{name}." in str(n.target)]


def types(graph: TrainingGraph, name: str) -> set[torch.dtype]:
    """Of all that goes into the operators of that name."""
    found = [s.meta["val"] for n in of(graph, name) for s in n.all_input_nodes]
    return {v.dtype for v in found if isinstance(v, torch.Tensor) and v.is_floating_point()}


@pytest.mark.parametrize(("precision", "low"), [("bf16", BF16), ("fp16", F16)])
def test_what_runs_in_which_type(precision: str, low: torch.dtype) -> None:
    graph = small([functools.partial(amp, precision=precision)]).graph
    for name in ("mm", "addmm", "bmm"):
        assert types(graph, name) == {low}, name
    for name in ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "pow",
                 "nll_loss_forward", "native_layer_norm", "native_layer_norm_backward", "embedding_dense_backward"):  # fmt: skip
        assert of(graph, name) and types(graph, name) == {F32}, name


def test_values_are_what_will_run() -> None:
    """Every `meta["val"]` against the real types and shapes; results, gradients and updates as they were captured."""
    plain, mixed = small([]).graph, small(WITH_AMP).graph
    placeholders = [torch.zeros(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in mixed.placeholders]

    class Watch(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            result = super().run_node(n)
            if isinstance(result, torch.Tensor) and n.op == "call_function":
                assert result.dtype == n.meta["val"].dtype and result.shape == n.meta["val"].shape, n
            return result

    Watch(mixed.module).run(*placeholders)
    assert [v.meta["val"].dtype for v in plain.output_values] == [v.meta["val"].dtype for v in mixed.output_values]
    for name, node in mixed.gradients.items():  # lean_gradients keeps them as the products made them
        assert mixed.node(node).meta["val"].is_floating_point() and phase_of(mixed.node(node)) == "backward", name
    assert list(mixed.gradients) == list(plain.gradients) and list(mixed.boundaries) == list(plain.boundaries)


def test_a_value_is_cast_once_and_a_weight_once_per_phase() -> None:
    for weights, most in (("recast", 2), ("reuse", 1)):
        graph = small([functools.partial(amp, weights=weights)]).graph
        casts = of(graph, "_to_copy")
        parameters = {graph.placeholders[i] for i in graph.indices(Role.PARAMETER)}
        for source in {n.args[0] for n in casts}:
            mine = [n for n in casts if n.args[0] is source]
            assert len(mine) <= (most if source in parameters else 1), (weights, source)
            assert len({(phase_of(n), n.meta["val"].dtype) for n in mine}) == len(mine)
        assert max(sum(n.args[0] is p for n in casts) for p in parameters) == most


def test_precision_per_module() -> None:
    rewrite = functools.partial(amp, modules={"*": "fp32", "up": "bf16"})
    graph = small([rewrite]).graph
    assert types(graph, "addmm") == {BF16} and types(graph, "bmm") == {F32}
    rewrite = functools.partial(amp, modules={"head": "fp32"})
    heads = [n for n in of(small([rewrite]).graph, "mm") if n.meta["custom"].get("module") == "head"]
    assert len(heads) == 3 and {n.meta["val"].dtype for n in heads} == {F32}


def test_bad_options_are_named() -> None:
    graph = small(Pipeline([])).graph
    with pytest.raises(BadOption, match=r"no module of the captured step fits 'heads'. did you mean head\?"):
        amp(graph, modules={"heads": "fp32"})
    with pytest.raises(BadOption, match="precision 'int8'"):
        amp(graph, precision="int8")
    with pytest.raises(BadOption, match="weights='keep'"):
        amp(graph, weights="keep")


@pytest.mark.parametrize(
    "options",
    [{"accumulate": 3}, {"clip_norm": 0.1}, {"optimizer": None}, {"nonfinite": "skip"}, {"dynamic": True}],
    ids=str,
)
def test_with_the_other_options(options: dict[str, Any]) -> None:
    """The first step is checked against eager by `compile` itself, with the limits of bf16."""
    step = small(WITH_AMP, **options)
    losses = [float(step(IDS)[0]) for _ in range(3)]
    assert step.rung == "whole step" and types(step.graph, "bmm") == {BF16}
    if "optimizer" in options:
        assert all(p.grad.dtype == F32 for p in step.subject.trained.values())
        kinds = [o.kind for o in step.graph.outputs]
        assert OutputKind.GRADIENT in kinds
    else:
        assert losses[-1] < losses[0]


@pytest.mark.slow
def test_compiled_code_agrees() -> None:
    ours, theirs = small(WITH_AMP, backend="inductor"), small(WITH_AMP)
    for _ in range(3):
        torch.testing.assert_close(ours(IDS)[0], theirs(IDS)[0], rtol=2e-2, atol=2e-2)


def test_float64_is_left_alone() -> None:
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = wholestep.compile(
        model, lambda m, b: m(b).sum(), optimizer, torch.ones(2, 3, dtype=torch.float64), backend="interpret", cache=False,
        passes=WITH_AMP,
    )  # fmt: skip
    assert types(step.graph, "addmm") == {torch.float64} and not of(step.graph, "_to_copy")


# ---- real models ----


def without_dropout(built: Built) -> Built:
    for module in built.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return built


def trained(name: str, how: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Losses and parameters after 20 steps of plain SGD: "fp64", "autocast" or "amp"."""
    built = without_dropout(ZOO[name].build())
    batches = built.batches
    if how == "fp64":
        built.model.double()
        batches = [{k: v.double() if v.is_floating_point() else v for k, v in b.items()} for b in batches]
    optimizer = torch.optim.SGD(built.model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    if how == "amp":
        step = wholestep.compile(
            built.model,
            built.loss_fn,
            optimizer,
            batches[0],
            backend="interpret",
            check="off",
            cache=False,
            passes=WITH_AMP,
        )
        losses = [float(step(batches[i % len(batches)])) for i in range(STEPS)]
    else:
        for i in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", BF16, enabled=how == "autocast"):
                loss = built.loss_fn(built.model, batches[i % len(batches)])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return torch.tensor(losses), [p.detach().double() for p in built.model.parameters()]


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "bn_cnn"])
def test_it_tracks_eager_autocast(name: str) -> None:
    """Errors against float64 over 20 steps, beside those of eager autocast: at most twice, plus a rounding of the loss."""
    pytest.importorskip("transformers")
    losses, parameters = trained(name, "fp64")
    errors = {}
    for how in ("autocast", "amp"):
        ours, mine = trained(name, how)
        apart = torch.stack([(a - b).square().sum() for a, b in zip(mine, parameters, strict=True)]).sum().sqrt()
        errors[how] = float((ours - losses).square().mean().sqrt()), float(apart)
    rounding = torch.finfo(BF16).eps / 16 * float(losses.mean())
    assert errors["amp"][0] <= 2 * errors["autocast"][0] + rounding, errors
    assert errors["amp"][1] <= 2 * errors["autocast"][1], errors


# ---- the audit ----


def test_the_audit_says_what_runs_in_which_type() -> None:
    step = small(WITH_AMP)
    rows = precision_audit(step.graph)
    found: Counter[tuple[str, str, str]] = Counter()
    for r in rows:
        found[r.family, r.dtype, r.phase] += r.count
    assert found["matmul", "bf16", "forward"] == 4 and found["softmax", "fp32", "backward"] == 2
    assert not any(r.family == "matmul" and r.dtype == "fp32" for r in rows)
    assert any(r.module == "head" and r.family == "matmul" for r in rows)
    assert table(rows).splitlines()[0].startswith("family") and len(table(rows).splitlines()) == len(rows) + 1
    assert "precision  " in step.explain() and "bf16" in step.explain()


def test_one_type_is_not_worth_a_line() -> None:
    step = small([])
    assert summary(step.graph) is None and "precision  " not in step.explain()


def test_the_audit_of_a_traced_autocast() -> None:
    rows = precision_audit(small([], precision="bf16").graph)
    assert {r.dtype for r in rows if r.family == "matmul"} == {"bf16"}
    assert any(r.dtype == "fp32 -> bf16" and r.family == "cast" for r in rows)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    torch.manual_seed(0)
    model = Small().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = wholestep.compile(model, small_loss, optimizer, IDS.cuda(), passes=WITH_AMP, cache=False)
    losses = [float(step(IDS.cuda())[0]) for _ in range(10)]
    assert losses[-1] < losses[0] and types(step.graph, "bmm") == {BF16}
