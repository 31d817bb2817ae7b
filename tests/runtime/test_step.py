"""The Step itself: accumulation, gradients for the caller, aux, clipping, what it tells."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import (
    Side,
    Twins,
    class_batches,
    classify,
    eager_update,
    interpreted,
    mlp_side,
    small_mlp,
)  # fmt: skip
from torch import nn

import wholestep
from wholestep.errors import BadBatch, UnsupportedModel, WholestepWarning

BATCHES = class_batches(6, size=8)


def sgd_side(loss_fn: Any = classify) -> Side:
    model = small_mlp()
    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss_fn)


def pair(loss_fn: Any = classify, **options: Any) -> tuple[Any, Side, Side]:
    """A step, its side, and an eager side with the same weights."""
    ours, theirs = sgd_side(loss_fn), sgd_side(loss_fn)
    theirs.model.load_state_dict(ours.model.state_dict())
    example = BATCHES[0] if options.get("accumulate", 1) == 1 else tuple(t[:2] for t in BATCHES[0])
    return interpreted(ours, example, **options), ours, theirs


def assert_close(ours: Side, theirs: Side, tolerance: float = 1e-6) -> None:
    for (name, a), b in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
@pytest.mark.parametrize("check", ["off", "first"])
def test_a_loss_of_one_place_keeps_its_dimensions(shape: tuple[int, ...], check: str) -> None:
    step, ours, _ = pair(lambda m, b: classify(m, b).reshape(shape), check=check)
    for batch in BATCHES[:2]:
        expected = classify(ours.model, batch).detach()
        torch.testing.assert_close(step(batch), expected.reshape(shape))
    assert step.rung == "whole step"


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_step_cannot_be_copied_and_says_what_can(duplicate: Any) -> None:
    step, _, _ = pair(check="off")
    with pytest.raises(
        UnsupportedModel, match=r"^a Step cannot be copied or pickled.*copy or save those \(wholestep.save\)"
    ):
        duplicate(step)


@pytest.mark.parametrize("way", ["no optimizer", "its own update", "accumulated"])
def test_aux_that_copies_state_or_batch_is_a_copy(way: str) -> None:
    """Passes take `clone()` and `* 1` out; where the update is not in the graph, the parameter itself would be returned."""
    side = sgd_side(lambda model, batch: (classify(model, batch), copies_of(model, batch)))
    if way == "its own update":
        side.optimizer.register_step_post_hook(lambda *_: None)  # type: ignore[union-attr]
    options: dict[str, Any] = {"accumulate": 2} if way == "accumulated" else {}
    optimizer = None if way == "no optimizer" else side.optimizer
    batch = tuple(t[:4].clone() for t in BATCHES[0])
    given = [batch, batch] if way == "accumulated" else batch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WholestepWarning)
        step = wholestep.compile(
            side.model, side.loss_fn, optimizer, batch, backend="interpret", check="off", cache=False, **options
        )
    for _ in range(2):
        wanted = {name: value.detach().clone() for name, value in copies_of(side.model, batch).items()}
        _, aux = step(given)
        if way == "no optimizer":
            assert side.optimizer is not None
            side.optimizer.step()
        batch[0].add_(1)
        for name, value in wanted.items():
            assert torch.equal(aux[name].reshape(-1)[: value.numel()], value.reshape(-1)), name


def copies_of(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    weight = next(model.parameters())
    return {"cloned": weight.clone(), "once": weight * 1.0, "turned": weight.t().clone(), "batch": batch[0] * 1}


# ---- accumulation ----


@pytest.mark.parametrize("given", ["one batch", "a list"])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_four_micro_batches_equal_the_full_batch(given: str, clip_norm: float | None) -> None:
    step, ours, theirs = pair(accumulate=4, clip_norm=clip_norm)
    for batch in BATCHES[:3]:
        parts = [tuple(t[i : i + 2] for t in batch) for i in range(0, 8, 2)]
        loss = step(batch if given == "one batch" else parts)
        expected, norm = eager_update(theirs, batch, clip_norm)
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
        if clip_norm is not None:
            assert float(step.grad_norm) == pytest.approx(float(norm), rel=1e-5)
    assert_close(ours, theirs)
    assert step.captures == 1


def masked_mean(model: nn.Module, batch: Any) -> Any:
    """The mean over valid targets, and their number."""
    loss = F.cross_entropy(model(batch[0]), batch[1], ignore_index=-100)
    return loss, {"weight": (batch[1] != -100).sum(), "loudest": model(batch[0]).abs().max()}


def test_unequal_valid_targets_are_weighted() -> None:
    """With aux["weight"] accumulation is the full batch exactly; without it the mean of means is not."""
    batches = []
    for x, y in BATCHES[:3]:
        y = y.clone()
        y[:5] = -100
        batches.append((x, y))
    step, ours, theirs = pair(masked_mean, accumulate=4)
    for batch in batches:
        parts = [tuple(t[i : i + 2] for t in batch) for i in range(0, 8, 2)]
        parts = [p for p in parts if (p[1] != -100).any()] * 2  # two of four hold targets; each twice
        loss, aux = step(parts)
        full = tuple(torch.cat([p[i] for p in parts]) for i in range(2))
        expected, _ = eager_update(theirs, full)
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
        assert int(aux["weight"]) == int((full[1] != -100).sum())
    assert_close(ours, theirs)
    plain, others, eager = pair(lambda m, b: masked_mean(m, b)[0], accumulate=4)
    plain(parts)
    eager_update(eager, full)
    with pytest.raises(AssertionError):
        assert_close(others, eager)


def test_a_batch_that_cannot_be_cut_is_named() -> None:
    step, _, _ = pair(accumulate=4)
    with pytest.raises(BadBatch, match=r"cannot be cut into accumulate=4"):
        step(tuple(t[:6] for t in BATCHES[0]))


def test_micro_batches_may_differ_in_structure() -> None:
    """Each is captured as it comes."""
    step, ours, theirs = pair(accumulate=4)
    parts: list[Any] = [tuple(t[i : i + 2] for t in BATCHES[0]) for i in range(0, 8, 2)]
    loss = step([parts[0], list(parts[1]), parts[2], list(parts[3])])
    assert float(loss) == pytest.approx(float(eager_update(theirs, BATCHES[0])[0]), rel=1e-5)
    assert_close(ours, theirs)
    assert step.rung == "whole step" and not step.falls


def test_a_batch_that_is_itself_a_list_is_cut() -> None:
    """[x, y] with accumulate=2 is one batch of two tensors, not two micro-batches."""

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return classify(model, batch)

    ours, theirs = sgd_side(loss_fn), sgd_side(loss_fn)
    theirs.model.load_state_dict(ours.model.state_dict())
    step = interpreted(ours, list(BATCHES[0]), accumulate=2)
    loss = step(list(BATCHES[0]))
    assert float(loss) == pytest.approx(float(eager_update(theirs, BATCHES[0])[0]), rel=1e-6)


def test_micro_batches_of_unequal_sizes_are_right() -> None:
    """They do not fit one graph: several, and the same numbers as an eager loop."""
    step, ours, theirs = pair(masked_mean, accumulate=3)
    parts = [tuple(t[a:b] for t in BATCHES[0]) for a, b in ((0, 2), (2, 5), (5, 8))]
    loss, _ = step(parts)
    expected, _ = eager_update(theirs, BATCHES[0])
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert_close(ours, theirs)
    assert step.rung == "whole step" and not step.falls, step.explain()


def test_batch_statistics_see_every_micro_batch() -> None:
    def side() -> Side:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), classify)

    ours, theirs = side(), side()
    parts = [tuple(t[i : i + 4] for t in BATCHES[0]) for i in (0, 4)]
    step = interpreted(ours, parts[0], accumulate=2)
    step(parts)
    theirs.optimizer.zero_grad()
    for part in parts:
        (classify(theirs.model, part) / 2).backward()
    theirs.optimizer.step()
    torch.testing.assert_close(ours.model[1].running_mean, theirs.model[1].running_mean)
    assert int(ours.model[1].num_batches_tracked) == 2
    assert_close(ours, theirs)


# ---- gradients for the caller ----


@pytest.mark.parametrize("accumulate", [1, 2])
def test_without_an_optimizer_gradients_are_filled_as_backward_does(accumulate: int) -> None:
    model, other = small_mlp(), small_mlp()
    other.load_state_dict(model.state_dict())
    example = tuple(t[: 8 // accumulate] for t in BATCHES[0])
    step = interpreted(Side(model, None, classify), example, accumulate=accumulate)
    for count, batch in enumerate(BATCHES[:3]):
        step(batch)
        classify(other, batch).backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-7)
        if count == 1:  # two calls added up; now start afresh
            model.zero_grad(set_to_none=True)
            other.zero_grad(set_to_none=True)


def test_gradients_of_earlier_steps_are_not_overwritten() -> None:
    """A gradient handed over belongs to the caller: the next step must not write into it."""
    model = small_mlp()
    step = interpreted(Side(model, None, classify), BATCHES[0], check="off")
    step(BATCHES[0])
    kept = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in kept]
    model.zero_grad(set_to_none=True)
    step(BATCHES[1])
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


KEYS: tuple[tuple[Any, ...], ...] = (
    ("loss", "accuracy"), ("gradient/0.weight", "boundary/0"), ("~holds", "~kept0", "~fact0"), (3, "3", 0.5), ((1, 2), None),
)  # fmt: skip


@pytest.mark.parametrize("options", [{"guards": "off"}, {}, {"accumulate": 2}, {"clip_norm": 1.0, "nonfinite": "skip"}])
@pytest.mark.parametrize("keys", KEYS, ids=str)
def test_aux_may_have_any_keys(keys: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Those that a captured step uses itself among them, and numbers."""

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        loss = classify(model, batch)
        return loss, {key: (i + 2) * loss for i, key in enumerate(keys)}

    step, ours, _ = pair(loss_fn, **options)
    parts = [tuple(t[:2] for t in batch) for batch in BATCHES[:2]]
    given, seen = (parts, parts) if "accumulate" in options else (BATCHES[0], BATCHES[:1])
    for _ in range(2):  # the first step is compared with eager, and answered by the comparison
        expected = sum(float(classify(ours.model, batch)) for batch in seen) / len(seen)
        loss, aux = step(given)
        assert step.rung == "whole step" and float(loss) == pytest.approx(expected)
        assert list(aux) == list(keys)
        assert [float(value) for value in aux.values()] == pytest.approx([(i + 2) * expected for i in range(len(keys))])


