"""A whole profile of a tiny step, of each system: what it holds has to fit together."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import nn

import wholestep
from wholestep.cost.measure import this_device
from wholestep.errors import BadOption
from wholestep.lower import inductor
from wholestep.lower import measured as choice
from wholestep.lower.compile_region import Compiled
from wholestep.ops.tuner import Choice
from wholestep.profile import actions
from wholestep.profile import profile as profiling
from wholestep.profile.measure import timing
from wholestep.profile.memory.budget_fix import Fix
from wholestep.profile.profile import Profile, profile_job
from wholestep.report.page import render_page
from wholestep.train.job import Job
from wholestep.train.loader import OneBatch


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LEAST_WARM_UP", 2)
    monkeypatch.setattr(timing, "MOST_WARM_UP", 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def job(accumulate: int = 1, rows: int = 16) -> Job:
    torch.manual_seed(0)
    model = Net()
    place = torch.device("cpu")
    settings: dict[str, Any] = {"model": "net", "precision": "fp32", "seed": 0}
    options: dict[str, Any] = {"precision": "fp32", "clip_norm": None, "accumulate": accumulate}
    return Job(
        name="net", settings=settings, model=model, loss_fn=lambda m, b: m(b).square().mean(),
        optimizer=torch.optim.AdamW(model.parameters()), scheduler=None, batches=OneBatch(torch.randn(rows, 32), place),
        compile_options=options,
    )  # fmt: skip


def measured(system: str = "wholestep", *, accumulate: int = 1, rows: int = 16, **more: Any) -> Profile:
    more = {"backend": "interpret", "steps": 3} | more
    return profile_job(job(accumulate, rows), system=system, **more)


FORWARD = 2 * 16 * (3 * 32 * 32 + 32 * 4)
BACKWARD = 2 * FORWARD - 2 * 16 * 32 * 32
"""Two products for every one of the forward pass, but none for the gradient of the batch itself."""


def test_of_wholestep() -> None:
    found = measured()
    step = found.step_ms["median"]
    assert sum(found.phases.values()) == pytest.approx(step) and set(found.phases) >= {"forward", "backward", "update"}
    assert sum(ms for _, ms in found.waterfall) == pytest.approx(step)
    assert sum(row.ms for row in found.rows) == pytest.approx(step - found.phases["between calls"], rel=1e-3)
    products = sum(row.flops or 0 for row in found.rows if row.kind == "matmul")
    assert products == pytest.approx(FORWARD + BACKWARD) and found.unattributed == 0
    assert any(row.module == "blocks.*.*" and row.calls == 3 for row in found.rows), "equal layers are one row"
    assert "blocks.2.0" in found.modules and found.backend == "interpret"
    assert found.utilisation is not None and found.utilisation["executed_flops"] == products
    assert (
        found.memory is not None
        and found.eager_memory is not None
        and found.verified is not None
        and found.verified["ok"]
    )
    peak = next(row for row in found.predictions if row["unit"] == "bytes")
    assert peak["predicted"] == pytest.approx(peak["measured"], rel=0.05)
    facts = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert len(render_page(facts).encode()) < 2**20


def test_of_eager_pytorch() -> None:
    found = measured("eager", memory=False)
    products = sum(row.flops or 0 for row in found.rows if row.kind == "matmul")
    assert products == pytest.approx(FORWARD + BACKWARD) and found.memory is None and found.verified is None
    backward = [row for row in found.rows if row.kind == "matmul" and row.phase == "backward"]
    assert {row.module for row in backward} == {"blocks.*.*", "head"}, "backward operators know their module"
    assert set(found.phases) >= {"forward", "backward", "update"} and found.predicted_memory is None


def test_accumulation_counts_every_micro_batch() -> None:
    found = measured(accumulate=2, memory=False, verified=False)
    products = sum(row.flops or 0 for row in found.rows if row.kind == "matmul")
    assert products == pytest.approx(FORWARD + BACKWARD), "two halves of the batch"
    assert sum(row.calls for row in found.rows if row.name == "addmm") == 8
    assert found.utilisation is not None and found.utilisation["executed_flops"] == pytest.approx(products)


def test_what_only_has_names_is_unattributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)  # its compiling is not what is tested
    found = measured("compile", memory=False)
    assert found.rows and all(row.flops is None for row in found.rows) and not found.waterfall
    assert found.unattributed == pytest.approx(sum(row.share for row in found.rows)), "all that is known is names"
    assert found.floor_ms is not None and any("listed by name" in note for note in found.notes)
    assert "unattributed" in render_page(found.to_json())


def test_a_step_that_cannot_be_captured_is_counted_while_it_runs() -> None:
    torch.manual_seed(0)
    one = job()
    one.loss_fn = lambda m, b: m(b).square().mean() * (1.0 if float(b.sum()) > -1e9 else 0.0)
    with pytest.warns(wholestep.WholestepWarning):
        found = profile_job(one, backend="interpret", steps=2, memory=False)
    assert sum(row.flops or 0 for row in found.rows if row.kind == "matmul") == pytest.approx(FORWARD + BACKWARD)
    assert found.utilisation is None and any("nothing was captured" in note for note in found.notes)


@pytest.mark.slow
def test_interpreted_code_that_replaced_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runner is described with the facts of the compiled code; calls and memory are those of what runs."""
    seconds = {"inductor": 9.0, "interpret": 1.0}
    slower = Choice("lowering", "the step", "interpret", "measured", seconds)
    monkeypatch.setattr(choice.TUNER, "choose", lambda question: slower if question.what == "lowering" else None)
    monkeypatch.setattr(inductor, "require_compiler", lambda regions: None)
    monkeypatch.setattr(inductor, "compile_region", lambda region: Compiled(lambda args: (), 0.0, False))  # never run
    found = measured(backend="inductor", verified=False)
    assert found.backend == "interpret" and not any(row.kind == "region" for row in found.rows)
    assert found.memory is not None and found.memory.peak_bytes > 0
    assert any("compiled code dropped, it measures slower" in note for note in found.notes)


