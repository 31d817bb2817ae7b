"""Optimizer state that lies on the host: the same bits, updated in place, a few parts of it on the card at a time."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.passes.stacks import Stack, id_batches, next_token
from torch.utils._pytree import tree_leaves

import wholestep
from wholestep.errors import BadOption, TierFailed
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import Role, phase_of
from wholestep.lower import lower_interpret
from wholestep.lower.footprint.predict import predict_profile
from wholestep.ops import IN_PLACE
from wholestep.ops.offload import lies_on_host
from wholestep.passes.pipeline import default_pipeline
from wholestep.passes.stream_state import AT_ONCE, round_trips
from wholestep.passes.update_early import update_early
from wholestep.plan.peak import timeline

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
}


def run(plan: Plan | None, make: Any = OPTIMIZERS["adamw"], **options: Any) -> tuple[list[float], list[Any], Any]:
    torch.manual_seed(0)
    model = Stack(width=32)
    optimizer = make(model.parameters())
    pipeline = default_pipeline().replaced("update_early", functools.partial(update_early, min_bytes=0))
    given = id_batches(4)
    step = wholestep.compile(
        model, next_token, optimizer, given[0], plan=plan, passes=pipeline, backend="interpret", cache=False, **options
    )
    return [float(step(b)) for b in given], tree_leaves((model.state_dict(), optimizer.state_dict())), step


def equal(mine: list[Any], others: list[Any]) -> bool:
    pairs = zip(mine, others, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize(("name", "clip_norm"), [("adamw", None), ("adamw", 0.1), ("momentum", None), ("nadam", 0.1)])
def test_every_bit_stays(name: str, clip_norm: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholestep.passes.stream_state.MOST_BYTES", 10000)
    monkeypatch.setattr(
        "wholestep.runtime.binding._apart", lambda parameter, state: True
    )  # as on a GPU: no step by hand
    kept_losses, kept, before = run(Plan(), OPTIMIZERS[name], clip_norm=clip_norm)
    losses, state, after = run(Plan(state={"*": "host", "head.*": "card"}), OPTIMIZERS[name], clip_norm=clip_norm)
    assert losses == kept_losses and equal(state, kept)
    assert after.captures == 1 and not any("anew" in str(note) for note in after.notes), after.notes
    assert predict_profile(after.graph).peak_bytes < predict_profile(before.graph).peak_bytes
    assert timeline(after.graph).lasting["optimizer state"] < timeline(before.graph).lasting["optimizer state"]
    facts = lower_interpret(after.graph).describe()
    assert facts["in_place_updates"] > 2 and facts["copied_updates"] == 0, "written where it lies"


def test_what_lies_on_the_host_is_what_the_plan_says() -> None:
    _, _, step = run(Plan(state={"blocks.*": "host", "blocks.0.*": "card"}))
    away = {
        entry.name
        for entry, node in zip(step.graph.inputs, step.graph.placeholders, strict=True)
        if entry.role is Role.STATE and lies_on_host(node)
    }
    assert away and all(name.startswith(("blocks.1", "blocks.2", "blocks.3")) for name in away)
    assert not any(
        lies_on_host(n) for e, n in zip(step.graph.inputs, step.graph.placeholders) if e.role is not Role.STATE
    )


def test_a_few_parts_are_on_the_card_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With clipping all updates stand at the end: the buffers of the parts are what state takes of the card."""
    monkeypatch.setattr("wholestep.passes.stream_state.MOST_BYTES", 20000)
    _, _, step = run(Plan(state={"*": "host"}), clip_norm=1.0)
    alive = most = 0
    sizes = {}
    for node in step.graph.operations():
        if node.target is torch.ops.ws.copy_in.default:
            sizes[node] = node.meta["val"].nbytes
            alive += sizes[node]
            most = max(most, alive)
        elif node.target is torch.ops.ws.out_done.default:
            alive -= node.meta["val"].nbytes
    assert alive == 0 and 20000 < most <= AT_ONCE * 20000 + max(sizes.values())


