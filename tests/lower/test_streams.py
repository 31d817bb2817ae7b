"""Statements on streams of their own: generated code says who waits for whom; the order is checked where there is no GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from typing import Any

import pytest
import torch
from torch import fx

from wholestep.lower.driver import Statement, build_driver
from wholestep.lower.streams import InOrder, OnCuda, streams_for


def statements(**order: dict[str, Any]) -> tuple[list[fx.Node], list[Statement], fx.Node]:
    """x -> doubled -> far (a copy elsewhere) -> back -> out, each with what `order` says of it."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(operator.mul, (x, 2), name="doubled")
    far = graph.call_function(torch.clone, (doubled,), name="far")
    back = graph.call_function(torch.clone, (far,), name="back")
    out = graph.call_function(operator.add, (back, x), name="out")
    made = [Statement(n.target, n.args, {}, (n,), **order.get(n.name, {})) for n in (doubled, far, back, out)]  # type: ignore[arg-type]
    return [x], made, out


ROUND_TRIP: dict[str, dict[str, Any]] = {
    "doubled": {"leaves": "made"},
    "far": {"stream": "copy", "after": ("made",), "leaves": "out_done"},
    "back": {"stream": "copy", "after": ("out_done",), "leaves": "in_done"},
    "out": {"after": ("in_done",)},
}


def test_what_is_written_is_what_runs() -> None:
    streams = InOrder()
    inputs, calls, out = statements(**ROUND_TRIP)
    driver = build_driver(inputs, calls, [out], {}, streams=streams)
    for _ in range(2):
        assert torch.equal(driver.function([torch.ones(3)])[0], torch.full((3,), 3.0))
        assert streams.log == [
            ("leave", "", "made"), ("wait", "copy", "made"), ("on", "copy", ""), ("leave", "copy", "out_done"),
            ("wait", "copy", "out_done"), ("on", "copy", ""), ("leave", "copy", "in_done"), ("wait", "", "in_done"),
        ]  # fmt: skip
    assert ".join()" in driver.source and driver.source.count("with ") == 2


def test_a_step_that_says_nothing_about_streams_has_no_line_of_it() -> None:
    inputs, calls, out = statements()
    driver = build_driver(inputs, calls, [out], {}, streams=InOrder())
    assert "streams" not in driver.source and torch.equal(driver.function([torch.ones(2)])[0], torch.full((2,), 3.0))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"doubled": {}}, "stream 'copy' waits for 'made', which nothing has left behind yet"),
        ({"out": {"after": ("never",)}}, "stream 'main' waits for 'never'"),
        ({"back": {"stream": "copy", "leaves": "out_done"}}, "'out_done' is left behind twice"),
    ],
)
def test_an_order_that_a_gpu_would_not_notice_is_an_error(changed: dict[str, Any], told: str) -> None:
    inputs, calls, out = statements(**{**ROUND_TRIP, **changed})
    driver = build_driver(inputs, calls, [out], {})
    for _ in range(2):  # what one step left behind is nothing to the next
        with pytest.raises(RuntimeError, match=told):
            driver.function([torch.ones(3)])
        next(s for s in driver.function.__globals__.values() if isinstance(s, InOrder)).join()


def test_the_order_of_a_device() -> None:
    assert isinstance(streams_for(torch.device("cpu")), InOrder)


@pytest.mark.gpu
@pytest.mark.parametrize("recorded", [False, True])
def test_streams_of_a_gpu(recorded: bool) -> None:
    streams = streams_for(torch.device("cuda"))
    assert isinstance(streams, OnCuda)
    inputs, calls, out = statements(**ROUND_TRIP)
    driver = build_driver(inputs, calls, [out], {}, streams=streams)
    x = torch.ones(1 << 20, device="cuda")
    for _ in range(3):
        made = driver.function([x])[0]
    if recorded:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = driver.function([x])[0]
        x.fill_(2.0)
        graph.replay()
    assert torch.equal(made, torch.full_like(x, 6.0 if recorded else 3.0))


class FakeStream:
    """A stream of a GPU that only remembers: (what, of whom)."""

    def __init__(self, device: Any = None, name: str = "") -> None:
        self.name, self.log = name or f"side{id(self)}", []

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(("wait_stream", other))

    def wait_event(self, event: FakeEvent) -> None:
        assert event.on is not None, "an event that was never recorded is no wait at all on a GPU"
        self.log.append(("wait_event", event.on))


class FakeEvent:
    def __init__(self) -> None:
        self.on: FakeStream | None = None

    def record(self, stream: FakeStream) -> None:
        self.on = stream


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """The current stream of a machine without a GPU; the last of the list is current."""
    current = [FakeStream(name="main")]
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return current


def test_on_a_gpu_streams_fork_from_the_step_and_join_it(main: list[FakeStream]) -> None:
    streams = OnCuda(torch.device("cuda"))
    inputs, calls, out = statements(**ROUND_TRIP)
    driver = build_driver(inputs, calls, [out], {}, streams=streams)
    driver.function([torch.ones(3)])
    side = streams.sides["copy"]
    assert side.log[0] == ("wait_stream", main[0]), "it starts where the step is"
    assert main[0].log == [("wait_event", side), ("wait_stream", side)]
    main.append(FakeStream(name="recording"))  # the next step runs on another stream
    driver.function([torch.ones(3)])
    assert streams.sides["copy"] is side and main[1].log == main[0].log
    assert ("wait_stream", main[1]) in side.log


def test_a_step_that_fails_waits_for_its_copies_and_the_next_begins_anew(main: list[FakeStream]) -> None:
    """The frame that fails lets go of memory that copies still use, so the main stream waits for them first."""
    for streams in (OnCuda(torch.device("cuda")), InOrder()):
        inputs, calls, out = statements(**ROUND_TRIP)
        fails = [True]

        def add(a: torch.Tensor, b: torch.Tensor, fails: list[bool] = fails) -> torch.Tensor:
            if fails.pop():
                raise torch.OutOfMemoryError("no memory")
            return a + b

        calls[-1] = dataclasses.replace(calls[-1], function=add)
        driver = build_driver(inputs, calls, [out], {}, streams=streams)
        with pytest.raises(torch.OutOfMemoryError):
            driver.function([torch.ones(3)])
        if isinstance(streams, OnCuda):
            assert main[0].log[-1] == ("wait_stream", streams.sides["copy"])
            main.append(FakeStream(name="another"))
            first = main[0].log.copy()
        fails.append(False)
        assert torch.equal(driver.function([torch.ones(3)])[0], torch.full((3,), 3.0))
    assert main[0].log == first, "the stream of the step that failed is no part of the next"
