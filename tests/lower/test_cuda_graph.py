"""The CUDA-graph policy, with a clock of its own on the CPU; recording itself needs a GPU."""

from __future__ import annotations

import weakref

import pytest
import torch

import wholestep
from wholestep.graph.training_graph import Role
from wholestep.lower import (
    AutoCudaGraph,
    CudaGraphRunner,
    CudaGraphsByShape,
    NotRecordable,
    Runner,
    cuda_graph,
    lower_interpret,
)


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

        def record(runner, inputs, batch, written=(), in_place=()):
            if isinstance(replay, str):
                raise NotRecordable(replay)
            made.append(FakeRecording(clock, replay))
            return made[-1]

        runner = Runner(step, 1, {"backend": "test"})
        return AutoCudaGraph(runner, [0], timer=clock, record=record), made, clock

    return make


def outcomes(auto, calls):
    return [auto([torch.empty(2)])[0] for _ in range(calls)]


def test_a_faster_graph_is_kept(policy):
    auto, made, _ = policy(direct=2.0, replay=1.0)
    assert outcomes(auto, 10) == ["direct"] * 3 + ["replayed"] * 7
    assert auto.describe()["cuda_graph"]["mode"] == "replayed"
    assert "cuda graph replayed 1000.00 ms (direct 2000.00)" in auto.describe()["cuda_graph"]["reason"]
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


def test_what_a_failed_recording_held_is_free_before_the_direct_run(monkeypatch):
    """Frames of the exception hold its tensors, and a memory budget may have no room for them and a direct run."""
    monkeypatch.setattr(cuda_graph, "why_not", lambda runner, inputs: None)
    held, alive = [], []

    def record(runner, inputs, batch, written=(), in_place=()):
        large = torch.empty(8)
        held.append(weakref.ref(large))
        try:
            raise torch.OutOfMemoryError("not enough")
        except torch.OutOfMemoryError as error:
            raise NotRecordable("too large") from error

    def step(inputs):
        alive.extend(reference() is not None for reference in held)
        return ("direct",)

    auto = AutoCudaGraph(Runner(step, 1, {}), [0], timer=Clock(), record=record)
    assert outcomes(auto, 5) == ["direct"] * 5
    assert alive == [False, False] and "too large" in str(auto.choice)


def test_a_recording_that_had_to_go_is_made_again_later(policy):
    FakeRecording.released = 0
    auto, made, _ = policy(direct=2.0, replay=1.0)
    assert not auto.holds_memory
    auto.make_room()  # nothing to give
    outcomes(auto, 10)
    assert auto.holds_memory
    auto.make_room()
    assert FakeRecording.released == 1 and not auto.holds_memory
    assert outcomes(auto, 14) == ["direct"] * 12 + ["replayed"] * 2 and len(made) == 2
    for _ in range(4):
        auto.make_room()
        outcomes(auto, 200)
    auto.make_room()
    assert outcomes(auto, 193) == ["direct"] * 192 + ["replayed"]


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


