"""The CUDA-graph policy, with a clock of its own on the CPU; recording itself needs a GPU."""

from __future__ import annotations

import pytest
import torch

from wholestep.graph.training_graph import Role
from wholestep.lower import AutoCudaGraph, CudaGraphRunner, NotRecordable, Runner, cuda_graph, lower_interpret


class Clock:
    """Direct calls take `direct` seconds, replays `replay`; counts how often it is asked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked = 0

    def mark(self) -> float:
        return self.now

    def seconds(self, first: float, last: float) -> float:
        self.asked += 1
        return last - first


class FakeRecording:
    released = 0

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.calls = clock, seconds, 0

    def __call__(self, inputs):
        self.calls += 1
        self.clock.now += self.seconds
        return ["replayed"]

    def release(self):
        FakeRecording.released += 1


@pytest.fixture
def policy(monkeypatch):
    """`policy(direct, replay)` -> (AutoCudaGraph, list of recordings made, clock)."""
    monkeypatch.setattr(cuda_graph, "why_not", lambda runner, inputs: None)

    def make(direct: float, replay: float | str):
        clock, made = Clock(), []

        def step(inputs):
            clock.now += direct
            return ("direct",)

        def record(runner, inputs, batch):
            if isinstance(replay, str):
                raise NotRecordable(replay)
            made.append(FakeRecording(clock, replay))
            return made[-1]

        runner = Runner(step, 1, {"backend": "test"})
        return AutoCudaGraph(runner, [0], timer=clock, record=record), made, clock

    return make


def outcomes(auto, calls):
    return [auto([None])[0] for _ in range(calls)]


def test_a_faster_graph_is_kept(policy):
    auto, made, _ = policy(direct=2.0, replay=1.0)
    assert outcomes(auto, 10) == ["direct"] * 3 + ["replayed"] * 7
    assert auto.describe()["cuda_graph"]["mode"] == "cuda graph"
    assert "1000.00 ms replayed, 2000.00 ms direct" in auto.describe()["cuda_graph"]["reason"]
    assert len(made) == 1


def test_a_slower_graph_is_dropped_and_released(policy):
    FakeRecording.released = 0
    auto, _made, _ = policy(direct=1.0, replay=1.5)
    assert outcomes(auto, 10) == ["direct"] * 3 + ["replayed"] * 5 + ["direct"] * 2
    assert auto.describe()["cuda_graph"]["mode"] == "direct"
    assert FakeRecording.released == 1


def test_the_device_is_asked_only_at_the_decision(policy):
    auto, _, clock = policy(direct=2.0, replay=1.0)
    outcomes(auto, 7)
    assert clock.asked == 0
    outcomes(auto, 5)
    assert clock.asked == 7


def test_a_refusal_is_told_and_final(policy):
    auto, _, _ = policy(direct=1.0, replay="RuntimeError: operation not permitted when stream is capturing")
    assert outcomes(auto, 6) == ["direct"] * 6
    facts = auto.describe()["cuda_graph"]
    assert facts["mode"] == "direct"
    assert "not permitted when stream is capturing" in facts["reason"]


def test_invalidate_starts_over(policy):
    FakeRecording.released = 0
    auto, made, _ = policy(direct=2.0, replay=1.0)
    outcomes(auto, 10)
    auto.invalidate()
    assert FakeRecording.released == 1
    assert outcomes(auto, 5) == ["direct"] * 3 + ["replayed"] * 2
    assert len(made) == 2


def test_cpu_inputs_run_directly_with_the_reason(traced):
    step = traced("mlp")
    runner = lower_interpret(step.graph)
    auto = AutoCudaGraph(runner, step.graph.indices(Role.BATCH))
    inputs = step.fresh()
    auto(inputs)
    assert "not on a CUDA device" in auto.describe()["cuda_graph"]["reason"]
    with pytest.raises(NotRecordable, match="not on a CUDA device"):
        CudaGraphRunner(runner, inputs, [0])


def test_symbolic_shapes_are_refused():
    runner = Runner(lambda inputs: (), 1, {"symbolic": True})
    assert "symbolic" in cuda_graph.why_not(runner, [torch.ones(1)])


@pytest.mark.gpu
def test_recorded_steps_equal_direct_steps(traced):
    step = traced("stack-2")
    runner = lower_interpret(step.graph)
    batch = step.graph.indices(Role.BATCH)
    direct = [tensor.cuda() for tensor in step.tensors]
    recorded = [tensor.cuda() for tensor in step.tensors]
    losses = []
    for _ in range(2):
        losses.append((runner(direct)[0], runner(recorded)[0]))
    graph = CudaGraphRunner(runner, recorded, batch)
    before = [t.clone() for t in recorded]
    torch.testing.assert_close(recorded, before, rtol=0, atol=0)
    for _ in range(3):
        new = torch.randint(0, 32, direct[batch[0]].shape, device="cuda")
        direct[batch[0]] = new
        recorded[batch[0]] = new.clone()
        losses.append((runner(direct)[0], graph(recorded)[0]))
    for expected, got in losses:
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        [t for i, t in enumerate(recorded) if i not in batch], [t for i, t in enumerate(direct) if i not in batch]
    )
    kept = losses[-1][1].clone()
    graph(recorded)
    assert torch.equal(losses[-1][1], kept)
    graph.release()
    with pytest.raises(RuntimeError, match="released"):
        graph(recorded)


@pytest.mark.gpu
def test_policy_on_a_gpu_ends_with_a_decision(traced):
    step = traced("stack-2")
    auto = AutoCudaGraph(lower_interpret(step.graph), step.graph.indices(Role.BATCH))
    inputs = [tensor.cuda() for tensor in step.tensors]
    reference = [tensor.cuda() for tensor in step.tensors]
    plain = lower_interpret(step.graph)
    for _ in range(10):
        got, expected = auto(inputs)[0], plain(reference)[0]
        torch.testing.assert_close(got, expected)
    facts = auto.describe()["cuda_graph"]
    assert facts["mode"] in ("cuda graph", "direct")
    assert set(facts["seconds"]) == {"direct", "cuda graph"}