def test_nobody_is_sent_to_compiled_code_that_lost() -> None:
    found = measured(memory=False, verified=False)
    row = dataclasses.replace(found.rows[0], kind="elementwise", ms=3.0, lost_ms=2.0, calls=1)
    found = dataclasses.replace(found, rows=(row,), shares={"gpu_busy": None, "data_wait": 0.0, "between_calls": 0.3})
    assert [action["title"] for action in actions.actions_of(found)] == ["Compile the step"]
    lost = actions.actions_of(dataclasses.replace(found, asked_backend="inductor"))
    assert lost and all("ompile" not in action["title"] for action in lost)


def test_an_unknown_system_is_refused() -> None:
    with pytest.raises(BadOption, match="wholestep, eager, compile"):
        measured("eagre")


def test_every_action_follows_from_a_number() -> None:
    found = measured(rows=512)
    told = actions.actions_of(found)
    assert all(a["gain"] >= actions.WORTH for a in told)
    exact = [(not a["exact"], a["predicted"] is None) for a in told]
    assert exact == sorted(exact), "predictions before bounds, what changes the training comes last"
    assert "the peak falls from" in told[0]["title"] and told[0]["command"] is None
    assert told[0]["python"].startswith("step = wholestep.compile(model, loss_fn, optimizer, batch, ")
    planned = actions.actions_of(found, Fix("memory", 1, "2 values are recomputed", True, "--memory 1B", 'memory="1B"'))
    assert "saved activations are" in planned[0]["why"] and planned[0]["python"].endswith('batch, memory="1B")')


def test_the_line_to_copy_is_the_command_with_one_option_changed() -> None:
    words = ["wholestep", "profile", "a model", "--set", "width=16", "--batch", "8"]
    assert actions.command_with(words, "--batch 16") == "wholestep profile 'a model' --set width=16 --batch 16"
    assert actions.command_with(words, "--set width=8") == "wholestep profile 'a model' --batch 8 --set width=8"
    assert actions.command_with(words, "--set accumulate=2").endswith("width=16 --batch 8 --set accumulate=2")  # type: ignore[union-attr]
    assert actions.command_with((), "--batch 16") is None


def test_nothing_is_lost_below_zero_and_a_beaten_peak_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = dataclasses.replace(this_device("cpu"), peaks={"fp32": 1e6}, vector_peak=1e6, bandwidth=1e6)
    again = []
    monkeypatch.setattr(profiling, "this_device", lambda kind: slow)
    monkeypatch.setattr(profiling, "measure_device", lambda kind, fresh: again.append(fresh) or slow)
    found = measured(memory=False, verified=False)
    assert again == [True] and found.busy is not None
    assert all(row.lost_ms is not None and row.lost_ms >= 0 for row in found.rows)
    assert all(ms >= -1e-9 for _, ms in found.waterfall)


def test_a_busy_machine_is_timed_twice_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    spreads = iter([(1.0, 2.0, 3.0), (1.0, 1.5, 2.0)])

    def busy(call: Any, batch: Any, place: Any, *, samples: int) -> timing.Timing:
        return timing.Timing(next(spreads), (0.1,) * 3, 5.0, 3, True)

    monkeypatch.setattr(profiling, "time_steps", busy)
    found = measured(memory=False, verified=False)
    assert found.step_ms["median"] == 1500 and found.busy is not None and "the machine was busy" in found.busy
    assert found.step_ms["compile"] > 0


def test_actions_about_gaps_data_and_equality() -> None:
    found = dataclasses.replace(
        measured(memory=False, verified=False), shares={"gpu_busy": 0.6, "data_wait": 0.3, "between_calls": 0.0},
        verified={"ok": False, "departure": "blocks.0: its output is off"},
    )  # fmt: skip
    found = dataclasses.replace(found, command=("wholestep", "profile", "net", "--steps", "2", "--batch", "8"))
    told = actions.actions_of(found)
    texts = [action["why"] for action in told]
    assert "blocks.0: its output is off" in texts[0] and told[0]["command"] == "wholestep verify net --batch 8"
    assert any("idle 40%" in t and "CUDA graph" in t for t in texts) and any("30% of the time" in t for t in texts)
    assert all(action["command"] or action["python"] for action in told), "each has a line to copy"


def test_what_one_remedy_helps_is_one_action() -> None:
    found = measured(memory=False, verified=False)
    rows = [
        dataclasses.replace(row, kind="region", bound="compute", ms=3.0, lost_ms=2.0, calls=1) for row in found.rows[:2]
    ]
    shares = {"gpu_busy": None, "data_wait": 0.0, "between_calls": 0.3}
    found = dataclasses.replace(
        found,
        rows=rows,
        shares=shares,
        backend="inductor",
        settings=found.settings | {"batch": 8, "family": "gpt"},
        command=("wholestep", "profile", "net", "--batch", "8"),
    )
    told = [action for action in actions.actions_of(found) if action["about"] == "time"]
    assert [action["command"] for action in told] == ["wholestep profile net --batch 16"]
    assert told[0]["gain"] == pytest.approx(0.3 + 4.0 / found.step_ms["median"]), "what all of them lose"
    assert told[0]["why"].count("a larger batch fills the units better") == 1 and "30% of the step" in told[0]["why"]
