"""Predicted against measured, to the byte: liveness over the graph, plus what operators and regions take for themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.profile.memory_jobs import Job, bert, gpt, mlp, regression, resnet
from torch import Tensor, nn

import wholestep
from wholestep.lower import compile_region, lower_inductor
from wholestep.lower.footprint import scratch as scratch_module
from wholestep.lower.footprint.predict import predict_profile
from wholestep.lower.footprint.regions import predict_compiled
from wholestep.lower.footprint.scratch import measure_scratch
from wholestep.profile.memory.oom import explain_oom, peak_with_rows, ranked_fixes
from wholestep.profile.memory.profile import memory_profile
from wholestep.runtime.step import Step

pytestmark = pytest.mark.usefixtures("one_thread")
"""What libraries take depends on the threads; with two, two instants of the resnet are equally full."""


def compiled(job: Job, backend: str = "interpret", **options: object) -> Step:
    model, loss_fn, optimizer, batch = job
    return wholestep.compile(model, loss_fn, optimizer, batch, backend=backend, check="off", **options)  # type: ignore[arg-type]


def counters(job: Job) -> int:
    """Bytes of the optimizer's step counts, which are no input of the graph."""
    return sum(4 for state in job[2].state.values() if "step" in state)


@pytest.mark.parametrize("make", [mlp, gpt, bert, resnet])
def test_interpreted_steps_take_what_was_predicted(make: Callable[[], Job]) -> None:
    job = make()
    step = compiled(job)
    assert step.graph is not None
    measured = memory_profile(step, model=job[0], optimizer=job[2], batch=job[3])
    scratch = measure_scratch(step.graph)
    predicted = predict_profile(step.graph, scratch=scratch)
    assert measured.step_peak_bytes - predicted.peak_bytes == counters(job)
    assert sum(predicted.at_peak.values()) == predicted.peak_bytes
    # at the same place for the same reasons, not only the same sum
    own = {name: count for name, count in measured.at_peak.items() if name not in ("other", "optimizer state")}
    assert own == {name: predicted.at_peak[name] for name in own}
    assert predicted.notes == ()
    bare = predict_profile(step.graph)
    assert "without what operators take" in bare.notes[0]
    most = max(
        found.running for found in scratch.values()
    )  # how much is the CPU's affair: 0.6 MB for oneDNN without AVX-512
    assert bare.peak_bytes <= predicted.peak_bytes <= bare.peak_bytes + most


@torch.library.custom_op("ws_tests::copied_out", mutates_args=())
def copied_out(x: Tensor) -> Tensor:
    """As oneDNN computes weight gradients on some CPUs: into memory of its own, with scratch beside it; the copy comes last."""
    own = x * 2
    torch.empty(1 << 20).fill_(0)
    return own.clone()


