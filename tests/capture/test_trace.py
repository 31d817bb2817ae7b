"""Capture's safety points: closures, hooks, attributes that a forward writes, unused parameters, losses.

At each of them a plain trace would go wrong in silence; where that is easy, a test takes the guard out and shows the wrong
result.
"""

from __future__ import annotations

import copy
import gc
import types
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
from wholestep import compat
from wholestep.errors import BadLoss, WholestepWarning
from wholestep.graph.training_graph import Role
from wholestep.runtime.binding import Binding

BATCHES = class_batches()


# ---- tensors that the loss reaches without being given them ----


def distilled() -> Side:
    """A teacher in the loss's closure, moved towards the student after every step."""
    model = small_mlp()
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch[0]), 0.5 * teacher(batch[0])) + classify(model, batch)

    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, teacher)


def move_teacher(side: Side) -> None:
    with torch.no_grad():
        for slow, fast in zip(side.extra.parameters(), side.model.parameters(), strict=True):
            slow.lerp_(fast, 0.3)


def replace_teacher_storage(side: Side) -> None:
    for p in side.extra.parameters():
        p.data = p.data * 0.5


def test_a_teacher_in_a_closure_is_read_live() -> None:
    """Parameters of a module that only the loss knows are CONSTANT inputs."""
    twins = Twins(distilled, BATCHES[0])
    assert twins.step.graph is not None and len(twins.step.graph.indices(Role.CONSTANT)) == 4
    twins.train(BATCHES, after=move_teacher)
    assert twins.step.captures == 1


def test_a_frozen_teacher_would_go_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the teacher as it was at capture: another training."""
    twins = Twins(distilled, BATCHES[0], check="off")
    variant = twins.step._latest
    monkeypatch.setattr(variant.binding, "refresh", frozen := copy_of_constants(variant.binding))
    ours, theirs = twins.losses(BATCHES, after=move_teacher)
    assert frozen is not None and ours[0] == theirs[0] and ours[-1] != pytest.approx(theirs[-1], rel=1e-4)


def copy_of_constants(binding: Binding) -> Any:
    """`Binding.refresh` with copies, made once, of what the call brings."""
    copies: list[torch.Tensor] = []
    refresh = binding.refresh

    def with_copies(given: list[torch.Tensor]) -> Any:
        copies.extend(t.clone() for t in given[len(copies) :])
        return refresh(copies)

    return with_copies


def test_a_teacher_whose_storage_moved_is_bound_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard: the addresses of constants are compared before each step (`Binding._unmoved`)."""
    Twins(distilled, BATCHES[0]).train(BATCHES[:3], after=replace_teacher_storage)
    monkeypatch.setattr(Binding, "_unmoved", lambda self: True)
    ours, theirs = Twins(distilled, BATCHES[0], check="off").losses(BATCHES[:3], after=replace_teacher_storage)
    assert ours[1:] != theirs[1:]


def replace_teacher_parameters(side: Side) -> None:
    for module in side.extra.modules():
        for name, p in list(module._parameters.items()):
            setattr(module, name, nn.Parameter(p.detach() * 0.5, requires_grad=False))


def test_a_teacher_whose_parameters_are_replaced_is_seen() -> None:
    Twins(distilled, BATCHES[0]).train(BATCHES[:3], after=replace_teacher_parameters)


def averaged() -> Side:
    """An average kept in a dict of tensors, each entry replaced (not written) after every step."""
    model = small_mlp()
    average = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        pull = sum(((p - average[name]) ** 2).sum() for name, p in model.named_parameters())
        return classify(model, batch) + 0.1 * pull

    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, average)


def replace_average(side: Side) -> None:
    for name, p in side.model.named_parameters():
        side.extra[name] = 0.5 * side.extra[name] + 0.5 * p.detach()


def test_tensors_replaced_in_a_dict_of_the_closure_are_seen() -> None:
    """`ema[name] = ...` makes new tensors; the step must not stay with the old ones."""
    twins = Twins(averaged, BATCHES[0])
    twins.train(BATCHES, after=replace_average)
    assert twins.step.rung == "whole step"


SCALE = torch.tensor([2.0, 1.0, 0.5])


def scaled_by_global(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]) * SCALE, batch[1])


def scaled_side() -> Side:
    model = small_mlp()
    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), scaled_by_global)


