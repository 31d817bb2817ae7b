"""compile(memory=...): budgets are kept, a smaller one never takes more, and one too small names the smallest."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.passes.test_recompute import Small, batches, loss_fn
from tests.plan.test_frontier import Gelu
from torch import nn

import wholestep
from wholestep import compat, compiler
from wholestep.capture.dry import dry_capture
from wholestep.cost.devices import find_device
from wholestep.cost.node_costs import is_recomputed
from wholestep.errors import BadOption, BudgetTooSmall, WholestepWarning
from wholestep.graph.plan import Plan
from wholestep.lower.runner import Runner
from wholestep.passes.pipeline import Pipeline, default_pipeline, name_of
from wholestep.passes.update_early import update_early
from wholestep.plan import budget as budget_module
from wholestep.plan.budget import Budget, Fitting, ForSpeed
from wholestep.plan.frontier import CONTEXT_BYTES, Point
from wholestep.profile.memory.profile import memory_profile
from wholestep.runtime.enforce import Enforced, held_to, make_room


def compiled(memory: Any, layers: int = 2, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = Small(layers=layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = batches(1)[0]
    step = wholestep.compile(
        model, loss_fn, optimizer, batch, memory=memory, backend="interpret", cache=False, seed=3, **options
    )
    return step, model, optimizer


def peak(step: Any, model: Any, optimizer: Any) -> int:
    batch = batches(1)[0]
    step(batch)
    profile = memory_profile(step, model=model, optimizer=optimizer, batch=batch)
    return profile.peak_bytes - profile.at_peak["other"]  # what earlier tests left


@pytest.fixture(scope="module")
def free() -> int:
    return peak(*compiled(None))


@pytest.mark.slow
def test_budgets_are_kept_and_smaller_ones_never_take_more() -> None:
    free = peak(*compiled(None, layers=4))
    with pytest.raises(BudgetTooSmall) as refused:
        compiled(free // 4, layers=4)
    least = refused.value.smallest_bytes
    assert free // 4 < least < 0.8 * free
    assert f"ask for {least / 2**20:.1f} MiB" in str(refused.value)
    peaks = []
    for share in (1.0, 0.66, 0.33, 0.0):
        budget = int(least + share * (free * 1.02 - least))
        peaks.append(peak(*compiled(budget, layers=4)))
        assert peaks[-1] <= budget
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < 0.8 * peaks[0]


def test_the_step_says_what_it_does_and_trains_the_same(free: int) -> None:
    step, _, _ = compiled(int(0.8 * free))
    assert step.plan.recompute and step.plan.budget_bytes == int(0.8 * free)
    told = step.explain()
    assert "memory: " in told and "recomputed in the backward pass" in told
    plain, _, _ = compiled(None)
    for batch in batches(3):
        assert float(step(batch)) == float(plain(batch))


def test_a_plan_is_carried_out_as_given(free: int) -> None:
    step, model, optimizer = compiled(int(0.7 * free))
    again, *rest = compiled(None, plan=step.plan)
    assert peak(again, *rest) == peak(step, model, optimizer) and again.plan == step.plan


@pytest.mark.slow
def test_every_size_gets_its_own_plan(free: int) -> None:
    step, _, _ = compiled(int(0.8 * free))
    first = step.plan
    half = {name: tensor[:2] for name, tensor in batches(1)[0].items()}
    step(half)
    assert step.plan is not first and not step.plan.recompute


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "12GBs"}, "is not an amount of memory"),
        ({"memory": "auto"}, "memory='auto' on a CPU"),
        ({"memory": "8MiB", "dynamic": True}, "together with dynamic=True"),
        ({"memory": "8MiB", "plan": wholestep.Plan()}, "together with plan="),
        ({"memory": None, "plan": {}}, "give a wholestep.Plan"),
    ],
)
def test_what_cannot_be_asked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        compiled(**options)


def test_a_plan_sets_the_precision_of_modules() -> None:
    batch = batches(1)[0]
    plain, _, _ = compiled(None, 3, precision="bf16")
    plan = wholestep.Plan(precision={"head": "fp32", "blocks.1": "fp32"})
    mixed, _, _ = compiled(None, 3, precision="bf16", plan=plan)
    dtypes: dict[str, set[str]] = {}
    for node in mixed.graph.operations():
        if "mm" in str(node.target):
            dtypes.setdefault(node.meta["custom"]["module"].split(".qkv")[0], set()).add(str(node.meta["val"].dtype))
    assert dtypes["head"] == {"torch.float32"} and dtypes["blocks.1"] == {"torch.float32"}
    assert dtypes["blocks.0"] == {"torch.bfloat16"} == dtypes["blocks.2"]
    assert float(mixed(batch)) == pytest.approx(float(plain(batch)), rel=2e-2)
    with pytest.raises(BadOption, match="precision='fp16'"):
        compiled(None, precision="fp16", plan=wholestep.Plan(precision={"head": "fp32"}))


def early() -> Pipeline:
    """Updates of any size move, also those of a tiny model."""
    whole = default_pipeline()
    small: Any = functools.partial(update_early, min_bytes=1)
    return Pipeline(whole.passes, [small if name_of(one) == "update_early" else one for one in whole.apply])


def test_a_plan_decides_about_early_updates() -> None:
    def updates(plan: wholestep.Plan | None) -> int:
        step, _, _ = compiled(None, plan=plan, passes=early())
        return sum(str(node.target).startswith("ws.adamw") for node in step.graph.operations())

    assert updates(None) == updates(wholestep.Plan()) > 1 == updates(wholestep.Plan(early_update=False))


# ---- without a budget ----


def test_without_a_budget_the_fastest_plan_is_for_compiled_code_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "this_device", lambda kind: find_device("h200"))
    made = {}
    for backend, kind in (("inductor", "cuda"), ("interpret", "cuda"), ("inductor", "cpu")):
        model = Gelu()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        captured = dry_capture(model, lambda m, x: m(x).square().mean(), optimizer, torch.randn(512, 256), device=kind)
        planning, passes = ForSpeed(default_pipeline(), backend, torch.device(kind)), default_pipeline()
        passes.prepare(captured)
        plan = planning.plan(captured)
        passes.carry_out_on(captured, plan)
        again = sum(is_recomputed(node) for node in captured.graph.operations())
        told = any("quicker to recompute than to keep" in line for line in planning.told)
        made[backend, kind] = (bool(plan.recompute), again > 0, told)
    assert made["inductor", "cuda"] == (True, True, True)
    assert made["interpret", "cuda"] == made["inductor", "cpu"] == (False, False, False)


def test_sizes_that_are_symbolic_are_planned_as_they_were_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans go by names, so one for the size of the example is good for others."""
    made = []

    class Forced(ForSpeed):
        def __init__(self, pipeline: Any, backend: str, device: torch.device, room: Any = None) -> None:
            super().__init__(pipeline, "inductor", torch.device("cuda"), room)
            made.append(self)

    def trained(plan: wholestep.Plan | None) -> tuple[Any, list[float]]:
        torch.manual_seed(0)
        model = Gelu()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = wholestep.compile(
            model, lambda m, x: m(x).square().mean(), optimizer, torch.randn(512, 256), dynamic=True, plan=plan,
            backend="interpret", cache=False,
        )  # fmt: skip
        return step, [float(step(torch.randn(rows, 256))) for rows in (512, 8, 33)]

    monkeypatch.setattr(budget_module, "this_device", lambda kind: find_device("h200"))
    monkeypatch.setattr("wholestep.compiler.ForSpeed", Forced)
    step, losses = trained(None)
    assert step.captures == 1 and step.plan.recompute and "quicker to recompute" in made[-1].told[0]
    assert losses == trained(wholestep.Plan())[1]


