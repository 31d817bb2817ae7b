"""Twins: sizes, ratios and types as wanted; the same for the same seed; no edge twice."""

from __future__ import annotations

import time

import pytest
import torch

from wholestep.data.relational_twins import Twin, achieved, report, twin
from wholestep.data.twin_statistics import STATISTICS
from wholestep.errors import BadOption

SMALL = {
    "aifb": 0.5, "mutag": 0.2, "bgs": 0.05, "am": 0.01, "mag": 0.002, "wikikg2": 0.005, "biokg": 0.05, "fb15k-237": 0.1,
}  # fmt: skip
RATIOS = ("source pairs / edges", "destination pairs / edges")


def keys(made: Twin) -> torch.Tensor:
    return (made.etype * made.num_nodes + made.src) * made.num_nodes + made.dst


@pytest.mark.parametrize("name", STATISTICS)
def test_a_small_twin_is_what_was_wanted(name: str) -> None:
    made = twin(name, scale=SMALL[name])
    wanted, found = STATISTICS[name].wanted(SMALL[name]), achieved(made)
    for statistic in RATIOS:
        assert found[statistic] == pytest.approx(wanted[statistic][0], rel=0.05), statistic
    assert found["edges"] == pytest.approx(wanted["edges"][0], abs=2 * len(STATISTICS[name].groups))
    assert found["nodes"] == wanted["nodes"][0] and found["smallest relation"] >= 1
    assert int(made.etype.max()) + 1 == made.num_relations == wanted["relations"][0]
    assert len(keys(made).unique()) == len(made.src) and max(int(made.src.max()), int(made.dst.max())) < made.num_nodes


@pytest.mark.parametrize("name", STATISTICS)
def test_the_rows_add_up(name: str) -> None:
    row = STATISTICS[name]
    copies = 2 if row.inverses else 1
    assert sum(group.edges for group in row.groups) * copies == row.edges
    assert sum(group.relations for group in row.groups) * copies == row.relations
    assert sum(row.types.values()) == row.nodes


@pytest.mark.parametrize("name", ["mag", "biokg"])
def test_relations_join_the_types_they_are_between(name: str) -> None:
    made, first = twin(name, scale=SMALL[name]), 0
    for group in STATISTICS[name].groups:
        inside = (made.etype >= first) & (made.etype < first + group.relations)
        for node, kind in ((made.src, group.source), (made.dst, group.destination)):
            assert made.node_type[node[inside]].unique().tolist() == [made.type_names.index(kind)]
        first += group.relations


def test_fb15k_237_at_full_size() -> None:
    began = time.process_time()
    made = twin("fb15k-237")
    took = time.process_time() - began
    found = achieved(made)
    for statistic, (value, _) in STATISTICS["fb15k-237"].wanted(1.0).items():
        loosely = statistic == "median relation" or statistic.startswith("in-degree")
        assert found[statistic] == pytest.approx(value, rel=0.15 if loosely else 0.05), statistic
    half = len(made.src) // 2
    assert made.src[half:].equal(made.dst[:half]) and made.etype[half:].equal(made.etype[:half] + 237)
    assert took < 20, "it should be a second or two, on however many cores"


def test_the_seed_decides() -> None:
    one, again, other = (twin("aifb", seed=seed, scale=0.2) for seed in (1, 1, 2))
    assert one.src.equal(again.src) and one.dst.equal(again.dst) and not keys(one).equal(keys(other))


def test_the_report_has_both_columns(capsys: pytest.CaptureFixture[str]) -> None:
    text = report(twin("am", scale=0.005))
    assert capsys.readouterr().out.strip() == text.strip()
    lines = {line[:28].strip(): line for line in text.splitlines()}
    assert "0.57" in lines[RATIOS[0]] and "assumed" not in lines[RATIOS[0]] and "assumed" in lines[RATIOS[1]]


def test_bad_input_is_one_line() -> None:
    with pytest.raises(BadOption, match="did you mean biokg"):
        twin("biokq")
    with pytest.raises(BadOption, match="scale=0"):
        twin("aifb", scale=0)
    with pytest.raises(BadOption, match="larger scale"):
        twin("biokg", scale=0.0005)
