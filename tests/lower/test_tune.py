"""What is chosen when a step is lowered: every distinct call once, before the step runs; what a plan names; what explain() says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep
from wholestep.errors import BadOption
from wholestep.graph.plan import Plan
from wholestep.graph.plan_file import read_plan, write_plan
from wholestep.lower import tune_calls
from wholestep.ops import tuned, tuner
from wholestep.ops.attention import choice
from wholestep.ops.tuner import Question, Tuner


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.h = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for layer in self.h:
            x = layer(x)
        return self.head(x)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def compiled(**options: Any) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    model, batch = Net(), torch.randint(0, 50, (4, 6))
    options = {"backend": "interpret", "cache": False, "check": "off", **options}
    return wholestep.compile(model, loss, torch.optim.SGD(model.parameters(), 0.1), batch, **options), batch


KEY = "h.*/attention"


@pytest.fixture
def measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuner:
    """A tuner of one's own, for which attention is measured on the CPU too."""
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path))
    fresh = Tuner()

    def measured(*arguments: Any) -> Question:
        return dataclasses.replace(ask(*arguments), measures=True)

    ask = choice.question
    monkeypatch.setattr(choice, "question", measured)
    monkeypatch.setattr(choice, "TUNER", fresh)
    monkeypatch.setattr("wholestep.lower.tune.TUNER", fresh)
    return fresh


def test_the_first_step_measures_nothing(measuring: Tuner) -> None:
    step, batch = compiled()
    assert measuring.measurements == 1  # three layers, forward and backward: one distinct call
    (found,) = measuring.choices.values()
    assert found.source == tuner.MEASURED and set(found.seconds) == {"cpu_flash", "math"}
    step(batch)
    assert measuring.measurements == 1 and list(measuring.choices.values()) == [found]
    assert step.choices == {KEY: found} and step.plan.kernel == {KEY: found.name}
    assert f"kernels    {found}" in step.explain()


def test_a_cpu_keeps_its_rule() -> None:
    step, _ = compiled()
    assert step.plan.kernel == {KEY: "cpu_flash"} and "kernels    attention cpu_flash (by rule)" in step.explain()


@pytest.mark.parametrize("place", [KEY, "h", "h.*", "h.0", "h.1"])
def test_a_plan_that_names_an_implementation_is_obeyed(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    taken = choice.choose

    def choose(*arguments: Any) -> Any:
        ran.append(taken(*arguments).name)
        return taken(*arguments)

    monkeypatch.setattr("wholestep.ops.attention.operator.choose", choose)
    step, batch = compiled(plan=Plan(kernel={place: "math"}))
    plain, _ = compiled()
    torch.testing.assert_close(step(batch), plain(batch), rtol=1e-5, atol=1e-6)
    in_all = place in (KEY, "h", "h.*")
    assert ran[:6].count("math") == (6 if in_all else 2) and ran[6:] == ["cpu_flash"] * 6
    assert step.program != plain.program
    if in_all:
        assert step.plan.kernel[KEY] == "math" and "attention math (named by the plan)" in step.explain()
    else:
        assert step.plan.kernel == {KEY: "cpu_flash", place: "math"}
    assert compiled(plan=step.plan)[0].plan.kernel == step.plan.kernel


@pytest.mark.slow
def test_compiled_code_takes_what_is_named() -> None:
    step, batch = compiled(backend="inductor", plan=Plan(kernel={"h.1": "math"}))
    plain, _ = compiled()
    assert not [note for note in step.regions["notes"] if "uncompiled" in note], step.explain()
    torch.testing.assert_close(step(batch), plain(batch), rtol=1e-5, atol=1e-6)


def test_what_was_chosen_is_a_plan_and_survives_its_file(tmp_path: Path) -> None:
    step, batch = compiled()
    write_plan(step.plan, tmp_path / "plan.toml")
    read = read_plan(tmp_path / "plan.toml")
    assert dict(read.kernel) == {KEY: "cpu_flash"}
    again, _ = compiled(plan=read)
    assert torch.equal(step(batch), again(batch)) and again.plan.kernel == step.plan.kernel


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (
            {KEY: "flash"},
            r"'flash' for attention in h\.\*/attention, .*it runs on cuda, the call is on cpu.*cpu_flash, math",
        ),
        ({"h.0": "mth"}, r"which does not exist. did you mean math\?"),
        ({"h.*/atention": "math"}, r"has no choice. did you mean h\.\*/attention\?"),
        ({"head": "math"}, r"'head', where the step has no choice. there is a choice in h\.\*/attention"),
    ],
)
def test_a_name_that_cannot_be_taken_is_one_clear_line(kernel: dict[str, str], said: str) -> None:
    with pytest.raises(BadOption, match=said) as caught:
        compiled(plan=Plan(kernel=kernel))
    assert "\n" not in str(caught.value)


def test_copies_that_the_backward_makes_again_ask_nothing_new() -> None:
    step, _ = compiled(
        plan=Plan(recompute=("h.*/attention.0", "h.*/attention.1", "h.*/attention.2", "h.*/attention.3"))
    )
    assert step.plan.kernel == {KEY: "cpu_flash"}


def test_every_operator_that_asks_can_be_told() -> None:
    for target in tuned.ASKS:
        assert "implementation" in [argument.name for argument in target._schema.arguments if argument.kwarg_only]


def test_a_chunked_loss_asks_how_to_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholestep.ops.linear_cross_entropy.chunk_rows", lambda rows, classes: 7)
    monkeypatch.setattr("wholestep.capture.chunked_loss.chunk_rows", lambda rows, classes: 7, raising=False)
    step, batch = compiled(chunked_loss=True, precision="bf16")
    (found,) = [c for c in tune_calls(step.graph).values() if c.what == "weight gradient"]
    assert found.name == "rounded" and "weight gradient rounded (the only one)" in step.explain()
    (key,) = [key for key, name in step.plan.kernel.items() if name == "rounded"]
    again, _ = compiled(chunked_loss=True, precision="bf16", plan=Plan(kernel={key: "rounded"}))
    assert torch.equal(step(batch), again(batch))
    with pytest.raises(BadOption, match=r"'addmm' for weight gradient in .*it runs on cuda"):
        compiled(chunked_loss=True, precision="bf16", plan=Plan(kernel={key: "addmm"}))


@pytest.mark.gpu
def test_a_step_on_a_gpu_is_tuned_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path))
    fresh = Tuner()
    monkeypatch.setattr(choice, "TUNER", fresh)
    monkeypatch.setattr("wholestep.lower.tune.TUNER", fresh)
    model, batch = Net().cuda(), torch.randint(0, 50, (4, 6), device="cuda")
    step = wholestep.compile(
        model, loss, torch.optim.SGD(model.parameters(), 0.1), batch, precision="bf16", cache=False
    )
    (found,) = fresh.choices.values()
    assert found.source == tuner.MEASURED and fresh.measurements == 1
    for _ in range(12):
        step(batch)
    assert fresh.measurements == 1 and list(fresh.choices.values()) == [found]
    assert step.plan.kernel == {KEY: found.name} and {"cuda graph"} < set(step.choices)
    assert str(found) in step.explain() and "cuda graph" in step.explain()