def test_a_step_does_not_fail_for_want_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise KeyError("add_3")

    monkeypatch.setattr(budget_module, "this_device", lambda kind: find_device("h200"))
    monkeypatch.setattr(budget_module, "fastest", fails)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    captured = dry_capture(model, lambda m, x: m(x).square().mean(), optimizer, torch.randn(2, 4))
    planning = ForSpeed(default_pipeline(), "inductor", torch.device("cuda"))
    assert planning.plan(captured) == wholestep.Plan()
    assert "everything is kept" in planning.told[0] and "KeyError: 'add_3'" in planning.told[0]


def test_a_plan_that_keeps_everything_can_be_asked_for() -> None:
    asked, plain = compiled(None, plan=wholestep.Plan())[0].plan, compiled(None)[0].plan
    assert asked == plain and dataclasses.replace(plain, kernel={}) == wholestep.Plan()
    assert set(plain.kernel.values()) == {"cpu_flash"}  # which is no decision about memory


@pytest.mark.gpu
def test_the_fastest_plan_trains_the_same_on_a_gpu() -> None:
    losses = []
    for plan in (None, wholestep.Plan()):
        torch.manual_seed(0)
        model = Small(layers=4).cuda()
        data = [{name: tensor.cuda() for name, tensor in batch.items()} for batch in batches(6)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = wholestep.compile(model, loss_fn, optimizer, data[0], plan=plan, cache=False, seed=3)
        losses.append([float(step(batch)) for batch in data])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


class Card:
    """CUDA's allocator, as far as a limit goes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int) -> None:
        self.fraction, self.allocated, self.seen, self.context = 0.9, 0, [], 100 << 20
        properties = type("Properties", (), {"total_memory": total})
        for name, value in {
            "get_per_process_memory_fraction": lambda device: self.fraction,
            "set_per_process_memory_fraction": lambda fraction, device: setattr(self, "fraction", fraction),
            "get_device_properties": lambda device: properties,
            "memory_allocated": lambda device: self.allocated,
            "memory_reserved": lambda device: 400 << 20,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(compat, "bytes_on_card", lambda device: self.context + (400 << 20))
        monkeypatch.setattr(budget_module, "CONTEXT_BYTES", 100 << 20)

    def step(self, inputs: list[Any]) -> tuple[Any, ...]:
        self.seen.append(self.fraction)
        return ()


def test_the_allocator_is_held_to_the_budget_while_the_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, total=1 << 30)
    budget = Budget(600 << 20, context_bytes=100 << 20, others_bytes=0, slack=0.0, said="600 MiB", enforced=True)
    runner = Runner(card.step, 0, {"backend": "interpret"}).within(Enforced(budget, torch.device("cuda")))
    card.allocated = 50 << 20
    runner([])
    card.allocated = 60 << 20  # what others took since is theirs
    runner.with_facts(more=1)([])
    assert card.seen == [500 / 1024, 510 / 1024] and card.fraction == 0.9
    card.allocated = 150 << 20
    with pytest.warns(WholestepWarning, match="100 MiB were allocated beside the step.*600 MiB is exceeded by that"):
        runner([])
    runner([])  # said once
    card.context = 130 << 20  # kernels loaded since the budget was made
    runner.within(Enforced(budget, torch.device("cuda")))([])
    assert card.seen[-1] == 470 / 1024
    card.fraction = 0.2  # a limit of the user's own stays
    runner([])
    assert card.seen[-1] == card.fraction == 0.2


def test_the_allocator_is_held_to_the_budget_before_the_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, total=1 << 30)
    budget = Budget(600 << 20, context_bytes=100 << 20, others_bytes=0, slack=0.0, said="600 MiB", enforced=True)
    cuda = torch.device("cuda")
    monkeypatch.setattr(budget_module, "STILL_TO_LOAD", 20 << 20)
    with held_to(budget, cuda):
        assert card.fraction == 480 / 1024
    card.context = 130 << 20  # kernels loaded since the budget was made
    with held_to(budget, cuda):
        assert card.fraction == 450 / 1024
    card.context = (
        60 << 20
    )  # most kernels are still to be loaded: what they will take is in the budget's figure already
    with held_to(budget, cuda):
        assert card.fraction == 500 / 1024
    tiny = dataclasses.replace(budget, card_bytes=50 << 20)
    with held_to(tiny, cuda):
        assert card.fraction == 0.0, "it has to be refused with what would do, not with an error of the allocator's"
    with held_to(None, cuda), held_to(budget, torch.device("cpu")):
        assert card.fraction == 0.9
    assert card.fraction == 0.9


def test_capturing_and_lowering_are_held_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is compiled, tuned and measured happens there, for the first batch and for every new size."""
    within: list[str] = []

    @contextlib.contextmanager
    def noted(budget: Any, device: Any) -> Any:
        assert budget.card_bytes == 64 << 20
        within.append("open")
        yield
        within.append("closed")

    def inside(name: str) -> Any:
        inner = getattr(compiler, name)

        def called(*args: Any, **options: Any) -> Any:
            within.append(name)
            return inner(*args, **options)

        return called

    monkeypatch.setattr(compiler, "held_to", noted)
    for name in ("cached_capture", "lower_interpret"):
        monkeypatch.setattr(compiler, name, inside(name))
    step, _, _ = compiled(64 << 20)
    step({name: tensor[:2] for name, tensor in batches(1)[0].items()})
    assert within == ["open", "cached_capture", "closed", "open", "lower_interpret", "closed"] * 2


class Plans(Fitting):
    """Three plans whose peaks are as given when they are compiled; None where memory does not suffice to measure them."""

    def __init__(
        self,
        budget: Budget,
        backend: str,
        measured: Sequence[int | None],
        seconds: Sequence[float],
        peaks: Sequence[int] = (1000, 900, 800),
    ) -> None:
        pipeline: Any = SimpleNamespace(carry_out=lambda graph, plan: plan.reasons["index"])
        super().__init__(budget, pipeline, backend, torch.device("cpu"))
        self.points = [
            Point(Plan(reasons={"index": str(i)}), peak, time, {}, "")
            for i, (peak, time) in enumerate(zip(peaks, seconds))
        ]
        self.found, self.tried = measured, []

    def _rewritten_peak(self, graph: Any) -> int:
        return self.found[int(graph)] or self.points[int(graph)].peak_bytes

    def exact_peak(self, graph: Any) -> int:
        self.tried.append(int(graph))
        found = self.found[int(graph)]
        if found is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found


@pytest.mark.parametrize(
    ("backend", "measured", "seconds", "tried", "taken"),
    [
        ("inductor", [1000, 840, 760], (1.0, 1.01, 1.02), [1], 1),  # the first that fits, though a faster one might
        ("inductor", [920, 820, 760], (1.0, 1.1, 1.2), [1, 0], 0),  # unless that is much faster
        ("inductor", [1000, 960, 860], (1.0, 1.1, 1.2), [1, 2], 2),
        ("interpret", [940, 840, 760], (1.0, 1.01, 1.02), [1, 0], 0),  # which costs nothing to try
        ("inductor", [1000, None, 760], (1.0, 1.1, 1.2), [1, 2], 2),  # what cannot be measured does not fit
    ],
)
def test_plans_are_compiled_only_as_far_as_needed(
    backend: str, measured: list[int | None], seconds: tuple[float, ...], tried: list[int], taken: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(budget_module, "copy_graph", lambda graph: graph)
    fitting = Plans(Budget(950, 0, 0, 0.0, "950 B"), backend, measured, seconds)
    fitting.prepared = "prepared"  # type: ignore[assignment]
    plan = fitting._fit()
    assert (fitting.tried, plan.reasons["index"], plan.predicted_bytes) == (tried, str(taken), measured[taken])


def test_after_two_misses_half_of_what_is_left_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions that are further off the leaner a plan is would otherwise cost a compilation for every plan."""
    monkeypatch.setattr(budget_module, "copy_graph", lambda graph: graph)
    peaks = [1000 - 10 * i for i in range(41)]
    measured = [max(1000 - 4 * i, 0) for i in range(41)]
    fitting = Plans(Budget(900, 0, 0, 0.0, "900 B"), "inductor", measured, [1 + 0.001 * i for i in range(41)], peaks)
    fitting.prepared = "prepared"  # type: ignore[assignment]
    assert fitting._fit().predicted_bytes <= 900
    assert len(fitting.tried) == 3 and fitting.tried == sorted(fitting.tried)


def test_what_is_allocated_already_beyond_the_budget_costs_no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, total=1 << 30)
    card.allocated = 500 << 20
    monkeypatch.setattr(budget_module, "this_device", lambda kind: find_device("h200"))
    monkeypatch.setattr(budget_module, "predict_compiled", lambda *given, **options: pytest.fail("compiled in vain"))
    budget = Budget(550 << 20, 100 << 20, 0, 0.0, "550 MiB")
    fitting = Fitting(budget, default_pipeline(), "inductor", torch.device("cuda"))
    with pytest.raises(torch.OutOfMemoryError):
        fitting.exact_peak(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["interpret", "inductor"])
@pytest.mark.parametrize(("budget", "takes"), [(890, "4"), (810, "6"), (700, None)])
def test_where_sums_name_the_wrong_plan_for_the_leanest_the_others_are_looked_at(
    budget: int, takes: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the smallest budget there is."""
    monkeypatch.setattr(budget_module, "copy_graph", lambda graph: graph)
    peaks, measured = [1000 - 100 * i for i in range(9)], [1000, 1000, 1000, 1000, 880, 860, 800, 900, 1000]
    fitting = Plans(Budget(budget, 0, 0, 0.0, f"{budget} B"), backend, measured, [1 + 0.1 * i for i in range(9)], peaks)
    fitting.prepared = "prepared"  # type: ignore[assignment]
    if takes is None:
        with pytest.raises(BudgetTooSmall, match=r"takes 800 B of the card\. ask for 800 B"):
            fitting._fit()
    else:
        assert fitting._fit().reasons["index"] == takes


@pytest.mark.parametrize(("budget", "tried"), [(950, [1, 2]), (750, [2, 1])])
def test_the_leanest_plan_goes_by_its_prediction_where_it_cannot_be_measured(
    budget: int, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_module, "copy_graph", lambda graph: graph)
    fitting = Plans(Budget(budget, 0, 0, 0.0, f"{budget} B"), "inductor", [None, None, None], (1.0, 1.1, 1.2))
    fitting.prepared = "prepared"  # type: ignore[assignment]
    if budget > 840:
        plan = fitting._fit()
        assert plan.predicted_bytes == 840 and plan.reasons["index"] == "2"
    else:
        with pytest.raises(BudgetTooSmall, match="takes 840"):
            fitting._fit()
    assert fitting.tried == tried


def test_memory_that_does_not_suffice_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, total=1 << 30)
    budget = Budget(600 << 20, context_bytes=100 << 20, others_bytes=0, slack=0.0, said="600 MiB", enforced=True)

    def greedy(inputs: list[Any]) -> tuple[Any, ...]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError) as raised:
        Runner(greedy, 0, {}).within(Enforced(budget, torch.device("cuda")))([])
    assert "within memory=600 MiB" in raised.value.__notes__[0] and card.fraction == 0.9


