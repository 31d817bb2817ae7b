"""One row: what it holds, and how a contender that fails, runs out of memory or computes something else shows in it."""

from __future__ import annotations

import json

import pytest
import torch
from tests.bench.fake_workloads import fake, row_of

from wholestep.bench import machine, smoke
from wholestep.bench.measure import failure_of
from wholestep.bench.memory import MemoryMeter
from wholestep.bench.results import judged
from wholestep.bench.tables import best_peer, ratio, smoke_text, workload_table
from wholestep.disk import json_ready

OWN = "tests.bench.fake_workloads:"


def test_a_row_holds_what_a_reader_needs() -> None:
    row = row_of("eager")
    assert row["status"] == "ok" and len(row["curve"]) == 11 and len(row["step_ms"]["all"]) == 6
    assert row["throughput"] == pytest.approx(16e3 / row["step_ms"]["median"])
    assert row["losses"] == {"0": row["curve"][0], "4": row["curve"][4], "10": row["curve"][10]}
    assert row["curve"][10] < row["curve"][0] and row["memory"]["peak_bytes"] >= row["memory"]["steady_bytes"] >= 0
    assert {"device", "versions", "commit", "date"} <= set(row["machine"]) and row["sizes"] == {"width": 8}
    assert row["warm_up"] == {"steps": 5, "settled": False} and row["first_step_seconds"] > 0
    json.dumps(row)


def test_the_captured_step_has_eagers_losses_and_tells_its_rung() -> None:
    eager, ours = judged([row_of("eager"), row_of("wholestep-interpret")])
    assert "departs" not in ours and ours["curve"] == pytest.approx(eager["curve"], rel=1e-5)
    assert ours["wholestep"][0]["rung"] == "whole step" and ours["wholestep"][0]["explain"]


def test_an_own_contender_is_measured_like_any_other() -> None:
    eager, own = judged([row_of("eager"), row_of(OWN + "plain")])
    assert own["status"] == "ok" and own["curve"] == eager["curve"]


