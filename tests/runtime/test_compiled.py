"""The rung below a whole step: torch.compile with graph breaks where that measures faster, else eager; equal to eager."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins, class_batches, classify, interpreted
from torch import nn
from torch._inductor import compile_fx as compile_module
from torch.fx.experimental.proxy_tensor import make_fx

from wholestep.errors import WholestepWarning
from wholestep.runtime.compiled import TIMED, WARM_UP, CompiledLoss, LowerRung

BATCHES = class_batches(WARM_UP + 2 * TIMED + 3)


class Broken(nn.Module):
    """One graph break: which way it goes is decided by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls, self.factor = nn.Linear(4, 6), nn.Linear(6, 3), 0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.first(x).tanh()
        if hidden.sum() > 0:
            hidden = hidden * 2
        return self.second(hidden) * self.factor


def broken_side() -> Side:
    model = Broken()
    return Side(model, torch.optim.AdamW(model.parameters(), lr=1e-2), classify)


def fallen() -> Twins:
    with pytest.warns(WholestepWarning, match="through torch.compile, with graph breaks"):
        twins = Twins(broken_side, BATCHES[0], backend="inductor", clip_norm=0.5)
        twins.train(BATCHES[:2], tolerance=1e-5)
    return twins


def test_writes_that_torch_compile_would_blur_run_in_eager() -> None:
    """A mask with infinities, written after it was expanded to its own shape: NaN where torch makes it functional."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        scores = model(batch[0])
        mask = torch.full((1, 3), -torch.inf).expand(1, 3)
        mask[:, :2] = scores.detach()[:1, :2] * 0
        return F.cross_entropy(scores + mask.clamp(min=-9), batch[1])

    def side() -> Side:
        model = Broken()
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)

    with pytest.warns(WholestepWarning, match="through torch.compile, with graph breaks"):
        twins = Twins(side, BATCHES[0], backend="inductor", check="off")
        twins.train(BATCHES[:2], tolerance=1e-5)


def test_inductor_with_a_graph_break_is_equal_to_eager_and_measured() -> None:
    compiled = fallen()
    assert compiled.step.rung == "torch.compile" and compiled.step.graph is None
    compiled.train(BATCHES[2:], tolerance=1e-5)
    assert compiled.ours.model.calls == compiled.theirs.model.calls == len(BATCHES)
    note = next(note for note in compiled.step.notes if note.startswith("steps that are not captured run by"))
    assert "torch.compile" in note and "eager" in note and note.count(" ms") == 2
    winner = "torch.compile" if "run by torch.compile" in note else "eager"
    assert compiled.step.rung == winner
    # a value that the loss reads is followed, whichever of the two won
    compiled.both(lambda side: setattr(side.model, "factor", 3.0))
    compiled.train(BATCHES[:2], tolerance=1e-5)


def test_random_numbers_are_those_of_eager() -> None:
    """Inductor's own would differ from those of the eager steps in between, and a loss may seed them itself."""

    def noisy(model: Any, batch: Any) -> torch.Tensor:
        torch.manual_seed(5)
        noise = 0.3 * torch.randn_like(batch[0])
        return classify(model, (F.dropout(batch[0] + noise, 0.4), batch[1]))

    def side() -> Side:
        return dataclasses.replace(broken_side(), loss_fn=noisy)

    with pytest.warns(WholestepWarning, match="through torch.compile, with graph breaks"):
        twins = Twins(side, BATCHES[0], backend="inductor")
        twins.train(BATCHES[:WARM_UP], tolerance=1e-5)
    assert twins.step.rung == "torch.compile"


def test_a_name_that_later_batches_have_is_noticed() -> None:
    class Weighted:
        def __init__(self, **values: Any) -> None:
            self.__dict__.update(values)

        def __getattr__(self, name: str) -> float:
            return 1.0

    def weighted(model: Any, batch: Any) -> torch.Tensor:
        return classify(model, batch.pair) * batch.weight

    batches = [
        Weighted(pair=pair, **({"weight": 3.0} if i >= WARM_UP - 1 else {})) for i, pair in enumerate(BATCHES[:WARM_UP])
    ]
    side = lambda: dataclasses.replace(broken_side(), loss_fn=weighted)  # noqa: E731
    with pytest.warns(WholestepWarning, match="through torch.compile, with graph breaks"):
        twins = Twins(side, batches[0], backend="inductor")
        twins.train(batches, tolerance=1e-5)
    assert twins.step.rung == "torch.compile"