class Recording:
    """Of another size: gives back what it holds when asked."""

    holds_memory = True

    def make_room(self) -> None:
        self.holds_memory = False


@pytest.mark.parametrize(("planned", "stays"), [(400, True), (500, False), (None, False)])
def test_recordings_of_other_sizes_stay_where_there_is_room(planned: int | None, stays: bool, monkeypatch: Any) -> None:
    card = Card(monkeypatch, total=1 << 30)  # 400 MiB are reserved, 600 less a context of 100 allowed
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    budget = Budget(600 << 20, context_bytes=100 << 20, others_bytes=0, slack=0.0, said="600 MiB", enforced=True)
    card.allocated = 300 << 20
    plan = Plan(predicted_bytes=planned << 20) if planned is not None else None
    variant = SimpleNamespace(capture=SimpleNamespace(plan=plan))
    recording = Recording()
    make_room(budget, torch.device("cuda"), variant, [recording])
    assert recording.holds_memory is stays
    again = Recording()
    make_room(budget, torch.device("cuda"), None, [again])
    assert not again.holds_memory, "a size that is not planned yet needs what there is"


def test_room_is_made_when_the_size_changes(free: int) -> None:
    step, _, _ = compiled(int(0.8 * free))
    asked: list[tuple[Any, list[Any]]] = []
    step.room = lambda variant, others: asked.append((variant, others))
    whole = batches(1)[0]
    half = {name: tensor[:2] for name, tensor in whole.items()}
    step(whole)
    first = step.variant_for(whole)
    recording = first.runner = Recorded(first.runner)
    step(whole)
    step(half)
    second = step.variant_for(half)
    step(half)
    step(whole)
    assert asked == [(first, []), (None, [recording]), (second, [recording]), (first, [])]