def test_a_global_tensor_is_read_live_also_when_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(scaled_side, BATCHES[0])
    twins.train(BATCHES[:2])
    SCALE.mul_(0.5)
    twins.train(BATCHES[2:4])
    monkeypatch.setitem(globals(), "SCALE", torch.tensor([1.0, 3.0, 2.0]))
    twins.train(BATCHES[4:])
    SCALE.fill_(1.0)


def rebound_closure() -> Side:
    model, weights = small_mlp(), torch.ones(3)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=weights)

    def change() -> None:
        nonlocal weights
        weights = weights * torch.tensor([1.0, 0.7, 1.3])

    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, change)


def test_a_closure_variable_bound_to_new_tensors_every_step() -> None:
    """A tensor is data: replacing it is no reason to capture anew, and never a reason to use the old one."""
    twins = Twins(rebound_closure, BATCHES[0])
    twins.train([*BATCHES, *BATCHES], after=lambda side: side.extra())
    assert twins.step.captures == 1 and twins.step.rung == "whole step", twins.step.explain()


def replaced_teacher() -> Side:
    model = small_mlp()
    teacher = copy.deepcopy(model)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(batch[0])
        return F.mse_loss(model(batch[0]), 0.5 * target) + classify(model, batch)

    def change() -> None:
        nonlocal teacher
        del teacher  # the old one dies before the new one is made: its address may be used again
        gc.collect()
        teacher = copy.deepcopy(model)  # noqa: F841 - the loss reads it

    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, change)


def test_a_teacher_copied_anew_from_the_student() -> None:
    """Guard: closure contents are compared by identity of objects kept alive, not by an address used again."""
    Twins(replaced_teacher, BATCHES[0], check="off").train(BATCHES[:4], after=lambda side: side.extra())


def test_a_teacher_with_batch_statistics_keeps_them() -> None:
    """Writes to tensors of a closure reach them, as in eager."""

    def make() -> Side:
        model = small_mlp()
        teacher = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).requires_grad_(False)

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            return F.mse_loss(model(batch[0]), teacher(batch[0]))

        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, teacher)

    twins = Twins(make, BATCHES[0])
    twins.train(BATCHES[:4])
    ours, theirs = (dict(s.extra.named_buffers()) for s in (twins.ours, twins.theirs))
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_a_trained_parameter_read_around_its_module_gets_its_gradient() -> None:
    """A list of weights in the closure: the same tensors, and so the same inputs, as the model's own."""

    def make() -> Side:
        model = small_mlp()
        weights = [m.weight for m in model if isinstance(m, nn.Linear)]

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            return classify(model, batch) + 0.1 * sum((w**2).sum() for w in weights)

        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)

    twins = Twins(make, BATCHES[0])
    twins.train(BATCHES)
    assert (twins.step.rung, twins.step.captures) == ("whole step", 1)


# ---- hooks ----


def hooked() -> Side:
    model = small_mlp()
    model[0].weight.register_hook(lambda g: g * 3.0)
    model[2].bias.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), classify)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_parameter_hooks_shape_the_gradient(accumulate: int) -> None:
    """Dynamo sees the hooks run on the gradients; each micro-batch has its own."""
    ours, theirs, plain = (hooked() for _ in range(3))
    for side in (theirs, plain):
        side.model.load_state_dict(ours.model.state_dict())
    for p in plain.model.parameters():
        p._backward_hooks = None
    parts = [[tuple(t[i : i + 2] for t in batch) for i in (0, 2)[:accumulate]] for batch in BATCHES[:3]]
    step = interpreted(ours, parts[0][0], accumulate=accumulate)
    for micro in parts:
        step(micro if accumulate > 1 else micro[0])
        for side in (theirs, plain):
            side.optimizer.zero_grad()
            for part in micro:
                (classify(side.model, part) / accumulate).backward()
            side.optimizer.step()
    assert step.rung == "whole step"
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(ours.model[0].weight, plain.model[0].weight), "the hooks matter"


def test_what_a_parameter_hook_does_to_python_is_done_at_every_step() -> None:
    def make() -> Side:
        side = mlp_side()
        side.extra = {"calls": 0}

        def count(gradient: torch.Tensor) -> None:
            side.extra["calls"] += 1

        side.model[0].weight.register_hook(count)
        return side

    twins = Twins(make, BATCHES[0])
    twins.train(BATCHES)
    assert twins.ours.extra == twins.theirs.extra == {"calls": len(BATCHES)}


