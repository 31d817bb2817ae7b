"""How much of the first step's check a budget leaves room for: decided by predictions, carried out, and told."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.plan.test_budget import Card
from tests.verify.small_models import Mlp, Normed, batches, loss_fn
from tests.verify.test_first_step import wrong_runner
from torch import nn

import wholestep
from wholestep.capture.dry import capture_example
from wholestep.capture.subject import make_subject
from wholestep.errors import FirstStepDiffers, WholestepWarning
from wholestep.graph.training_graph import Role
from wholestep.passes.pipeline import default_pipeline
from wholestep.plan import budget as budget_module
from wholestep.plan.budget import Budget
from wholestep.verify import within_budget as within_budget_module
from wholestep.verify.check import check_first_step, only_before
from wholestep.verify.fewer_rows import check_on_rows
from wholestep.verify.first_step import Lean
from wholestep.verify.within_budget import (
    LOGIT_BYTES,
    Decision,
    _Checked,
    _inputs,
    check_within,
    decide,
    decide_for,
    needs_of,
)

CPU = torch.device("cpu")
MIB = 1 << 20
ROWS, LENGTH, WORDS, WIDTH = 8, 128, 30000, 64
LOGITS = ROWS * LENGTH * WORDS


class Language(nn.Module):
    """Little but logits, as large vocabularies have it."""

    def __init__(self, body: int = WIDTH) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, body), nn.Linear(body, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(F.gelu(self.up(self.words(ids)))))


def guess(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


@functools.cache
def captured(chunked: bool, precision: str = "fp32") -> Any:
    with torch.device("meta"):
        model, ids = Language(), torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters())
    subject = make_subject(model, guess, optimizer, precision=precision, chunked_loss=chunked, dry="cuda")
    made = capture_example(subject, ids)
    default_pipeline().run_on(made)
    return made.graph


@pytest.mark.parametrize("chunked", [True, False])
def test_logits_count_where_the_captured_step_has_none(chunked: bool) -> None:
    needs = needs_of(captured(chunked))
    assert LOGITS * LOGIT_BYTES * 0.8 < needs.running < LOGITS * LOGIT_BYTES * 1.5
    assert needs.saved >= 4 * LOGITS
    assert needs.gradients == _inputs(captured(chunked), Role.PARAMETER)


def test_fewer_rows_have_fewer_logits_whatever_their_shape() -> None:
    """Rows of the shape of a weight are told from one here."""
    with torch.device("meta"):
        model, ids = Language(body=ROWS * LENGTH), torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    subject = make_subject(model, guess, torch.optim.AdamW(model.parameters()), chunked_loss=True, dry="cuda")
    graph = capture_example(subject, ids).graph
    assert needs_of(graph, 1 / ROWS).running < 1.5 * LOGITS * LOGIT_BYTES / ROWS < needs_of(graph).running / 4


def test_autocast_holds_a_copy_of_the_weights() -> None:
    wide, narrow = (needs_of(captured(True, precision)) for precision in ("fp32", "bf16"))
    weights = _inputs(captured(True), Role.PARAMETER)
    assert narrow.running > wide.running - LOGITS and weights // 2 < narrow.running


def decided(limit: float, **options: Any) -> Decision:
    graph = captured(True)
    held = _inputs(graph, *Role)
    return decide(graph, limit=int(limit), held=held, **{"rows": ROWS, **options})


def test_less_and_less_is_compared() -> None:
    graph = captured(True)
    held, needs = _inputs(graph, *Role), needs_of(graph)
    plenty = decided(4 * (held + needs.running + needs.saved))
    assert plenty.rows == 0 and plenty.lean.interpret and plenty.lean.room > needs.saved
    tight = decided((held + needs.running) / 0.96)
    assert tight.rows == 0 and tight.lean.room == 0
    found = [decided(held + share * needs.running).rows for share in (0.9, 0.6, 0.35, 0.3, 0.2)]
    assert found[0] and all(one is not None for one in found)
    assert found == sorted(found, key=lambda rows: -(rows or 0)) and len(set(found)) > 1
    assert all(ROWS % rows == 0 for rows in found if rows)
    nothing = decided(held * 1.01)
    assert nothing.rows is None and "eager takes about" in nothing.reason and "for one row" in nothing.reason


def test_the_graph_by_itself_has_to_fit_as_well() -> None:
    """Its saved values are on the device; eager's are not."""
    with torch.device("meta"):
        model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.GELU())))
        x = torch.zeros(4096, 64)
    subject = make_subject(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters()), dry="cuda")
    graph = capture_example(subject, x).graph
    held, needs = _inputs(graph, *Role), needs_of(graph)
    limits = [(held + share * needs.running) / 0.96 for share in (1.0, 16.0)]
    assert [decide(graph, limit=int(limit), held=held).lean.interpret for limit in limits] == [False, True]