def test_a_weight_of_micro_batches_is_found_without_guards_too() -> None:
    parts = [tuple(t[:size] for t in batch) for size, batch in zip((2, 2), BATCHES)]
    parts[1][1][0] = -100
    weights, trained = small_mlp().state_dict(), []
    for guards in ("dynamo", "off"):
        step, ours, _ = pair(masked_mean, accumulate=2, guards=guards)
        ours.model.load_state_dict(weights)
        loss, _ = step(parts)
        assert step.rung == "whole step", step.explain()
        trained.append([loss, *ours.model.parameters()])
    for one, other in zip(*trained, strict=True):
        assert torch.equal(one, other)


def test_losses_and_aux_of_earlier_steps_are_not_overwritten() -> None:
    step, _, _ = pair(masked_mean)
    first, aux = step(BATCHES[0])
    value, loudest = float(first), float(aux["loudest"])
    step(BATCHES[1])
    assert float(first) == value and float(aux["loudest"]) == loudest


def test_a_captured_update_leaves_p_grad_alone() -> None:
    step, ours, _ = pair()
    step(BATCHES[0])
    assert all(p.grad is None for p in ours.model.parameters())


# ---- clipping ----


@pytest.mark.parametrize("clip_norm", [0.01, 1e6])
def test_clipping_is_torchs(clip_norm: float) -> None:
    """Below and above the norm; `step.grad_norm` is the norm before clipping (compared inside `losses`)."""
    twins = Twins(mlp_side, BATCHES[0], clip_norm=clip_norm)
    twins.train(BATCHES[:3], tolerance=1e-6)
    assert twins.step.grad_norm.shape == ()