def test_a_hook_registered_later_is_honoured() -> None:
    twins = Twins(mlp_side, BATCHES[0])
    twins.train(BATCHES[:2])
    handles = {}
    twins.both(lambda side: handles.__setitem__(id(side), side.model[0].weight.register_hook(lambda g: g * 0.1)))
    twins.train(BATCHES[2:4])
    twins.both(lambda side: handles[id(side)].remove())
    twins.train(BATCHES[4:])


def test_post_accumulate_hooks_run_in_eager() -> None:
    """Guard: `_refuse_post_accumulate_hooks`."""
    seen: list[int] = []

    def make() -> Side:
        side = mlp_side()

        def halve(p: torch.Tensor) -> None:
            seen.append(1)
            p.grad.mul_(0.5)

        side.model[0].bias.register_post_accumulate_grad_hook(halve)
        return side

    with pytest.warns(WholestepWarning, match=r"0\.bias has a post-accumulate-grad hook"):
        twins = Twins(make, BATCHES[0])
    assert twins.step.rung == "eager"
    twins.train(BATCHES[:2])
    assert len(seen) == 4


def test_forward_hooks_change_the_output_and_have_their_effects() -> None:
    def make() -> Side:
        side = mlp_side()
        side.extra = {"calls": 0, "last": None}

        def hook(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
            side.extra["calls"] += 1
            side.extra["last"] = out.detach()
            return out * 2

        side.model[1].register_forward_hook(hook)
        return side

    twins = Twins(make, BATCHES[0])
    assert twins.ours.extra == {"calls": 0, "last": None}, "compile runs no hook"
    twins.train(BATCHES)
    assert twins.step.rung == "whole step" and twins.ours.extra["calls"] == len(BATCHES)
    assert torch.equal(twins.ours.extra["last"], twins.theirs.extra["last"])


def test_a_forward_hook_registered_or_removed_later_is_seen() -> None:
    twins = Twins(mlp_side, BATCHES[0])
    twins.train(BATCHES[:2])
    handles = {}
    hook = lambda module, args, out: out * 2  # noqa: E731
    twins.both(lambda side: handles.__setitem__(id(side), side.model[1].register_forward_hook(hook)))
    twins.train(BATCHES[2:4])
    twins.both(lambda side: handles[id(side)].remove())
    twins.train(BATCHES[4:])


def test_module_backward_hooks_shape_the_gradient() -> None:
    def make() -> Side:
        side = mlp_side()
        side.model[2].register_full_backward_hook(lambda module, grad_in, grad_out: tuple(g * 0.5 for g in grad_in))
        return side

    with pytest.warns(WholestepWarning, match="backwards? hooks"):
        twins = Twins(make, BATCHES[0])
        twins.train(BATCHES[:3])
    assert twins.step.rung == "eager"


# ---- attributes that a forward writes ----


class RotaryLike(nn.Module):
    """Keeps a table that the first forward computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None or self.table.shape[0] < x.shape[0]:
            self.table = torch.arange(x.shape[0], dtype=x.dtype).cos()[:, None]
        return self.inner(x) * self.table[: x.shape[0]]


def side_of(model: nn.Module) -> Side:
    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), classify)


def fakes_on_modules() -> list[str]:
    """Every module alive whose attributes hold a fake tensor; graphs (and the bare roots of traces) may."""
    modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module) and type(m) is not nn.Module]
    modules = [m for m in modules if not isinstance(m, torch.fx.GraphModule)]
    held = [(m, name) for m in modules for name, value in vars(m).items() if compat.is_fake(value)]
    return [f"{type(m).__name__}: {name}" for m, name in held]


@pytest.mark.parametrize("check", ["first", "off"])
def test_a_table_cached_by_forward_is_kept(check: str) -> None:
    """Compile leaves no trace of it; the first step keeps it, later ones read it."""
    twins = Twins(lambda: side_of(RotaryLike()), BATCHES[0], check=check)
    assert twins.ours.model.table is None and fakes_on_modules() == []
    twins.train(BATCHES)
    assert twins.step.rung == "whole step" and twins.step.captures <= 2
    assert not compat.is_fake(twins.ours.model.table) and fakes_on_modules() == []
    assert torch.equal(twins.ours.model.table, twins.theirs.model.table)
    larger = class_batches(2, size=7)
    twins.train([*larger, BATCHES[0]], tolerance=1e-6)
    assert torch.equal(twins.ours.model.table, twins.theirs.model.table)


def test_a_teacher_that_caches_keeps_no_fake_tensor() -> None:
    """Modules that only the closure knows are restored too."""

    def make() -> Side:
        model, teacher = small_mlp(), RotaryLike().requires_grad_(False)

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            return F.mse_loss(model(batch[0]), teacher(batch[0]))

        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, teacher)

    twins = Twins(make, BATCHES[0])
    assert twins.ours.extra.table is None and fakes_on_modules() == []
    twins.train(BATCHES[:3])
    assert torch.equal(twins.ours.extra.table, twins.theirs.extra.table) and fakes_on_modules() == []


class Counting(nn.Module):
    """Counts its calls, and multiplies by nothing that depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x)