def test_pinned_state_that_is_only_copied_stands_in_no_recordings_way(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [torch.ones(3), torch.ones(3)]
    runner = Runner(lambda given: (), 2, {"host_inputs": (1,)})
    assert cuda_graph.why_not(runner, inputs) == "2 of 2 inputs are not on a CUDA device", "pageable memory"
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    assert cuda_graph.why_not(runner, inputs) == "1 of 1 inputs are not on a CUDA device"


def by_shape(monkeypatch, direct, replay):
    """A CudaGraphsByShape over a fake step, and the sizes recorded so far."""
    monkeypatch.setattr(cuda_graph, "why_not", lambda runner, inputs: None)
    clock, made = Clock(), []

    def step(inputs):
        clock.now += direct
        return ("direct",)

    def record(runner, inputs, batch, sinks=None, pool=None, written=()):
        if isinstance(replay, str):
            raise NotRecordable(replay)
        made.append(tuple(inputs[0].shape))
        return FakeRecording(clock, replay)

    runner = Runner(step, 1, {"symbolic": True})
    return cuda_graph.CudaGraphsByShape(runner, [0], timer=clock, record=record), made


def runs(graphs, sizes):
    return [graphs([torch.empty(size)])[0] for size in sizes]


def test_sizes_that_come_back_are_recorded_once_one_has_measured_faster(monkeypatch):
    graphs, made = by_shape(monkeypatch, direct=2.0, replay=1.0)
    assert runs(graphs, [5, 6, 5, 7, 5, 5, 5]) == ["direct"] * 4 + ["replayed"] * 3
    assert graphs.choice.name == "replayed" and made == [(5,)]
    assert runs(graphs, [6, 6, 6, 6, 8, 5]) == ["direct"] * 2 + ["replayed"] * 2 + ["direct", "replayed"]
    assert made == [(5,), (6,)] and "2 sizes recorded" in graphs.describe()["cuda_graph"]["reason"]
    graphs.invalidate()
    assert runs(graphs, [5]) == ["direct"] and graphs.choice is None


@pytest.mark.parametrize("replay", [3.0, "a stream of its own"])
def test_a_size_that_measures_slower_decides_for_all(monkeypatch, replay):
    graphs, made = by_shape(monkeypatch, direct=2.0, replay=replay)
    runs(graphs, [5] * 5)
    assert graphs.choice.name == "direct" and runs(graphs, [5, 6, 6, 6, 6]) == ["direct"] * 5
    assert len(made) <= 1


def test_not_more_sizes_are_recorded_than_fit(monkeypatch):
    monkeypatch.setattr(cuda_graph, "MOST_RECORDINGS", 2)
    graphs, made = by_shape(monkeypatch, direct=2.0, replay=1.0)
    runs(graphs, [5] * 5 + [6] * 4 + [7] * 4)
    assert made == [(5,), (6,)]


def test_what_is_lent_is_told(monkeypatch):
    monkeypatch.setattr(cuda_graph, "why_not", lambda runner, inputs: None)

    class Recording(FakeRecording):
        def __call__(self, inputs):
            return [super().__call__(inputs)[0], self.sinks[1]]

    def record(runner, inputs, batch, sinks=None, pool=None, written=()):
        recording = Recording(clock, 1.0)
        recording.sinks = sinks
        return recording

    clock = Clock()

    def step(inputs):
        clock.now += 2.0
        return ["direct", torch.ones(3)]

    auto = AutoCudaGraph(Runner(step, 1, {}), [0], timer=clock, record=record, lent=[1])
    lent = []
    for _ in range(9):
        auto([torch.empty(2)])
        lent.append(auto.lends)
    assert lent == [False] * 3 + [True] * 6


def test_what_a_recording_writes_to_the_batch_comes_back():
    """A running mean that the Python keeps is an input; replayed, the step writes into the recording's own copy of it."""

    class Adding:
        def replay(self):
            recorded.static[0].add_(1.0)

    recorded = object.__new__(CudaGraphRunner)
    recorded.static, recorded.batch, recorded.written = [torch.zeros(2), torch.zeros(2)], (0, 1), (0,)
    recorded.graphs, recorded.sinks, recorded.outputs = [Adding(), Adding()], {}, []
    mean, data = torch.ones(2), torch.ones(2)
    for _ in range(2):
        recorded([mean, data])
    assert mean.tolist() == [5.0, 5.0] and data.tolist() == [1.0, 1.0]


@pytest.fixture
def placed(monkeypatch):
    """(AutoCudaGraph over two tensors of the batch and a state, what every recording was told)."""
    monkeypatch.setattr(cuda_graph, "why_not", lambda runner, inputs: None)
    clock, told = Clock(), []

    def step(inputs):
        clock.now += 2.0
        return ["direct"]

    def record(runner, inputs, batch, written=(), in_place=()):
        told.append(in_place)
        return FakeRecording(clock, 1.0)

    return AutoCudaGraph(Runner(step, 3, {}), [0, 1], timer=clock, record=record), told


def test_what_is_the_same_at_every_call_is_read_where_it_lies(placed):
    auto, told = placed
    table, state = torch.ones(3), torch.ones(3)
    for _ in range(9):
        assert auto([table[:], torch.ones(3), state])  # another view of the same memory
    assert told == [(0,)] and auto.choice.name == "replayed"


def test_what_lies_elsewhere_later_has_buffers_for_good(placed):
    FakeRecording.released = 0
    auto, told = placed
    tables = torch.ones(3), torch.ones(3)
    found = [auto([tables[number >= 6], torch.ones(3), None])[0] for number in range(12)]
    assert found == ["direct"] * 3 + ["replayed"] * 9
    assert told == [(0,), ()] and FakeRecording.released == 1
    auto.invalidate()
    for _ in range(5):
        auto([tables[0], torch.ones(3), None])
    assert told[2:] == [()]


@pytest.mark.gpu
def test_a_table_is_read_in_place_and_may_be_written_freed_and_another():
    """The user's memory while it is the same, whatever it holds; buffers from then on. Losses are those of direct steps."""

    def trained(recorded):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 4).cuda()
        table = torch.randn(32, 64, device="cuda")
        batch = {"table": table, "y": torch.randn(32, 4, device="cuda")}
        step = wholestep.compile(
            model, lambda m, b: (m(b["table"]) - b["y"]).square().mean(), torch.optim.SGD(model.parameters(), 0.1), batch,
            cuda_graph=recorded, cache=False,
        )  # fmt: skip
        losses = []
        for number in range(24):
            if number == 12:
                table.mul_(0.5)
            if number == 16:
                table = batch["table"] = torch.randn(
                    32, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(1)
                )
                torch.randn(32, 64, device="cuda")  # in the memory of the first, if that were free
            batch["y"] = torch.randn(32, 4, device="cuda", generator=torch.Generator("cuda").manual_seed(number))
            losses.append(float(step(batch)))
        return losses, step

    found, step = trained(True)
    assert step.regions["cuda_graph"]["mode"] == "replayed"
    assert found == pytest.approx(trained(False)[0], rel=1e-4)


