"""Two results files side by side, and the claims of papers beside one."""

from __future__ import annotations

from typing import Any

import pytest
from tests.bench.fake_workloads import fake

from wholestep.bench.claims import MEASURES, NOT_YET, answers, load_papers, papers_json, papers_text
from wholestep.bench.compare import compare, comparison_text
from wholestep.bench.workloads import WORKLOADS


def row(median: float = 100.0, *, within: float = 1.0, contender: str = "wholestep", **changes: Any) -> dict[str, Any]:
    facts = {
        "workload": "line", "contender": contender, "status": "ok", "size": "gpu", "sizes": {"width": 8}, "device": "cuda",
        "seed": 0, "precision": "fp32", "first_step_seconds": 20.0, "memory": {"peak_bytes": 1000},
        "step_ms": {"median": median, "interval": [median - within, median + within]},
        "machine": {"device": "H200", "versions": {"torch": "2.13"}},
    }  # fmt: skip
    return facts | changes


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        (row(104.0), "slower"),
        (row(96.0), "faster"),
        (row(101.5, within=0.1), "same"),  # apart, but less than 2 %
        (row(110.0, within=15.0), "same"),  # more than 2 %, but the intervals overlap
        (row(100.0), "same"),
        (row(100.0, sizes={"width": 9}), "not comparable"),
        (row() | {"status": "failed", "reason": "fire"}, "broken"),
    ],
)
def test_only_what_is_beyond_noise_has_moved(after: dict[str, Any], verdict: str) -> None:
    before = row(100.0, within=0.1) if after["step_ms"]["median"] == 101.5 else row()
    found = compare([before], [after])
    assert [change.verdict for change in found.changes] == [verdict]
    assert found.slower is (verdict in ("slower", "broken"))


def test_memory_on_a_gpu_and_new_departures_are_told() -> None:
    after = row(memory={"peak_bytes": 1030}, departs="loss 2 at step 4 where eager has 1")
    found = compare([row()], [after])
    assert [change.verdict for change in found.changes] == ["same", "larger", "departs"] and found.slower
    on_cpu = compare([row(device="cpu")], [row(device="cpu", memory={"peak_bytes": 5})])
    assert [change.verdict for change in on_cpu.changes] == ["same"]


def test_rows_that_are_new_or_gone_and_other_machines_are_told() -> None:
    other = {"device": "A100", "versions": {"torch": "2.14", "triton": "3"}}
    found = compare([row(), row(contender="old")], [row(machine=other), row(contender="new")])
    assert found.new == [("line", "new")] and found.gone == [("line", "old")]
    text = comparison_text(found)
    for said in (
        "another device: H200 -> A100",
        "another torch: 2.13 -> 2.14",
        "another triton: none -> 3",
        "new: line by new",
    ):
        assert said in text, text
    assert not compare([row()], [row()]).warnings


def test_a_failure_in_both_is_no_news() -> None:
    failed = row() | {"status": "out of memory", "reason": "9 TiB"}
    found = compare([failed], [failed])
    assert [change.verdict for change in found.changes] == ["same"] and not found.slower


# ---- papers ----


def test_ten_papers_whose_rows_exist() -> None:
    papers = load_papers()
    assert {paper.system for paper in papers} == {
        "RAF", "Slapo", "Mist", "SSDTrain", "Tempo", "Hidet", "EcoRNN", "Hector", "PyTorch-Direct", "TBD"
    }  # fmt: skip
    for claim in (claim for paper in papers for claim in paper.claims):
        assert claim.text and claim.figure and claim.where and claim.hardware
        assert bool(claim.rows) != bool(claim.lacking), "either rows speak to it, or something is lacking"
        assert all(one["measure"] in MEASURES and one.get("workload", "neumf") in WORKLOADS for one in claim.rows)


def test_claims_without_rows_are_not_measured_yet_and_with_rows_have_figures() -> None:
    claim = next(claim for paper in load_papers() if paper.system == "Tempo" for claim in paper.claims)
    assert all(NOT_YET in line for line in answers(claim, [], WORKLOADS))
    rows = [
        row(100.0, workload="bert-large", contender="eager"),
        row(50.0, workload="bert-large", memory={"peak_bytes": 700}),
    ]
    assert answers(claim, rows, WORKLOADS) == [
        "bert-large, speed over eager: 2.00x", "bert-large, memory against eager: -30 % peak"
    ]  # fmt: skip
    tuning = next(paper for paper in load_papers() if paper.system == "Hidet").claims[1]
    assert answers(
        tuning, [*rows, row(workload="bert-large", contender="compile", first_step_seconds=60.0)], WORKLOADS
    ) == [
        f"resnet-50, first step against compile: {NOT_YET}",
        "bert-large, first step against compile: 20 s, torch.compile 60 s",
    ]
    small = [one | {"size": "smoke"} for one in rows]
    assert all(NOT_YET in line for line in answers(claim, small, WORKLOADS)), (
        "a small size on a CPU says nothing about speed"
    )
    assert all(NOT_YET in line for line in answers(claim, [rows[0], rows[1] | {"departs": "x"}], WORKLOADS))


def test_papers_print_and_serialise() -> None:
    papers = load_papers()
    text = papers_text(papers, [], {"line": fake()})
    assert "1 models, 1 domains" in text and text.count(NOT_YET) > 20
    assert len(papers_json(papers, [], WORKLOADS)) == 10
