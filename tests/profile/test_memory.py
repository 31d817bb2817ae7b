"""The measured profile: categories add up to what the allocator handed out, and every block is what it is said to be."""

from __future__ import annotations

import json
import weakref
from typing import Any

import pytest
import torch
from tests.profile.memory_jobs import Job, eager_step, gpt, mlp, regression
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import wholestep
from wholestep.errors import BadOption
from wholestep.lower.footprint.blocks import CATEGORIES, MemoryProfile, icicle
from wholestep.lower.footprint.events import out_of_order, record
from wholestep.lower.footprint.owners import storage_of
from wholestep.profile.memory.profile import memory_profile

CPU = torch.device("cpu")


def profiled(job: Job, **options: Any) -> MemoryProfile:
    model, _, optimizer, batch = job
    return memory_profile(eager_step(job), model=model, optimizer=optimizer, batch=batch, system="eager", **options)


def size(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class StorageTracker(TorchDispatchMode):
    """A second opinion: every storage an operator returns, from its first sight to its death."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and storage_of(tensor)[0] not in self.seen:
                self._watch(tensor)
        self.peak = max(self.peak, self.now)
        return result

    def _watch(self, tensor: Tensor) -> None:
        address, count = storage_of(tensor)
        if not count:
            return
        self.now += count

        def died(_: Any) -> None:
            self.now -= count
            del self.seen[address]

        self.seen[address] = weakref.ref(tensor.untyped_storage(), died)


def test_categories_add_up_to_the_allocators_peak() -> None:
    job = gpt()
    model, _, optimizer, batch = job
    step = eager_step(job)
    profile = profiled(job)
    optimizer.zero_grad()
    with record(CPU, reads=False) as recording:
        step(batch)
    memory = [event for event in recording.events if event.kind == "memory"]
    assert out_of_order(recording.events) == 0
    lasting = size(*model.parameters(), *batch.values()) + sum(size(*s.values()) for s in optimizer.state.values())
    raw = max(event.total for event in memory) - (memory[0].total - memory[0].bytes)
    assert profile.step_peak_bytes == lasting + raw
    assert sum(profile.at_peak.values()) == profile.peak_bytes
    assert max(sum(split.values()) for _, split in profile.timeline) == profile.peak_bytes
    assert profile.notes == ()


def test_storage_tracking_sees_the_same_peak() -> None:
    """ReLU and matrix products: no operator takes memory that it does not return, so both views are complete."""
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = {"x": torch.randn(256, 64)}

    def step(batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch["x"]).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    profile = memory_profile(step, model=model, optimizer=optimizer, batch=batch, system="eager")
    optimizer.zero_grad()
    tracker = StorageTracker()
    for address in [storage_of(p)[0] for p in [*model.parameters(), *batch.values()]]:
        tracker.seen[address] = None
    with tracker:
        step(batch)
    assert profile.step_peak_bytes == tracker.peak + size(*model.parameters(), *batch.values())


def test_marks_change_nothing() -> None:
    job = mlp()
    step, batch = eager_step(job), job[3]
    profile = profiled(job)
    with record(CPU, reads=False) as recording:
        step(batch)
        step(batch)
    totals = [event.total - recording.events[0].total for event in recording.events if event.kind == "memory"]
    half = len(totals) // 2
    assert max(totals[half:]) - totals[half - 1] == profile.peak_bytes - _at_start(profile)


def _at_start(profile: MemoryProfile) -> int:
    return sum(block.bytes for block in profile.blocks if block.born == 0)


def test_what_each_category_holds() -> None:
    job = mlp()
    model, _, optimizer, batch = job
    profile = profiled(job)
    parameters = size(*model.parameters())
    assert profile.at_peak["weights"] == parameters
    assert profile.at_peak["optimizer state"] == sum(size(*state.values()) for state in optimizer.state.values())
    assert profile.at_peak["batch"] == size(*batch.values())
    update = next(phase for phase in profile.phases if phase.name == "update")
    gradients = [b for b in profile.blocks if b.category == "gradients" and b.alive(update.start) and b.born]
    assert sorted(b.name for b in gradients) == sorted(name for name, _ in model.named_parameters())
    assert sum(b.bytes for b in gradients) == parameters
    assert [phase.name for phase in profile.phases] == ["forward", "backward", "update"]


def test_an_update_that_allocates_nothing_is_a_phase_all_the_same() -> None:
    model, loss_fn, _, batch = mlp()
    profile = profiled((model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), batch))
    assert [phase.name for phase in profile.phases] == ["forward", "backward", "update"]
    assert profile.phases[-1].peak_bytes >= 2 * size(*model.parameters()), "weights and gradients"


def test_saved_activations_know_module_and_reader() -> None:
    profile = profiled(mlp())
    saved = {(b.module, b.operator): b for b in profile.blocks if b.category == "saved activations"}
    assert saved["0", "addmm"].why == "GeluBackward0 in backward of 1"
    assert saved["1", "gelu"].why == "NativeLayerNormBackward0 in backward of 2"
    assert saved["0", "addmm"].shape == (128, 256)
    assert saved["1", "gelu"].recomputable and not saved["0", "addmm"].recomputable
    assert set(profile.saved_by_operator) >= {"GeluBackward0", "NativeLayerNormBackward0", "AddmmBackward0"}


def test_a_wholestep_step_is_told_by_its_graph() -> None:
    model, loss_fn, optimizer, batch = mlp()
    step = wholestep.compile(model, loss_fn, optimizer, batch, backend="interpret", check="off")
    profile = memory_profile(step, model=model, optimizer=optimizer, batch=batch)
    saved = {b.name: b for b in profile.blocks if b.category == "saved activations"}
    assert saved["addmm"].why == "gelu_backward in backward of 1" and saved["addmm"].module == "0"
    gradients = {b.module for b in profile.blocks if b.category == "gradients"}
    assert gradients == {"0", "2", "3"}
    assert [phase.name for phase in profile.phases] == ["forward", "backward", "update"]
    assert sum(profile.at_peak.values()) == profile.peak_bytes
    before = step.count
    step(batch)
    assert step.count == before + 1 and step.regions["backend"] == "interpret"  # its own runner is back


def test_a_compiled_module_is_profiled_without_hooks() -> None:
    job = mlp()
    model, _, optimizer, batch = job
    compiled = torch.compile(model, backend="aot_eager")
    profile = memory_profile(
        eager_step(job, compiled), model=compiled, optimizer=optimizer, batch=batch, system="compile"
    )
    assert profile.at_peak["weights"] == size(*model.parameters())
    assert profile.at_peak["saved activations"] >= 2 * 128 * 256 * 4
    assert sum(profile.at_peak.values()) == profile.peak_bytes
    assert [phase.name for phase in profile.phases] == ["forward", "backward", "update"]


def test_accumulated_micro_batches_are_phases_of_their_own() -> None:
    job = mlp()
    model, _, optimizer, batch = job

    def step(batch: dict[str, Tensor]) -> None:
        optimizer.zero_grad()
        for half in range(2):
            regression(model, {k: v[half * 64 : half * 64 + 64] for k, v in batch.items()}).backward()
        optimizer.step()

    profile = memory_profile(step, model=model, optimizer=optimizer, batch=batch, system="eager")
    assert [p.name for p in profile.phases] == ["forward", "backward", "forward", "backward", "update"]
    assert profile.at_peak["gradients"] >= size(*model.parameters())  # summed ones wait while the second half runs


# ---- awkward models ----


class Awkward(nn.Module):
    """Views, an expanded tensor, in-place operators, tied weights, a buffer, an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.second.weight = self.first.weight
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        spread = self.scale[:1].expand(x.shape[0], 32)
        y = self.first(x * spread).view(-1, 4, 8).transpose(1, 2).flatten(1)
        y = torch.cat([y, y[:, :0]], 1)
        return self.second(y.relu_())


def awkward_job() -> Job:
    model = Awkward()
    batch = {"x": torch.randn(64, 32), "y": torch.randn(64, 32)}
    return model, regression, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batch


@pytest.mark.parametrize("system", ["eager", "wholestep"])
def test_shared_storages_count_once(system: str) -> None:
    job = awkward_job()
    model, loss_fn, optimizer, batch = job
    step: Any = eager_step(job)
    if system == "wholestep":
        step = wholestep.compile(model, loss_fn, optimizer, batch, backend="interpret", check="off")
    profile = memory_profile(step, model=model, optimizer=optimizer, batch=batch, system=system)
    assert profile.at_peak["weights"] == 32 * 32 * 4  # tied
    assert profile.at_peak["buffers"] == 32 * 4
    assert profile.at_peak["optimizer state"] == 32 * 32 * 4
    assert sum(profile.at_peak.values()) == profile.peak_bytes
    expanded = [b for b in profile.blocks if b.operator == "expand"]
    assert not expanded  # a view allocates nothing
    assert all(b.bytes > 0 for b in profile.blocks)


def test_a_leak_is_other() -> None:
    job = mlp()
    model, _, optimizer, batch = job
    kept: list[Tensor] = []

    def leaking(batch: dict[str, Tensor]) -> None:
        optimizer.zero_grad()
        hidden = model[1](model[0](batch["x"]))
        kept.append(hidden.detach())
        nn.functional.mse_loss(model[3](model[2](hidden)), batch["y"]).backward()
        optimizer.step()

    sound = profiled(job)
    leaky = memory_profile(leaking, model=model, optimizer=optimizer, batch=batch, system="eager")
    each = 128 * 256 * 4
    assert leaky.at_peak["other"] - sound.at_peak["other"] >= 3 * each  # of the three steps before
    after = [b for b in leaky.blocks if b.died is None and b.born and b.bytes == each]
    assert len(after) == 1 and len(kept) == 4


def test_held_outputs_are_not_saved_activations() -> None:
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = {"x": torch.randn(64, 32)}

    def step(batch: dict[str, Tensor]) -> None:
        optimizer.zero_grad()
        out = model(batch["x"])
        useless = out.detach() * 2  # alive to the end, read by nobody
        out.sum().backward()
        optimizer.step()
        del useless

    profile = memory_profile(step, model=model, optimizer=optimizer, batch=batch, system="eager")
    held = [b for b in profile.blocks if "does not read it" in b.why and b.operator == "mul"]
    assert [b.category for b in held] == ["other"] and held[0].bytes == 64 * 32 * 4


# ---- the value itself ----


def test_json_and_icicle() -> None:
    profile = profiled(gpt())
    text = json.loads(json.dumps(profile.to_json()))
    assert text["peak_bytes"] == profile.peak_bytes and set(text["at_peak"]) == set(CATEGORIES)
    assert text["icicle"]["bytes"] == profile.peak_bytes
    blocks = next(child for child in text["icicle"]["children"] if child["name"] == "blocks")
    assert blocks["bytes"] == sum(child["bytes"] for child in blocks["children"])
    assert len(profile.timeline) <= 400


def test_equal_layers_fold() -> None:
    tree = icicle({"": {"batch": 1}, "h.0": {"weights": 8}, "h.1": {"weights": 8}, "h.2": {"weights": 4}})
    layers = tree["children"][0]["children"]
    assert [(layer["names"], layer["count"], layer["bytes"]) for layer in layers] == [
        (["0", "1"], 2, 16),
        (["2"], 1, 4),
    ]
    assert tree["bytes"] == 21


def test_bad_input_is_one_clear_line() -> None:
    job = mlp()
    with pytest.raises(BadOption, match="did you mean 'eager'"):
        memory_profile(eager_step(job), model=job[0], optimizer=job[2], batch=job[3], system="eagr")
    with pytest.raises(BadOption, match="on cpu and cuda"):
        profiled(job, device="meta")