class Recorded:
    """A runner that holds the memory of a recording."""

    holds_memory = True

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def __call__(self, inputs: list[Any]) -> Any:
        return self.runner(inputs)


def within_the_smallest(compiled: Callable[[int], Any]) -> tuple[Any, int]:
    """A step within the smallest budget that is granted, and that budget."""
    budget = 1 << 30
    for _ in range(3):  # kernels loaded meanwhile take a little of the card: it names the smallest anew
        try:
            step = compiled(budget)
            torch.cuda.reset_peak_memory_stats()
            return step, budget
        except BudgetTooSmall as refused:
            budget = refused.smallest_bytes
    raise AssertionError(f"{budget} was named as the smallest budget and refused")


def card_peak() -> int:
    """Reserved at most since `within_the_smallest`, and the context."""
    held = compat.bytes_on_card(torch.device("cuda"))
    context = held - torch.cuda.memory_reserved() if held is not None else CONTEXT_BYTES
    return torch.cuda.max_memory_reserved() + context


@pytest.mark.gpu
def test_two_sizes_within_the_smallest_budget_on_a_gpu() -> None:
    """The recording of one holds what the other needs."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(m for _ in range(6) for m in (nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)))
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    whole = {"x": torch.randn(8192, 2048, device="cuda")}
    part = {"x": whole["x"][:6144]}

    def compiled(memory: int) -> Any:
        return wholestep.compile(
            model, lambda m, b: m(b["x"]).square().mean(), optimizer, whole, memory=memory, check="off", cuda_graph=True,
            cache=False, precision="bf16",
        )  # fmt: skip

    step, budget = within_the_smallest(compiled)
    losses = [float(step(batch)) for batch in (*[whole] * 6, *[part] * 2, *[whole] * 14, *[part] * 6)]
    assert card_peak() <= budget, step.explain()
    assert losses[-1] < losses[0] and step.captures == 2


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [None, False])
def test_the_smallest_budget_is_kept_on_a_gpu(cuda_graph: bool | None) -> None:
    """Layers of odd widths, so that what one leaves free does not fit the next."""
    torch.manual_seed(0)
    widths = [2048, 8192, 3072, 10240, 5120, 7168, 2048]
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.GELU(), nn.LayerNorm(b))]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = {"x": torch.randn(4096, widths[0], device="cuda")}

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["x"]).square().mean()

    def compiled(memory: int) -> Any:
        return wholestep.compile(
            model,
            loss_of,
            optimizer,
            batch,
            memory=memory,
            check="off",
            cuda_graph=cuda_graph,
            cache=False,
            precision="bf16",
        )

    step, budget = within_the_smallest(compiled)
    losses = [float(step(batch)) for _ in range(12)]
    assert card_peak() <= budget, step.explain()
    assert losses[-1] < losses[0] and torch.cuda.get_per_process_memory_fraction() == 1.0


class Words(nn.Module):
    """Layers that save much, and, where there are words, logits that eager has whole."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, 1024), nn.Linear(1024, words, bias=False)
        self.body = nn.Sequential(
            *(m for _ in range(8) for m in (nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)))
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(self.words(ids))).flatten(0, 1), ids.flatten())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("words", "shape", "times", "told"),
    [(64, (16, 2048), 2.2, "check: whole"), (64000, (16, 1024), 1.1, "check: reduced")],
)
def test_the_budget_is_kept_from_the_call_of_compile_on(
    words: int, shape: Any, times: float, told: str, monkeypatch: Any
) -> None:
    torch.manual_seed(0)
    model = Words(words).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, words, shape, device="cuda")
    most = 0
    inner = torch.cuda.reset_peak_memory_stats

    def reset(*args: Any) -> None:
        nonlocal most
        most = max(most, torch.cuda.max_memory_reserved())
        inner(*args)

    def compiled(memory: int) -> Any:
        return wholestep.compile(model, lambda m, b: m(b), optimizer, ids, memory=memory, cache=False, precision="bf16")

    torch.cuda.empty_cache()
    inner()
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    with pytest.raises(BudgetTooSmall) as refused:
        compiled(1 << 30)
    most = 0
    torch.cuda.empty_cache()
    inner()
    budget = int(times * refused.value.smallest_bytes)
    step = compiled(budget)
    losses = [float(step(ids)) for _ in range(12)]
    most = max(most, torch.cuda.max_memory_reserved())
    held = compat.bytes_on_card(torch.device("cuda"))
    context = CONTEXT_BYTES if held is None else held - torch.cuda.memory_reserved()
    assert most + context <= budget and losses[-1] < losses[0]
    assert any(note.startswith(told) for note in step.notes), step.notes