@pytest.mark.parametrize("kind", [AutoCudaGraph, CudaGraphsByShape])
def test_recordings_are_told_what_is_written(monkeypatch, kind):
    clock, told = Clock(), []
    monkeypatch.setattr(cuda_graph, "why_not", lambda runner, inputs: None)

    def record(runner, inputs, batch, *rest, **options):
        told.append(options)
        raise NotRecordable("for this test")

    graphs = kind(Runner(lambda inputs: ["direct"], 1, {}), [0], timer=clock, record=record, written=[0])
    for _ in range(6):
        graphs([torch.empty(2)])
    assert told == [{"written": (0,)}]


@pytest.mark.gpu
def test_a_mean_that_the_loss_keeps_is_kept_when_replayed():
    def trained(compiled):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4).cuda()
        optimizer, mean = torch.optim.SGD(model.parameters(), 0.1), torch.zeros(4, device="cuda")

        def loss(m, x):
            out = m(x)
            mean.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
            return (out - mean.clone()).square().mean()

        batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)).cuda() for i in range(16)]
        if compiled:
            step = wholestep.compile(model, loss, optimizer, batches[0], cuda_graph=True, cache=False)
            for batch in batches:
                step(batch)
            assert step.regions["cuda_graph"]["mode"] == "replayed"
        else:
            for batch in batches:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
        return [mean, *(p.detach() for p in model.parameters())]

    torch.testing.assert_close(trained(True), trained(False), rtol=1e-4, atol=1e-5)


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
    assert facts["mode"] in ("replayed", "direct")
    assert auto.choice is not None and set(auto.choice.seconds) == {"direct", "replayed"}


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [True, False])
def test_gradients_of_recorded_sizes_accumulate_as_in_eager(dynamic):
    import copy

    import wholestep

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).cuda()
    twin = copy.deepcopy(model)

    def loss_fn(module, batch):
        return module(batch).square().mean()

    step = wholestep.compile(model, loss_fn, None, torch.randn(8, 16, device="cuda"), dynamic=dynamic, cuda_graph=True)
    generator = torch.Generator().manual_seed(1)
    for number in range(40):
        batch = torch.randn((8, 12, 20)[number % 3], 16, generator=generator).cuda()
        if number % 4 == 0:
            for module in (model, twin):
                module.zero_grad(set_to_none=True)
        kept = model[0].weight.grad  # the same tensor goes on being added to
        torch.testing.assert_close(step(batch), loss_fn(twin, batch).detach())
        loss_fn(twin, batch).backward()
        assert kept is None or model[0].weight.grad is kept
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    assert step.regions["cuda_graph"]["mode"] == "replayed"