def test_the_clip_norm_is_read_live() -> None:
    step, ours, theirs = pair(clip_norm=0.5)
    for limit, batch in zip((0.5, 0.05, 5.0), BATCHES, strict=False):
        step.subject.clip_norm = limit
        step(batch)
        eager_update(theirs, batch, limit)
    assert_close(ours, theirs)
    assert step.captures == 1


def test_no_norm_without_clipping() -> None:
    step, _, _ = pair()
    step(BATCHES[0])
    assert step.grad_norm is None


# ---- what it tells ----


def test_explain_is_short_and_says_what_was_captured() -> None:
    step, _, _ = pair(clip_norm=1.0)
    step(BATCHES[0])
    text = step.explain()
    assert len(text.splitlines()) <= 12
    for word in ("whole step", "4 parameter", "forward", "backward", "update", "interpret", "1 capture", "1 step"):
        assert word in text, text
    assert "whole step" in repr(step)


def test_the_graph_is_there_to_look_at() -> None:
    step, _, _ = pair(accumulate=2)
    assert step.graph is not None and step.update_graph is not None
    assert step.state_dict() == {"seed": step.seed, "count": 0}


def test_the_loss_is_detached() -> None:
    step, _, _ = pair()
    loss = step(BATCHES[0])
    assert not loss.requires_grad and loss.shape == ()


