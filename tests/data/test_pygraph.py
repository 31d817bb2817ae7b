"""The Python library as a graph: edges of a small package one by one; the same graph every time; what is held out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from wholestep.data.pygraph import PyGraph, PyGraphBatches, read_pygraph
from wholestep.data.python_kinds import KINDS, RELATIONS
from wholestep.errors import BadOption

PACKAGE = {
    "base.py": (
        "import os\nclass Base:\n    def run(self):\n        self.stop()\n    def stop(self): pass\n"
        "def helper(): return Base()\n"
    ),
    "pack/__init__.py": "from . import child\n",
    "pack/child.py": (
        "import base as b\nfrom base import helper\nclass Child(b.Base):\n    async def go(self):\n"
        "        def inner(): return helper()\n        return b.helper() or inner()\n"
    ),
    "broken.py": "def (:\n",
    "tests/left_out.py": "x = 1\n",
}


def packaged(folder: Path) -> PyGraph:
    for name, text in PACKAGE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return read_pygraph(root=folder)


def test_every_edge_of_a_small_package(tmp_path: Path) -> None:
    graph = packaged(tmp_path)
    kinds = {name: KINDS[kind] for name, kind in zip(graph.names, graph.kind.tolist(), strict=True)}
    assert kinds == {
        "base": "module", "base.Base": "class", "base.Base.run": "method", "base.Base.stop": "method",
        "base.helper": "function", "pack": "module", "pack.child": "module", "pack.child.Child": "class",
        "pack.child.Child.go": "method", "pack.child.Child.go.inner": "function",
    }  # fmt: skip
    half = len(graph.src) // 2
    told = {
        (graph.names[s], RELATIONS[r], graph.names[d])
        for s, r, d in zip(graph.src[:half].tolist(), graph.etype[:half].tolist(), graph.dst[:half].tolist())
    }
    assert {edge for edge in told if edge[1] != "contains"} == {
        ("base.Base.run", "calls", "base.Base.stop"), ("base.helper", "calls", "base.Base"), ("pack", "imports", "pack.child"),
        ("pack.child", "imports", "base"), ("pack.child", "imports", "base.helper"),
        ("pack.child.Child", "inherits", "base.Base"), ("pack.child.Child.go", "calls", "base.helper"),
        ("pack.child.Child.go.inner", "calls", "base.helper"),
    }  # fmt: skip
    assert {(s, d) for s, r, d in told if r == "contains"} == {
        (name.rpartition(".")[0], name) for name, kind in kinds.items() if kind != "module"
    }
    assert graph.src[half:].equal(graph.dst[:half]) and graph.etype[half:].equal(graph.etype[:half] + len(RELATIONS))


def test_it_is_the_same_every_time_and_as_large_as_asked() -> None:
    one, again, smaller = read_pygraph(12), read_pygraph(12), read_pygraph(6)
    assert one.digest == again.digest != smaller.digest and one.names[: len(smaller.names)] == smaller.names
    assert (one.files, smaller.files) == (12, 6) and set(one.kind.tolist()) == set(range(4))


def test_what_is_held_out_is_never_told() -> None:
    batches = PyGraphBatches(read_pygraph(12), device=torch.device("cpu"))
    (asked,), told = batches.held_out(), batches.batch(7)
    everything = torch.cat([asked["nodes"], told["nodes"]])
    assert everything.sort().values.equal(torch.arange(len(batches.read.names))) and batches.units == len(told["nodes"])
    assert told["labels"].equal(batches.read.kind[told["nodes"]]) and 0.2 < batches.commonest() < 0.9
    one, hub, none = batches.edges()
    assert len(one["nodes"]) == 1 and int(hub["graph"].src.max()) == 0 and none["graph"].num_edges == 0


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"there are no \.py files"):
        read_pygraph(root=tmp_path)
    with pytest.raises(BadOption, match="files=0"):
        read_pygraph(0)