def test_zeros_without_memory_are_given_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of forward-mode derivatives: Inductor would reuse them as memory of its own, at address 0."""
    compile_fx, graphs = compile_module.compile_fx, []

    def looked_at(graph: Any, example: Any, **options: Any) -> Any:
        zeros = lambda: torch.ops.aten._efficientzerotensor.default([2])  # noqa: E731
        graphs.append(make_fx(zeros, decomposition_table=options["decompositions"])())
        return compile_fx(graph, example, **options)

    monkeypatch.setattr(compile_module, "compile_fx", looked_at)
    fallen()
    assert graphs and all("_efficientzerotensor" not in made.code for made in graphs)


def test_where_torch_compile_fails_eager_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the failed attempt counted and wrote into buffers is taken back; the step is taken once."""

    class Counting(Broken):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.seen = nn.BatchNorm1d(4), []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(len(self.seen))
            return super().forward(self.norm(x))

    def failing(self: Any, model: Any, batch: Any) -> Any:
        self.subject.loss_fn(model, batch)
        raise KeyError("factor")

    def side() -> Side:
        model = Counting()
        return Side(model, torch.optim.AdamW(model.parameters(), lr=1e-2), classify)

    monkeypatch.setattr(CompiledLoss, "__call__", failing)
    with pytest.warns(WholestepWarning, match="through torch.compile, with graph breaks"):
        twins = Twins(side, BATCHES[0], backend="inductor")
        twins.train(BATCHES[:4], tolerance=1e-6)
    assert twins.step.rung == "eager" and twins.ours.model.seen == list(range(4))
    told = "torch.compile fails where eager PyTorch does not (KeyError: 'factor')"
    assert any(note.startswith(told) for note in twins.step.notes)


def test_on_interpret_it_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("nothing is compiled")

    monkeypatch.setattr("wholestep.runtime.compiled.CompiledLoss", refuse)
    with pytest.warns(WholestepWarning, match="the step runs in eager PyTorch"):
        twins = Twins(broken_side, BATCHES[0])
        twins.train(BATCHES[:4])
    assert twins.step.rung == "eager" and twins.ours.model.calls == twins.theirs.model.calls == 4


@pytest.mark.parametrize(("compiled_ms", "eager_ms", "winner"), [(1.0, 2.0, "torch.compile"), (2.0, 1.0, "eager")])
def test_the_faster_one_is_kept(
    compiled_ms: float, eager_ms: float, winner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock of the middle run, after the warm-up."""
    notes: list[str] = []
    ran: list[str] = []
    monkeypatch.setattr("wholestep.runtime.compiled.CompiledLoss", lambda subject: object())
    rung = LowerRung(None, notes.append, compiled=True)  # type: ignore[arg-type]
    clock = [0.0]

    def run(kind: str, micro: Any, done: Any) -> Any:
        ran.append(kind)
        clock[0] += (compiled_ms if kind == "torch.compile" else eager_ms) / 1e3
        return (None, {}), None

    monkeypatch.setattr(rung, "_run", run)
    monkeypatch.setattr(rung, "_now", lambda: clock[0])
    for _ in range(WARM_UP + 2 * TIMED + 2):
        rung.step([None])
    assert ran[:WARM_UP] == ["torch.compile"] * WARM_UP and ran[-2:] == [winner] * 2
    assert rung.name == winner and notes == [
        f"steps that are not captured run by {winner}: torch.compile {compiled_ms:.2f} ms, eager {eager_ms:.2f} ms"
    ]


def test_what_torch_compile_does_not_notice_ends_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function replaced on a class: Dynamo's guards hold, ours do not. Its graphs run as they are, to save time."""
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, example, **_: graph)
    compiled = fallen()
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: nn.functional.linear(x, self.weight, self.bias) * 2)
    compiled.train(BATCHES[2:4], tolerance=1e-5)
    assert any("which torch.compile would not notice" in note for note in compiled.step.notes)
    assert compiled.step.rung == "eager"


def test_accumulation_on_the_lower_rung() -> None:
    sides = [broken_side() for _ in range(2)]
    sides[1].model.load_state_dict(sides[0].model.state_dict())

    parts = [tuple(t[a:b] for t in BATCHES[0]) for a, b in ((0, 2), (2, 4))]
    with pytest.warns(WholestepWarning):
        step = interpreted(sides[0], parts[0], accumulate=2)
        for _ in range(3):
            loss = step(parts)
            expected = [classify(sides[1].model, part) / 2 for part in parts]
            for one in expected:
                one.backward()
            sides[1].optimizer.step()
            sides[1].optimizer.zero_grad()
            assert float(loss) == pytest.approx(float(sum(expected)), rel=1e-6)
    for a, b in zip(sides[0].model.parameters(), sides[1].model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
