"""`wholestep train rgcn`: it learns the kinds of nodes that were held out; data and models that do not fit are told in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.cli.calls import Call

from wholestep.train.run_folder import open_run


def test_it_names_held_out_nodes_better_than_one_answer_for_all(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call("train", "rgcn", "--set", "files=24", "--steps", "40", "--backend", "interpret")
    assert done.code == 0, done.err
    shares = [float(share) for share in re.findall(r"([\d.]+) %", " ".join(done.out.split()))]
    learned, commonest = shares[-2:]
    assert learned > commonest + 15, done.out
    facts = open_run(tmp_path / "runs" / "rgcn-pygraph").facts
    assert facts["settings"]["data"] == "pygraph" and facts["settings"]["config"]["nodes"] > 100


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("rgcn", "--data", "shakespeare"), "rgcn runs over a graph. use pygraph"),
        (("rgcn", "--data", "digits"), "is images, rgcn runs over a graph. use pygraph"),
        (("gpt-1m", "--data", "pygraph"), "is a graph, gpt-1m reads text"),
        (("resnet-18", "--data", "pygraph"), "is a graph, resnet-18 sees images. use digits"),
        (("rgcn", "--batch", "3"), "one whole graph"),
        (("rgcn", "--seq", "3"), "one whole graph"),
        (("rgcn", "--set", "accumulate=2"), "one whole graph"),
        (("rgcn", "--set", "files=3", "--set", "nodes=5"), "nodes=5: the graph has"),
        (("rgcn", "--set", "dropout=1"), "dropout=1.0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_does_not_fit_is_one_line(arguments: tuple[str, ...], told: str, call: Call, tmp_path: Path) -> None:
    done = call("train", *arguments, "--out", str(tmp_path / "run"))
    assert done.code == 2 and told in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "run").exists()