def test_what_a_step_takes_is_seen_before_a_cuda_graph_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check against eager in the first call, a recording after the third: all within one iteration of a GAN."""
    taken = iter([900, 300, 310, 20, 20])
    peak = [0]

    def step(batch: object) -> torch.Tensor:
        peak[0] = max(peak[0], next(taken))
        return torch.tensor(0.5)

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peak.__setitem__(0, 0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak[0])
    meter = MemoryMeter(torch.device("cuda"))
    call = meter.watched(step)
    assert [float(call(None)) for _ in range(5)] == [0.5] * 5 and meter.early == 300
    assert MemoryMeter(torch.device("cpu")).watched(step) is step


@pytest.mark.gpu
@pytest.mark.parametrize("contender", ["eager", "wholestep-interpret"])
def test_a_row_of_a_gpu_has_its_memory_and_its_name(contender: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        row = row_of(contender, size="gpu", device=torch.device("cuda"))
    finally:
        torch.set_float32_matmul_precision(before)
    assert row["status"] == "ok", row
    assert row["memory"]["reserved_bytes"] >= row["memory"]["peak_bytes"] >= row["memory"]["steady_bytes"] > 0
    assert row["machine"]["device"] == torch.cuda.get_device_name() and row["machine"]["cuda"]
    assert len(row["step_ms"]["all"]) == 6 and len(row["curve"]) == 13, "two iterations settle before the window"
    assert ("again" in row) is (contender == "eager")
    if contender == "eager":
        assert row["again"] == pytest.approx(row["losses"], rel=1e-3) and not torch.backends.cudnn.deterministic


@pytest.mark.parametrize(
    ("name", "said"), [("lazy", "at step 4"), ("halved", "at step 0"), ("exploding", "not finite")]
)
def test_a_contender_that_computes_something_else_is_flagged(name: str, said: str) -> None:
    eager, own = judged([row_of("eager"), row_of(OWN + name)])
    assert own["status"] == "ok" and said in own["departs"] and "departs" not in eager
    text = "\n".join(workload_table([eager, own]))
    assert "DEPARTS" in text and "departs" in text.splitlines()[3], "no ratio for it"


def test_a_row_is_held_to_what_eager_repeats_of_itself() -> None:
    eager, other = row_of("eager"), row_of("eager") | {"contender": "other"}
    moved = max(eager["curve"]) - min(eager["curve"])
    other["losses"] = eager["losses"] | {
        "4": eager["losses"]["4"] + 0.2 * moved,
        "10": eager["losses"]["10"] + 0.2 * moved,
    }
    assert "at step 4" in judged([eager, other])[1]["departs"]
    steady = eager | {"again": eager["losses"]}
    assert "at step 4" in judged([steady, other])[1]["departs"] and "repeat" not in "".join(
        workload_table([steady, other])
    )
    # it moved by half as much at step 4: later steps follow from that one
    unsteady = eager | {"again": eager["losses"] | {"4": eager["losses"]["4"] - 0.11 * moved}}
    assert "departs" not in judged([unsteady, other])[1]
    assert "eager does not repeat its own losses" in "\n".join(workload_table([unsteady, other]))
    other["losses"]["0"] += 0.05 * moved  # before eager was apart
    assert "at step 0" in judged([unsteady, other])[1]["departs"]


def test_losses_are_not_judged_against_another_seed() -> None:
    assert "departs" not in judged([row_of("eager"), row_of("eager", seed=1) | {"contender": "other"}])[1]


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("broken", "failed", "RuntimeError: the device is on fire"),
        ("greedy", "out of memory", "MemoryError: cannot have 9 TiB"),
        ("greedy_on_gpu", "out of memory", "CUDA out of memory"),
        ("no_function", "failed", "return a function"),
        ("missing", "failed", "has no function 'missing'"),
    ],
)
def test_a_failure_is_a_row_with_one_line(name: str, status: str, said: str) -> None:
    row = row_of(OWN + name)
    assert row["status"] == status and said in row["reason"] and "\n" not in row["reason"]
    assert f"{status}: " in "\n".join(workload_table([row_of("eager"), row]))


def test_the_allocator_of_the_cpu_runs_out_of_memory_too() -> None:
    said = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    assert failure_of(RuntimeError(said))["status"] == "out of memory"


def test_what_is_not_installed_is_no_failure() -> None:
    row = row_of("eager", fake(needs=("no_such_package",)))
    assert row["status"] == "not installed" and "no_such_package" in row["reason"]
    assert smoke.problems([row]) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it may be installed")
def test_liger_is_for_llama_and_says_when_it_is_lacking() -> None:
    from wholestep.bench.contenders import applies

    assert not applies("liger", fake()) and applies("liger", fake(gpu={"preset": "llama-1b"}))
    assert row_of("liger")["status"] == "not installed"


def test_dropout_is_seen_and_widens_the_tolerance() -> None:
    assert row_of("eager", fake(smoke={"width": 8, "dropout": 0.5}))["dropout"] is True
    assert row_of("eager")["dropout"] is False


def test_the_activation_budget_is_set_while_torch_compiles() -> None:
    from wholestep.bench.contenders import BUDGET, budget_context

    config = pytest.importorskip("torch._functorch.config")
    before = config.activation_memory_budget
    with budget_context()():
        assert config.activation_memory_budget == BUDGET
    assert config.activation_memory_budget == before


def test_the_smoke_run_names_what_does_not_hold() -> None:
    workloads = [fake("good"), fake("bad")]
    # Made beforehand: workloads run side by side, in processes of their own; threads of this one would share its seed.
    made = {
        workload.name: [row_of("eager", workload), row_of(OWN + own, workload)]
        for workload, own in zip(workloads, ("plain", "lazy"), strict=True)
    }
    rows = smoke.run_smoke(workloads, run=lambda workload, contenders, seed: made[workload.name])
    said = smoke.problems(rows)
    assert (
        len(said) == 1
        and said[0].startswith("bad by")
        and [row["workload"] for row in rows] == ["good", "good", "bad", "bad"]
    )
    assert len(smoke_text(rows).splitlines()) == 5


def test_memory_on_a_cpu_is_the_peak_of_the_window_above_what_was_there() -> None:
    device = torch.device("cpu")
    there, meter = torch.ones(2**24), MemoryMeter(device)
    torch.ones(2**26).sum()  # before the window
    meter.window_begins()
    torch.ones(2**25).sum()
    read = meter.read()
    assert 2**27 * 0.9 < read["peak_bytes"] < 2**28 * 0.9 and read["steady_bytes"] < 2**26 and len(there) == 2**24


def test_the_best_peer_is_fast_honest_and_not_ours() -> None:
    def row(contender: str, median: float, **facts: object) -> dict:
        return {"contender": contender, "status": "ok", "step_ms": {"median": median}, **facts}

    rows = [row("eager", 9.0), row("compile", 5.0), row("mine:lazy", 1.0, departs="x"), row("wholestep", 2.0)]
    best = best_peer([*rows, {"contender": "liger", "status": "failed"}])
    assert best is rows[1] and ratio(rows[3], best) == 2.5 and best_peer(rows[3:]) is None


def test_numbers_without_a_word_in_json_become_null() -> None:
    assert json_ready({"a": (float("nan"), 1.0), "b": float("inf")}) == {"a": [None, 1.0], "b": None}


def test_the_commit_comes_from_the_environment_or_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PACKAGE", machine.Path("/"))
    monkeypatch.setenv("WHOLESTEP_COMMIT", "abc")
    assert machine.commit() == "abc"
    monkeypatch.delenv("WHOLESTEP_COMMIT")
    assert machine.commit() == "unknown"