CHECKS = pytest.mark.parametrize("check", ["first", "off"])


@CHECKS
def test_a_counter_counts_and_costs_one_more_capture_at_most(check: str) -> None:
    """A number that was seen to change is an input from then on."""
    twins = Twins(lambda: side_of(Counting()), BATCHES[0], check=check)
    assert twins.ours.model.calls == 0
    twins.train(BATCHES)
    assert twins.ours.model.calls == twins.theirs.model.calls == len(BATCHES)
    assert twins.step.rung == "whole step" and twins.step.captures <= 2


class UsesItsCount(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 + self.calls)


@CHECKS
def test_a_count_that_reaches_the_numbers_follows(check: str) -> None:
    """The operators are the same at each call and only a number differs: it must not be fixed."""
    twins = Twins(lambda: side_of(UsesItsCount()), BATCHES[0], check=check)
    twins.train(BATCHES)
    assert twins.ours.model.calls == len(BATCHES) and twins.step.captures <= 3 and twins.step.rung == "whole step"


class Carrying(nn.Module):
    """A recurrent state carried from call to call as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.hidden = torch.zeros(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x) + 0.5 * self.hidden
        self.hidden = out.detach()
        return out


@CHECKS
def test_a_hidden_state_is_carried(check: str) -> None:
    twins = Twins(lambda: side_of(Carrying()), BATCHES[0], check=check)
    assert torch.equal(twins.ours.model.hidden, torch.zeros(5, 3))
    twins.train(BATCHES)
    assert torch.equal(twins.ours.model.hidden, twins.theirs.model.hidden)
    assert (twins.step.rung, twins.step.captures) == ("whole step", 1)


@CHECKS
def test_a_hidden_state_carried_in_a_list_is_right(check: str) -> None:
    class InAList(Carrying):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.inner(x) + (0.5 * self.kept[-1] if self.kept else 0.0)
            self.kept.append(out.detach())
            return out

    twins = Twins(lambda: side_of(InAList()), BATCHES[0], check=check)
    assert twins.ours.model.kept == []
    twins.train(BATCHES[:3])
    assert all(torch.equal(a, b) for a, b in zip(twins.ours.model.kept, twins.theirs.model.kept, strict=True))


# ---- buffers ----


def test_batch_norm_statistics_follow_eager() -> None:
    def make() -> Side:
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
        return Side(model, torch.optim.AdamW(model.parameters(), lr=1e-2), classify)

    Twins(make, BATCHES[0]).train(BATCHES)


@CHECKS
def test_a_buffer_that_forward_replaces_is_an_update(check: str) -> None:
    class Averages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.inner(x)
            self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
            return out - self.mean

    twins = Twins(lambda: side_of(Averages()), BATCHES[0], check=check)
    twins.train(BATCHES)
    assert twins.step.rung == "whole step" and twins.step.captures <= 2


# ---- which parameters are trained ----


class Partly(nn.Module):
    """One parameter is never used, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) + self.frozen(x)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_unused_and_frozen_parameters_stay_as_they_are(kind: str) -> None:
    """No decay and no state for what got no gradient, as in torch."""

    def make() -> Side:
        model = Partly()
        chosen = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.5, momentum=0.9),
        }[kind]
        return Side(model, chosen(model.parameters()), classify)

    twins = Twins(make, BATCHES[0])
    before = twins.ours.model.unused.weight.detach().clone()
    twins.train(BATCHES[:3])
    assert torch.equal(twins.ours.model.unused.weight, before)
    assert not twins.ours.optimizer.state.get(twins.ours.model.unused.weight)