def test_with_clipping_state_comes_behind_the_backward_pass_and_between_updates_of_what_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All gradients wait for the norm, so nothing is brought in before the last of them is made."""
    monkeypatch.setattr("wholestep.passes.stream_state.MOST_BYTES", 10000)
    _, _, step = run(Plan(state={"blocks.1.*": "host", "blocks.2.*": "host"}), clip_norm=1.0)
    nodes = list(step.graph.operations())
    last = max(i for i, node in enumerate(nodes) if phase_of(node) == "backward")
    comes = [i for i, node in enumerate(nodes) if node.target is torch.ops.ws.copy_in.default]
    assert comes and min(comes) > last
    updates = [node for node in nodes if node.target in IN_PLACE]
    streamed = [any(e.target is torch.ops.ws.in_done.default for e in node.all_input_nodes) for node in updates]
    assert streamed.count(True) > 1 and not streamed[0] and not streamed[-1]
    assert any(not now for now in streamed[1 : len(streamed) - 1]), "what stays is updated between the parts"


def test_a_pattern_that_names_nothing_is_refused() -> None:
    with pytest.raises(BadOption, match=r"'blcks.\*.up.weight'.*did you mean blocks.\*.up.weight"):
        run(Plan(state={"blcks.*.up.weight": "host"}))


@pytest.mark.slow
def test_the_micro_steps_of_an_accumulating_step_have_no_state() -> None:
    given = id_batches(4, rows=4)

    def train(plan: Plan) -> tuple[list[float], list[Any]]:
        torch.manual_seed(0)
        model = Stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = wholestep.compile(
            model, next_token, optimizer, given[0], plan=plan, accumulate=2, backend="interpret", cache=False
        )
        return [float(step(given[i : i + 2])) for i in (0, 2)], tree_leaves(
            (model.state_dict(), optimizer.state_dict())
        )

    losses, state = train(Plan(state={"blocks.*": "host"}))
    kept_losses, kept = train(Plan())
    assert losses == kept_losses and equal(state, kept)


def test_a_step_by_hand_on_state_of_the_host_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = Plan(state={"blocks.*": "host"})
    step = wholestep.compile(
        model, next_token, optimizer, id_batches(1)[0], plan=plan, backend="interpret", check="off"
    )
    step(id_batches(1)[0])
    saved = optimizer.state_dict()
    optimizer.step()  # on a CPU host and device are the same memory
    monkeypatch.setattr("wholestep.runtime.binding._apart", lambda parameter, state: True)
    with pytest.raises(wholestep.WholestepError, match=r"step\(\) by hand while optimizer state lies on the host"):
        optimizer.step()
    assert optimizer.state_dict()["state"].keys() == saved["state"].keys()
    monkeypatch.undo()
    optimizer.load_state_dict(saved)
    assert torch.isfinite(step(id_batches(1)[0]))


@pytest.mark.parametrize("early", [True, False])
def test_what_a_disk_left_half_updated_is_neither_trained_on_nor_saved(
    early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, step = run(Plan(), early_update=early)
    model, optimizer = step.subject.root, step.subject.optimizer
    wholestep.save(tmp_path, model=model, optimizer=optimizer, step=step)
    batch = id_batches(1)[0]

    def failing(*args: Any, **options: Any) -> None:
        raise TierFailed("/disk/.wholestep-x: Input/output error (errno 5)")

    with monkeypatch.context() as patch:
        patch.setattr("wholestep.runtime.step.OneStep.whole", failing)
        with pytest.raises(TierFailed, match="errno 5"):
            step(batch)
    if not early:  # nothing is updated before the last value was read
        assert torch.isfinite(step(batch))
        return
    with pytest.raises(TierFailed, match=r"of no one step.*errno 5"):
        step(batch)
    with pytest.raises(TierFailed, match="load a checkpoint"):
        wholestep.save(tmp_path / "other", model=model, optimizer=optimizer, step=step)
    wholestep.load(tmp_path, model=model, optimizer=optimizer, step=step)
    assert torch.isfinite(step(batch))


def test_state_comes_beside_the_backward_of_the_layer_before_and_leaves_beside_the_next() -> None:
    """Without clipping: two rounds of updates on the card at a time, whatever their number."""
    _, _, step = run(Plan(state={"blocks.*": "host"}))
    nodes = list(step.graph.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    trips = [trip for trip in round_trips(nodes) if any(u.target in IN_PLACE and _streamed(u) for u in trip[1])]
    assert len(trips) >= 3
    for comes, updates, leaves in trips:
        mine = [e for u in updates for e in u.all_input_nodes if e.target is torch.ops.ws.in_done.default]
        begun = [place[entry.args[0]] for entry in mine]
        gone = [
            place[n] for n in nodes
            if n.target is torch.ops.ws.out_done.default and any(u in _sources(n.args[0]) for u in updates)
        ]  # fmt: skip
        assert begun and max(begun) < place[comes] and gone and max(gone) < place[leaves]
        between = nodes[max(begun) : place[updates[0]]]
        assert any(phase_of(node) == "backward" for node in between), "the backward of a layer hides it"
        others = [n for n in nodes[max(place[u] for u in updates) : min(gone)] if phase_of(n) == "backward"]
        assert others or leaves is nodes[-1], "and that of the next hides its way back"


def _streamed(update: Any) -> bool:
    return any(entry.target is torch.ops.ws.in_done.default for entry in update.all_input_nodes)


def _sources(value: Any) -> set[Any]:
    """The update that made a new state."""
    return {value, *value.all_input_nodes}


@pytest.mark.gpu
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_a_recorded_step_streams_state_too(clip_norm: float | None) -> None:
    """Copies from and to pinned memory are part of a CUDA graph: the bits of direct steps, and the state stays where it is."""
    outcomes = []
    for recorded in (False, True):
        torch.manual_seed(0)
        model = Stack(width=256).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        given = [ids.cuda() for ids in id_batches(12)]
        step = wholestep.compile(
            model, next_token, optimizer, given[0], plan=Plan(state={"*": "host"}), clip_norm=clip_norm, cache=False,
            check="off", cuda_graph=recorded,
        )  # fmt: skip
        losses = [float(step(b)) for b in given]
        state = optimizer.state_dict()["state"]
        assert all(s["exp_avg"].is_pinned() for s in state.values())
        assert (step.regions["cuda_graph"]["mode"] == "replayed") == recorded, step.explain()
        outcomes.append((losses, tree_leaves((model.state_dict(), state))))
    assert outcomes[0][0] == outcomes[1][0] and equal(outcomes[0][1], outcomes[1][1])
