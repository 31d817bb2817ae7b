"""The faster of two lowerings is taken, and the verdict is kept."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import wholestep.lower.measured as measured
from wholestep.capture.dry import capture_example
from wholestep.capture.subject import make_subject
from wholestep.graph.training_graph import TrainingGraph
from wholestep.lower import lower_interpret
from wholestep.lower.runner import Runner
from wholestep.ops.tuner import REMEMBERED, Tuner


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(measured, "TUNER", Tuner())


@pytest.fixture
def graph() -> TrainingGraph:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Dropout(0.1), nn.Linear(4, 2))
    subject = make_subject(
        model, lambda m, b: m(b).square().mean(), torch.optim.AdamW(model.parameters()), clip_norm=1.0
    )
    return capture_example(subject, torch.zeros(3, dtype=torch.int64)).graph


def slowed(graph: TrainingGraph, seconds: float, facts: dict[str, Any]) -> Runner:
    inner = lower_interpret(graph)

    def function(inputs: list[Any]) -> tuple[Any, ...]:
        time.sleep(seconds)
        return tuple(inner(inputs))

    return Runner(function, inner.num_inputs, facts)


def test_the_slower_one_is_dropped_and_named(graph: TrainingGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = (
        slowed(graph, 0.05, {"backend": "inductor", "regions": 3}),
        slowed(graph, 0.0, {"backend": "interpret"}),
    )
    chosen = measured.faster_of(graph, slow, fast).describe()
    assert chosen["backend"] == "interpret" and "measures slower" in chosen["notes"][0] and chosen["regions"] == 3
    assert chosen["driver"] is None  # that of the runner which runs, not of the one dropped
    assert chosen["choices"]["lowering"].name == "interpret"
    # the verdict is remembered by other processes too: the now faster one is not measured again
    monkeypatch.setattr(measured, "TUNER", Tuner())
    again = measured.faster_of(graph, slowed(graph, 0.0, {"backend": "inductor"}), fast).describe()
    assert again["backend"] == "interpret" and again["choices"]["lowering"].source == REMEMBERED


def test_the_faster_one_is_kept(graph: TrainingGraph) -> None:
    fast = slowed(graph, 0.0, {"backend": "inductor"})
    chosen = measured.faster_of(graph, fast, slowed(graph, 0.05, {"backend": "interpret"})).describe()
    choice = chosen["choices"]["lowering"]
    assert chosen["backend"] == choice.name == "inductor" and set(choice.seconds) == {"inductor", "interpret"}


def test_code_that_fails_on_stand_ins_is_dropped_and_says_so(graph: TrainingGraph) -> None:
    def broken(inputs: list[Any]) -> tuple[Any, ...]:
        raise RuntimeError("a kernel that does not load")

    compiled = Runner(broken, len(graph.inputs), {"backend": "inductor"})
    chosen = measured.faster_of(graph, compiled, slowed(graph, 0.0, {"backend": "interpret"})).describe()
    assert chosen["backend"] == "interpret" and "fails on stand-ins: RuntimeError: a kernel" in chosen["notes"][0]


def test_stand_ins_have_the_shapes_of_the_inputs(graph: TrainingGraph) -> None:
    for tensor, node in zip(measured.stand_ins(graph), graph.placeholders, strict=True):
        fake = node.meta["val"]
        assert (tensor.shape, tensor.dtype, tensor.stride()) == (fake.shape, fake.dtype, fake.stride())
