"""`wholestep plan` as a command: the answer, its files, and one line on bad input. The planner is a stand-in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from tests.cli import fake_frontier
from tests.cli.calls import Call, program

from wholestep.graph.plan_file import read_plan
from wholestep.train import fit as fit_module
from wholestep.train import loop
from wholestep.train import plan_use as plan_use_module

TINY = ["gpt-1m", "--set", "layers=2", "--set", "width=32", "--set", "heads=2", "--batch", "3", "--seq", "17"]
LLAMA = [
    "llama-1b", "--set", "num_hidden_layers=2", "--set", "hidden_size=64", "--set", "intermediate_size=96",
    "--set", "num_attention_heads=4", "--set", "num_key_value_heads=2", "--set", "vocab_size=101", "--seq", "16",
]  # fmt: skip


@pytest.fixture(autouse=True)
def planner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fit_module, "frontier", fake_frontier.frontier)
    monkeypatch.setattr(fit_module, "leanest", fake_frontier.leanest)
    monkeypatch.chdir(tmp_path)


def test_the_answer_is_first_and_everything_is_there(call: Call) -> None:
    done = call("plan", *TINY, "--device", "l4", "--no-check-batch")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("gpt-1m, batch 3 x 17, fp32: fits NVIDIA L4") and "(not calibrated)" in lines[0]
    for words in (
        "weights",
        "optimizer state",
        "saved activations",
        "on the card",
        "nothing is recomputed",
        "largest   batch",
    ):
        assert words in done.out, words
    assert "recompute blocks.*.mlp/gelu_1" in done.out and "◆" in done.out and "not calibrated: they follow" in done.out


def test_json_adds_up_and_llama_keeps_its_attention(call: Call) -> None:
    done = call("plan", *LLAMA, "--batch", "2", "--json", "--no-check-batch")
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert facts["fits"] and facts["times"] == "calibrated" and facts["settings"]["precision"] == "bf16"
    for point in facts["frontier"]:
        assert sum(point["breakdown"].values()) == point["peak_bytes"] < point["card_bytes"]
    weights = facts["frontier"][0]["breakdown"]["weights"]
    assert 4 * facts["num_parameters"] <= weights < 4.1 * facts["num_parameters"] + 512 * 30


def test_what_does_not_fit_is_exit_1_with_the_least_and_what_would_help(call: Call, tmp_path: Path) -> None:
    least = json.loads(call("plan", *TINY, "--json", "--no-check-batch").out)["smallest_bytes"]
    done = call("plan", *TINY, "--memory", str(least - 100_000), "--out", "p.toml")
    assert done.code == 1 and "does not fit" in done.out.splitlines()[0] and "the least is" in done.out.splitlines()[0]
    assert "--batch 2" in done.out or "--batch 1" in done.out
    assert "accumulate=3" in done.out and not (tmp_path / "p.toml").exists()
    told = call("plan", *TINY, "--memory", str(least - 100_000), "--json")
    assert told.code == 1 and json.loads(told.out)["fits"] is False and "does not fit" in told.err
    nothing = call("plan", *TINY, "--memory", "100KiB")
    assert nothing.code == 1 and "not even one row fits" in nothing.out


def test_the_fastest_plan_that_fits_is_chosen_and_written(call: Call, tmp_path: Path) -> None:
    points = json.loads(call("plan", *TINY, "--json", "--no-check-batch").out)["frontier"]
    budget = (points[0]["card_bytes"] + points[1]["card_bytes"]) // 2
    done = call("plan", *TINY, "--memory", str(budget), "--out", "p.toml", "--svg", "f.svg", "--no-check-batch")
    assert done.code == 0 and "recompute blocks.*.mlp: gelu_0" in done.out, done.out
    plan = read_plan(tmp_path / "p.toml")
    assert plan.recompute == ("blocks.*.mlp/gelu_0",) and plan.budget_bytes == budget
    assert plan.made_for["batch"] == 3 and plan.made_for["config.layers"] == 2 and plan.made_for["device"] == "h200"
    picture = (tmp_path / "f.svg").read_text()
    ElementTree.fromstring(picture)
    assert "prefers-color-scheme: dark" in picture and "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    said = call("explain", "p.toml")
    assert said.code == 0 and "recompute blocks.*.mlp: gelu_0" in said.out and "model gpt-1m, batch 3" in said.out
    assert json.loads(call("explain", "p.toml", "--json").out)["recompute"] == ["blocks.*.mlp/gelu_0"]


def test_peers_are_drawn_beside_the_plans(call: Call, tmp_path: Path) -> None:
    rows = [
        {"model": "gpt", "system": "eager", "peak_reserved_gib": 0.6, "step_ms": {"median": 12.0}},
        {"model": "bert", "system": "other", "peak_reserved_gib": 1, "step_ms": {"median": 1}},
        {"name": "mine", "gib": 0.55, "ms": 11},
    ]
    (tmp_path / "r.json").write_text(json.dumps({"rows": rows}))
    assert call("plan", *TINY, "--svg", "f.svg", "--peers", "r.json", "--no-check-batch").code == 0
    picture = (tmp_path / "f.svg").read_text()
    assert "eager: 0.6 GiB, 12 ms (measured)" in picture and "mine: " in picture and "other" not in picture


def test_the_largest_batch_fits_and_one_more_does_not(call: Call) -> None:
    budget = json.loads(call("plan", *TINY, "--json", "--no-check-batch").out)["smallest_bytes"] + 3_000_000
    sizes = [*TINY[:-4], "--seq", "17", "--memory", str(budget), "--json"]
    largest = json.loads(call("plan", *sizes, "--batch", "3", "--check-batch").out)["largest_batch"]
    assert largest["certain"] and "captured again" in largest["how"] and largest["batch"] > 3
    for batch, code in ((largest["batch"], 0), (largest["batch"] + 1, 1)):
        assert call("plan", *sizes, "--batch", str(batch), "--no-check-batch").code == code


def test_accumulation_keeps_the_optimizer_state_in_the_account(call: Call) -> None:
    facts = json.loads(call("plan", *TINY, "--set", "accumulate=3", "--json", "--no-check-batch").out)
    split = facts["frontier"][0]["breakdown"]
    assert split["optimizer state"] >= 8 * facts["num_parameters"]


def test_a_card_known_by_its_memory_alone_has_relative_times(call: Call) -> None:
    done = call("plan", *TINY, "--device", "24GiB", "--no-check-batch")
    assert (
        done.code == 0
        and "1.00x the time of the fastest step (predicted)" in done.out.splitlines()[0]
        and "speed of this card is not known" in done.out
    )
    assert " ms" not in done.out.replace("terms", "")


def test_images_and_functions_of_the_user(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, monkeypatch)
    assert call("plan", "resnet-18", "--set", "image_size=8", "--batch", "2", "--no-check-batch").code == 0
    own = call("plan", "own_training:setup")
    assert own.code == 0 and "built for real" in own.out, own.err
    assert call("plan", "own_training:misfit").code == 2


def test_nothing_is_allocated_for_the_weights(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve gigabytes of weights would not fit the tests' machine; drawing them would take a minute."""
    made: list[int] = []
    normal = torch.Tensor.normal_

    def watched(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.device.type != "meta":
            made.append(self.numel())
        return normal(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "normal_", watched)
    done = call(
        "plan", "llama-8b", "--set", "num_hidden_layers=2", "--batch", "1", "--seq", "64", "--json", "--no-check-batch"
    )
    assert done.code == 0 and json.loads(done.out)["num_parameters"] > 1e9
    assert max(made, default=0) < 1e6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "MODEL"),
        ("gpt-2m", "did you mean gpt-1m?"),
        ("gpt-1m --device h20", "did you mean h200?"),
        ("gpt-1m --device 12GBs", "not an amount of memory"),
        ("gpt-1m --memory 12GBs", "not an amount of memory"),
        ("gpt-1m --memory 500GiB", "has 140 GiB"),
        ("gpt-1m --batch 0", "--batch"),
        ("gpt-1m --seq 100000", "at most 64 tokens"),
        ("gpt-10m --device t4", "no units for bf16"),
        ("gpt-1m --gpus 2", "not part of this version"),
        ("gpt-1m --gpus 0", "--gpus"),
        ("gpt-1m --precision fp8", "bf16"),
        ("gpt-1m --precision bf61", "did you mean bf16?"),
        ("gpt-1m --set layer=2", "did you mean layers?"),
        ("gpt-1m --out nowhere/p.toml", "no folder nowhere"),
        ("gpt-1m --svg .", "is a folder"),
        ("gpt-1m --disable nothing", "there is no pass"),
        ("gpt-1m --peers nowhere.json", "nowhere.json"),
        ("gpt-1m --batch 3 --set accumulate=2", "cannot be cut"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(call: Call, arguments: str, said: str) -> None:
    done = call("plan", *arguments.split())
    assert done.code == 2 and said in done.err and len(done.err.strip().splitlines()) == 1, done.err


# ---- train --plan ----


@pytest.fixture
def plan_for_here(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A plan whose device is the machine of the tests, as `--device this` on it would write."""
    assert call("plan", *TINY, "--precision", "fp32", "--no-check-batch", "--out", "p.toml").code == 0
    text = (tmp_path / "p.toml").read_text()
    (tmp_path / "p.toml").write_text(text.replace('"device" = "h200"', '"device" = "cpu"'))
    monkeypatch.setattr(plan_use_module, "device_here", lambda: "cpu")
    return tmp_path / "p.toml"


class Reached(Exception):
    """The plan went to the training loop."""


def _trained(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def instead(job: Any, **options: Any) -> Any:
        seen.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train", instead)
    return seen


def test_train_hands_the_plan_to_compile(call: Call, plan_for_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _trained(monkeypatch)
    call("train", *TINY, "--plan", "p.toml")
    assert seen["compile_options"]["plan"] == read_plan(plan_for_here)
    assert seen["request"]["plan"] == str(plan_for_here), "resuming from another folder finds it"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--batch", "4"], "batch: made for 3, now 4"),
        (["--seq", "16"], "seq: made for 17, now 16"),
        (["--set", "width=64"], "config.width: made for 32, now 64"),
        (["--set", "optimizer=sgd"], "optimizer: made for adamw, now sgd"),
        (["--precision", "bf16"], "precision: made for fp32, now bf16"),
    ],
)
def test_a_stale_plan_is_refused_by_the_field_that_changed(
    call: Call, plan_for_here: Path, changed: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _trained(monkeypatch)
    done = call("train", *TINY, *changed, "--plan", "p.toml")
    assert done.code == 2 and said in done.err and not seen, done.err


def test_a_plan_for_another_card_another_torch_or_no_plan_at_all(
    call: Call, plan_for_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _trained(monkeypatch)
    text = plan_for_here.read_text()
    plan_for_here.write_text(text.replace('"device" = "cpu"', '"device" = "h200"'))
    done = call("train", *TINY, "--plan", "p.toml")
    assert done.code == 2 and "device: made for h200, now cpu" in done.err
    assert "there is no plan" in call("train", *TINY, "--plan", "q.toml").err
    assert "there is no plan" in call("explain", "q.toml").err
    plan_for_here.write_text(text.replace(torch.__version__, "2.11.0"))
    assert "made with torch 2.11.0" in call("train", *TINY, "--plan", "p.toml").err and seen, "said, not refused"
    seen.clear()
    plan_for_here.write_text(text.replace('"device" = "cpu"', '"device" = "24GiB"'))
    call("train", *TINY, "--plan", "p.toml")
    assert seen, "made for any card of that memory"