def test_state_of_zeros_gives_way() -> None:
    graph = captured(True)
    state, held = _inputs(graph, Role.STATE), _inputs(graph, *Role)
    limit = int((held + needs_of(graph).running - state / 2) / 0.97)
    assert decided(limit).rows != 0 and decided(limit, fresh=state).rows == 0


def test_rows_that_cannot_stand_for_all_are_not_taken() -> None:
    limit = _inputs(captured(True), *Role) + 0.6 * needs_of(captured(True)).running
    assert decided(limit).rows and decided(limit, rows=None).rows is None and decided(limit, rows=1).rows is None


def test_the_host_has_to_hold_what_waits_there() -> None:
    graph = captured(True)
    held, needs = _inputs(graph, *Role), needs_of(graph)
    limit = int((held + needs.running) / 0.96)
    assert decided(limit, host=1 << 40).rows == 0
    short = decided(limit, host=MIB)
    assert short.rows is None and "of the host" in short.reason and "1.0 MiB left" in short.reason


# ---- carried out, where no card is ----


BUDGET = Budget(600 * MIB, context_bytes=0, others_bytes=0, slack=0.0, said="600 MiB", enforced=True)


def checked(
    model: nn.Module, decision: Decision, check: Any = check_first_step, *, whole_only: str | None = None, lr: float | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """A step whose check is carried out as decided."""
    optimizer = torch.optim.AdamW(model.parameters()) if lr is None else torch.optim.SGD(model.parameters(), lr=lr)
    step = wholestep.compile(model, loss_fn, optimizer, batches(1)[0], backend="interpret", cache=False, **options)
    within = _Checked(BUDGET, CPU, check, whole_only)
    step.check = lambda *given: within.run(decision, *given)
    return step


def told(step: Any) -> list[str]:
    return [line.removeprefix("check      ") for line in step.explain().splitlines() if line.startswith("check ")]


def out_of_memory(*args: Any, **options: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(("rows", "said"), [(0, "whole: "), (3, "reduced: the first step was compared on 3 of 6")])
def test_what_was_compared_is_told(rows: int, said: str) -> None:
    step = checked(Normed(), Decision(rows, Lean(0, False)))
    for batch in batches(2):
        step(batch)
    assert len(told(step)) == 1 and told(step)[0].replace(" with eager PyTorch", "").startswith(said)


@pytest.mark.parametrize("rows", [0, 3])
def test_a_miscompile_is_found_however_little_is_compared(rows: int) -> None:
    step = checked(Normed(), Decision(rows, Lean(0, False)))
    wrong_runner(step, "body.weight")
    with pytest.raises(FirstStepDiffers, match=r"the gradient of body\.weight"):
        step(batches(1)[0])


SILENT = "its update says nothing about most gradients"
LAYER = "clip_scope='layer' is not torch's clipping"


def test_an_update_that_tells_nothing_is_no_proof() -> None:
    """A learning rate of zero, as warm-ups begin with, in plain SGD: only the captured graph shows gradients."""
    step = checked(Normed(), Decision(0, Lean(0, False)), lr=0.0)
    with pytest.warns(WholestepWarning, match=f"only the loss was compared with eager PyTorch: {SILENT}"):
        step(batches(1)[0])
    assert [line.partition(":")[0] for line in told(step)] == ["whole", "partly"]
    step = checked(Normed(), Decision(3, Lean(0, False), "eager takes 12.0 GiB"), lr=0.0)
    with pytest.warns(WholestepWarning, match="the first update says nothing about most gradients"):
        step(batches(1)[0])
    assert told(step)[0].startswith("left out: ")


def test_with_the_captured_graph_it_need_not_tell() -> None:
    step = checked(Normed(), Decision(0, Lean(0, True)), lr=0.0)
    step(batches(1)[0])
    assert len(told(step)) == 1 and told(step)[0].startswith("whole: ")


@pytest.mark.parametrize(
    ("rows", "interpret", "said"), [(0, True, "whole"), (0, False, "left out"), (3, False, "left out")]
)
def test_where_updates_are_not_torchs_only_the_captured_graph_is_compared(
    rows: int, interpret: bool, said: str
) -> None:
    check = only_before(check_first_step, LAYER)
    step = checked(Normed(), Decision(rows, Lean(0, interpret), "eager takes 12.0 GiB"), check=check, whole_only=LAYER)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(batches(1)[0])
    assert told(step)[0].partition(":")[0] == said and ("clip_scope" in told(step)[0]) is (said == "left out")
    assert any(issubclass(w.category, WholestepWarning) for w in caught) is (said == "left out")


def test_on_a_card_before_and_after_are_held_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, total=1 << 30)
    budget = dataclasses.replace(BUDGET, context_bytes=100 * MIB)
    seen: list[Any] = []
    card.allocated = 70 * MIB
    monkeypatch.setattr(budget_module, "STILL_TO_LOAD", 20 * MIB)

    def decided_for(*given: Any, **amounts: int) -> Decision:
        seen.append(amounts)
        return Decision(0, Lean(5, True))

    def check(*given: Any, lean: Lean) -> Any:
        seen.append((card.fraction, lean))
        return lambda run, result: seen.append((card.fraction, run, result))

    monkeypatch.setattr(within_budget_module, "decide_for", decided_for)
    variant: Any = SimpleNamespace(
        subject=SimpleNamespace(device=torch.device("cuda")), capture=SimpleNamespace(from_cache=False, key=None)
    )
    check_within(budget, check)("run", variant, (), ())("run", "result")
    share = 480 / 1024
    assert seen == [
        {"limit": 480 * MIB, "held": 70 * MIB, "whole_only": None},
        (share, Lean(5, True)),
        (share, "run", "result"),
    ]
    assert card.fraction == 0.9


def test_a_check_that_is_left_out_is_told_by_a_warning() -> None:
    step = checked(Mlp(), Decision(None, Lean(0, False), "eager takes about 12.0 GiB for all rows"))
    with pytest.warns(
        WholestepWarning, match=r"not compared with eager PyTorch within memory=600 MiB: eager takes about 12.0 GiB"
    ):
        step(batches(1)[0])
    assert told(step)[0].startswith("left out: the first step is not compared with eager PyTorch within memory=600 MiB")


def test_a_lack_of_memory_leads_to_fewer_rows() -> None:
    step = checked(Linear(), Decision(0, Lean(0, False)), check=out_of_memory)
    step(batches(1)[0])
    assert told(step)[0].startswith("reduced: the first step was compared with eager PyTorch on 3 of 6 rows")
    assert told(step)[0].endswith("(memory did not suffice for all rows)")


def test_and_to_fewer_still(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def one_only(*given: Any, rows: int, lean: Lean) -> None:
        asked.append(rows)
        if rows > 1:
            out_of_memory()
        check_on_rows(*given, rows=rows, lean=lean)

    monkeypatch.setattr(within_budget_module, "check_on_rows", one_only)
    step = checked(Linear(), Decision(0, Lean(0, False)), check=out_of_memory)
    step(batches(1)[0])
    assert asked == [3, 1] and "on 1 of 6 rows" in told(step)[0]


@pytest.mark.parametrize(
    ("build", "rows", "reason"), [(Mlp, 0, "it draws random numbers"), (Normed, 1, "eager fails on so few")]
)
def test_or_to_none(build: type[nn.Module], rows: int, reason: str) -> None:
    step = checked(build(), Decision(rows, Lean(0, False)), check=out_of_memory)
    with pytest.warns(WholestepWarning, match=reason):
        step(batches(1)[0])
    assert told(step)[0].startswith("left out: ")


def test_a_lack_of_memory_for_few_rows_too_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(within_budget_module, "check_on_rows", out_of_memory)
    step = checked(Normed(), Decision(3, Lean(0, False), "eager takes about 12.0 GiB for all rows"))
    with pytest.warns(WholestepWarning, match=r"12\.0 GiB for all rows, nor for one;"):
        step(batches(1)[0])


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def test_a_live_step_is_decided_about_by_its_own_numbers() -> None:
    found: list[Decision] = []

    def look(run: Any, variant: Any, args: Any, numbers: Any) -> None:
        held = _inputs(variant.capture.graph, *Role)
        state = _inputs(variant.capture.graph, Role.STATE)
        found.append(decide_for(run, variant, args, limit=MIB, held=held))
        found.append(decide_for(run, variant, args, limit=(held - state) // 2, held=held))

    for model in (Normed(), Mlp()):
        optimizer = torch.optim.AdamW(model.parameters())
        step = wholestep.compile(model, loss_fn, optimizer, batches(1)[0], backend="interpret", cache=False)
        step.check = look
        step(batches(1)[0])
        step(batches(1)[0])
    assert [one.rows for one in found] == [0, None, 0, None], "only the first step of each is looked at"
    assert "draws random numbers" not in found[1].reason and "draws random numbers" in found[3].reason