def test_under_no_grad_and_inference_of_the_caller() -> None:
    """A compiled step trains also where the caller has switched gradients off by mistake or design."""
    step, ours, theirs = pair()
    with torch.no_grad():
        loss = step(BATCHES[0])
    assert float(loss) == float(eager_update(theirs, BATCHES[0])[0])
    assert_close(ours, theirs, 0.0)


def test_a_model_of_many_kinds_of_layers() -> None:
    """Convolution, pooling, group norm, embedding, gelu: bit for bit as eager."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.conv = nn.Embedding(9, 4), nn.Conv1d(4, 6, 3, padding=1)
            self.norm, self.head = nn.GroupNorm(2, 6), nn.Linear(6, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = F.gelu(self.norm(self.conv(self.embed(ids).mT)))
            return self.head(F.adaptive_avg_pool1d(hidden, 1)[..., 0])

    def make() -> Side:
        model = Mixed()
        return Side(model, torch.optim.AdamW(model.parameters(), lr=0.01), classify)

    batches = [(torch.randint(0, 9, (4, 7)), torch.randint(0, 3, (4,))) for _ in range(3)]
    Twins(make, batches[0]).train(batches)


def test_threads_and_devices_are_left_alone() -> None:
    before = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()
    step, _, _ = pair()
    step(BATCHES[0])
    assert (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()) == before


def test_float64_models() -> None:
    def make() -> Side:
        model = small_mlp().double()
        return Side(model, torch.optim.AdamW(model.parameters(), lr=0.01), classify)

    batches = [(x.double(), y) for x, y in BATCHES[:3]]
    Twins(make, batches[0], clip_norm=0.5).train(batches, tolerance=1e-12)


def test_falling_to_eager_warns_once() -> None:
    side = mlp_side()
    side.loss_fn = lambda m, b: classify(m, b) * (2.0 if b[0].sum() > 0 else 1.0)
    with pytest.warns(WholestepWarning) as seen:
        step = interpreted(side, BATCHES[0])
        for batch in BATCHES[:4]:
            step(batch)
    (told,) = [w for w in seen if issubclass(w.category, WholestepWarning)]
    assert str(told.message).startswith("the step runs in eager PyTorch: whole step: Data-dependent branching")
    assert told.filename == __file__, "told where the user called"


class SharedGradient(nn.Module):
    """`a` and `b` have one gradient between them, that of `c` is expanded from a number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(3) * i) for i in range(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.a + self.b) * x).sum() + self.c.sum() * x.sum()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_handed_over_have_memory_of_their_own(accumulate: int) -> None:
    model, twin = SharedGradient(), SharedGradient()
    step = wholestep.compile(
        model, lambda m, b: m(b), None, torch.ones(2 * accumulate, 3), backend="interpret", accumulate=accumulate
    )
    for _ in range(3):
        batch = torch.randn(2 * accumulate, 3)
        step(batch)
        for part in batch.chunk(accumulate):
            (twin(part) / accumulate).backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(g is not None for g in gradients)
    assert len({g.untyped_storage().data_ptr() for g in gradients if g is not None}) == 3
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_an_assertion_on_values_stays_in_the_step() -> None:
    """F.one_hot checks its classes; the check returns nothing, and nobody reads it."""
    model = nn.Linear(4, 3)

    def loss_fn(m: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (m(batch["x"]) - nn.functional.one_hot(batch["y"], 3)).square().mean()

    batch = {"x": torch.randn(5, 4), "y": torch.tensor([0, 1, 2, 1, 0])}
    step = wholestep.compile(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), batch, backend="interpret")
    assert step(batch) > step(batch) and step.rung == "whole step"
    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        step({"x": batch["x"], "y": torch.tensor([0, 1, 9, 1, 0])})


def test_real_strides_may_differ_from_traced_ones() -> None:
    """On the CPU, batch norm gives a transposed input other strides than its fake does; a view of them must still work."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(16), nn.Linear(16, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.norm(x.transpose(1, 2)).transpose(1, 2))

    def make() -> Side:
        torch.manual_seed(0)
        model = Transposed()
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).square().mean())

    batches = [torch.randn(3, 10, 16) for _ in range(3)]
    Twins(make, batches[0]).train(batches)