def test_requires_grad_flipped_in_mid_training() -> None:
    """Adam's step counts part when a parameter is thawed later; both directions follow torch."""
    twins = Twins(mlp_side, BATCHES[0])
    twins.train(BATCHES[:2])
    twins.both(lambda side: side.model[0].requires_grad_(False))
    twins.train(BATCHES[2:4])
    twins.both(lambda side: side.model[0].requires_grad_(True))
    twins.train(BATCHES[4:])
    steps = {float(s["step"]) for s in twins.ours.optimizer.state.values()}
    assert steps == {4.0, 6.0}


# ---- the loss ----


def test_losses_that_cannot_be_differentiated_are_named() -> None:
    for wrong, words in (
        (lambda m, b: m(b[0]), r"the loss has shape \(5, 3\).*\.mean\(\)"),
        (lambda m, b: 3.0, "loss_fn returned a float.*scalar tensor"),
        (lambda m, b: m(b[0]).argmax(), "the loss has dtype torch.int64"),
        (lambda m, b: m(b[0]).sum().detach(), "does not depend on any trained parameter.*detach"),
        (lambda m, b: (m(b[0]).sum(), {"count": 3}), r"aux\['count'\] is a int"),
    ):
        side = mlp_side()
        side.loss_fn = wrong
        with pytest.raises(BadLoss, match=words):
            interpreted(side, BATCHES[0])


def test_a_loss_of_one_element_counts_as_a_scalar() -> None:
    side = mlp_side()
    side.loss_fn = lambda m, b: classify(m, b).reshape(1)
    assert interpreted(side, BATCHES[0])(BATCHES[0]).shape == (1,)


def test_aux_outputs_are_detached_and_follow_each_batch() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]), {"logits": logits, "correct": (logits.argmax(-1) == batch[1]).sum()}

    side, other = mlp_side(), mlp_side()
    other.model.load_state_dict(side.model.state_dict())
    side.loss_fn = other.loss_fn = loss_fn
    step = interpreted(side, BATCHES[0])
    for batch in BATCHES[:3]:
        expected = loss_fn(other.model, batch)[1]
        loss, aux = step(batch)
        eager_update(other, batch)
        assert not loss.requires_grad and not aux["logits"].requires_grad
        assert torch.equal(aux["logits"], expected["logits"]) and int(aux["correct"]) == int(expected["correct"])


def test_tied_parameters_are_trained_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    def make() -> Side:
        model = Tied()
        loss_fn = lambda m, b: F.cross_entropy(m(b), b.flip(0))  # noqa: E731
        return Side(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn)

    ids = [torch.randint(0, 7, (9,), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    twins = Twins(make, ids[0])
    twins.train(ids)
    assert twins.ours.model.head.weight is twins.ours.model.embed.weight


def test_several_modules_and_two_steps_train_a_gan() -> None:
    """What is differentiated is exactly the optimizer's parameters."""

    def build() -> types.SimpleNamespace:
        torch.manual_seed(1)
        models = {"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)}
        fool = lambda m, z: F.softplus(-m["d"](m["g"](z))).mean()  # noqa: E731
        judge = lambda m, z: (F.softplus(m["d"](m["g"](z).detach())) + F.softplus(-m["d"](z))).mean()  # noqa: E731
        return types.SimpleNamespace(
            g=Side(models, torch.optim.Adam(models["g"].parameters(), lr=0.01), fool),
            d=Side(models, torch.optim.Adam(models["d"].parameters(), lr=0.01), judge),
        )

    ours, theirs = build(), build()
    z = [torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    steps = interpreted(ours.d, z[0]), interpreted(ours.g, z[0])
    for batch in z:
        for step, side in zip(steps, (theirs.d, theirs.g), strict=True):
            loss = float(step(batch))
            for m in theirs.g.model.values():
                m.zero_grad()
            assert loss == float(eager_update(side, batch)[0])


def test_the_source_line_and_module_path_are_on_the_nodes() -> None:
    step = wholestep.compile(small_mlp_model := small_mlp(), classify, torch.optim.SGD(small_mlp_model.parameters()),
                             BATCHES[0], backend="interpret", cache=False)  # fmt: skip
    facts = [node.meta["custom"] for node in step.graph.operations()]
    assert {f["phase"] for f in facts} == {"forward", "backward", "update"}
    assert {"0", "1", "2"} <= {f.get("module") for f in facts if f["phase"] == "forward"}
    assert {"0", "2"} <= {f.get("module") for f in facts if f["phase"] == "backward"}
    assert any(str(f.get("source", "")).startswith("twins.py:") for f in facts)