@copied_out.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_result_that_is_made_after_the_peak_of_its_operator_is_none_of_it() -> None:
    """At that instant the operator's own memory is workspace, in the measured profile and in the predicted one."""
    model = nn.Linear(32, 32)
    batch = {"x": torch.randn(64, 32)}
    loss = lambda model, b: model(copied_out(b["x"])).square().mean()  # noqa: E731
    job: Job = (model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    step = compiled(job)
    assert step.graph is not None
    measured = memory_profile(step, model=model, optimizer=job[2], batch=batch)
    predicted = predict_profile(step.graph, scratch=measure_scratch(step.graph))
    own = {name: count for name, count in measured.at_peak.items() if name != "other"}
    assert own == {name: predicted.at_peak[name] for name in own}
    assert own["workspace"] == 4 * ((1 << 20) + 64 * 32)


def test_operators_that_others_stand_for_take_what_those_take() -> None:
    """The gradient of `x[index]` is `index_put` in the graph, and a sum of rows when it runs (ops/add_rows.py)."""
    model = nn.Linear(64, 64, bias=False)
    batch = {"index": torch.randint(64, (2, 4000))}
    loss = lambda model, b: model.weight[b["index"][0], b["index"][1]].sin().sum()  # noqa: E731
    job: Job = (model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    step = compiled(job)
    assert step.graph is not None and any("index_put" in str(node.target) for node in step.graph.operations())
    measured = memory_profile(step, model=model, optimizer=job[2], batch=batch)
    predicted = predict_profile(step.graph, scratch=measure_scratch(step.graph))
    assert measured.step_peak_bytes == predicted.peak_bytes
    assert measured.at_peak["workspace"] == predicted.at_peak["workspace"] > 0


def test_dropout_and_attention_take_scratch() -> None:
    """Their references make whole masks: liveness alone would miss it, at the operator and at the peak."""
    job = gpt(dropout=0.1)
    step = compiled(job)
    assert step.graph is not None
    scratch = measure_scratch(step.graph)
    measured = memory_profile(step, model=job[0], optimizer=job[2], batch=job[3])
    predicted = predict_profile(step.graph, scratch=scratch)
    assert measured.step_peak_bytes - predicted.peak_bytes == counters(job)
    assert scratch["attention"].running > 0
    assert predicted.at_peak["workspace"] > 0 and predicted.peak_bytes > predict_profile(step.graph).peak_bytes


def test_calls_that_were_measured_are_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of one graph have most calls in common."""
    step, known = compiled(mlp()), {}
    assert step.graph is not None
    first, asked = measure_scratch(step.graph, known), []
    monkeypatch.setattr(scratch_module, "measure_calls", lambda prepare, device: asked.extend(prepare) or [])
    assert measure_scratch(step.graph, known) == first and asked == []


class Layer(nn.Module):
    """Large enough to be a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sin(self.up(x) * 2.0 + 1.0).tanh()
        return x + self.down(hidden * hidden.sigmoid())


@pytest.mark.parametrize("compiler", ["none", pytest.param("inductor", marks=pytest.mark.slow)])
def test_steps_of_regions_take_what_was_predicted(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler the regions are the same, and run operator by operator inside: quick, and as exact."""
    if compiler == "none":
        monkeypatch.setattr(compile_region, "_compile", lambda *_: 1 / 0)
    model = nn.Sequential(*(Layer() for _ in range(4)))
    batch = {"x": torch.randn(64, 32), "y": torch.randn(64, 32)}
    job: Job = (model, regression, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    step = compiled(job)
    assert step._latest is not None and step.graph is not None
    step._latest.runner = lower_inductor(step.graph)  # not the faster of two: the compiled one
    assert step.regions["regions"] > step.regions["unique_regions"] > 1
    assert bool(step.regions["notes"]) == (compiler == "none")
    measured = memory_profile(step, model=model, optimizer=job[2], batch=batch)
    predicted = predict_compiled(step.graph)
    assert measured.step_peak_bytes == predicted.peak_bytes
    assert measured.at_peak["saved activations"] > 0
    inside = [b for b in measured.blocks if b.why == "inside a compiled region"]
    assert inside and {b.category for b in inside} == {"temporaries"}


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt, bert, resnet])
def test_compiled_models_take_what_was_predicted(make: Callable[[], Job]) -> None:
    job = make()
    step = compiled(job, "inductor")
    assert step.graph is not None
    measured = memory_profile(step, model=job[0], optimizer=job[2], batch=job[3])
    predicted = predict_compiled(step.graph) if step.regions["backend"] == "inductor" else predict_profile(step.graph)
    assert abs(measured.step_peak_bytes - predicted.peak_bytes) <= 0.01 * measured.step_peak_bytes


def test_what_could_not_be_measured_is_said() -> None:
    step = compiled(mlp())
    assert step.graph is not None
    scratch = measure_scratch(step.graph)
    del scratch["gelu"]
    assert "1 of " in predict_profile(step.graph, scratch=scratch).notes[0]


def test_rounding_of_the_cuda_allocator() -> None:
    step = compiled(mlp())
    assert step.graph is not None
    exact, rounded = predict_profile(step.graph), predict_profile(step.graph, rounding=512)
    assert all(block.bytes % 512 == 0 for block in rounded.blocks)
    assert exact.peak_bytes < rounded.peak_bytes < exact.peak_bytes + 512 * len(rounded.blocks)


# ---- out of memory ----


def test_fixes_are_what_really_happens() -> None:
    job = gpt()
    step = compiled(job)
    assert step.graph is not None
    predicted = predict_profile(step.graph)
    half = compiled(gpt(rows=4))
    assert half.graph is not None
    assert peak_with_rows(predicted, 4) == predict_profile(half.graph).peak_bytes
    fixes = {fix.name: fix for fix in ranked_fixes(predicted)}
    accumulating = gpt()
    real = memory_profile(
        compiled(accumulating, accumulate=2), model=accumulating[0], optimizer=accumulating[2], batch=accumulating[3]
    )
    assert abs(fixes["accumulate=2"].peak_bytes - real.step_peak_bytes) <= 0.01 * real.step_peak_bytes
    bf16 = compiled(gpt(), precision="bf16")
    assert bf16.graph is not None
    halved = predict_profile(bf16.graph)
    assert abs(fixes['precision="bf16"'].peak_bytes - halved.peak_bytes) <= 0.05 * halved.peak_bytes
    assert 'precision="bf16"' not in {fix.name for fix in ranked_fixes(halved)}
    cheap = sum(b.bytes for b in predicted.blocks if b.recomputable)
    recompute = fixes["recompute cheap activations"].peak_bytes
    assert predicted.peak_bytes - cheap <= recompute < predicted.peak_bytes


def test_the_text_names_tensors_and_three_fixes() -> None:
    step = compiled(gpt())
    assert step.graph is not None
    peak = predict_profile(step.graph).peak_bytes
    text = explain_oom(step.graph, limit_bytes=int(0.7 * peak))
    lines = text.splitlines()
    assert "predicted peak, in the backward pass" in lines[0]
    assert any(
        "blocks.*.up float32 512x256 by addmm in forward, for gelu_backward in backward (x2)" in line for line in lines
    )
    listed = lines[lines.index("what would help:") + 1 :]
    assert len(listed) == 3 and "accumulate=2" in listed[0] and "(fits)" in listed[0]


def test_nothing_to_offer_is_said() -> None:
    model = nn.Linear(64, 64)
    job: Job = (
        model,
        lambda m, b: m(b["x"]).sum(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        {"x": torch.randn(1, 64)},
    )
    step = compiled(job)
    assert step.graph is not None
    assert "smaller model" in explain_oom(step.graph)
