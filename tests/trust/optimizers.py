"""Optimizers: their numbers, groups and state changed between steps; schedulers; updates of one's own; accumulation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tests.trust.case import Made, Net, adamw, at, cases_of, momentum, mse, pairs, sgd, train
from torch import nn
from torch.optim import swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook

case, more = cases_of("optimizers")

Make = Callable[[Any], torch.optim.Optimizer]


def with_option_set(make: Make, **values: Any) -> Made:
    """One number of the first group is another from step 3."""
    model = Net()
    optimizer = make(model.parameters())
    return train(model=model, optimizer=optimizer, change=at(3, optimizer.param_groups[0].update, **values))


def scheduled(make_scheduler: Callable[[Any], Any], make: Make = sgd) -> Made:
    model = Net()
    optimizer = make(model.parameters())
    scheduler = make_scheduler(optimizer)
    return train(model=model, optimizer=optimizer, after=lambda i: scheduler.step(), state=lambda: scheduler.last_epoch)


# ---- numbers ----


@case
def learning_rate_by_hand() -> Made:
    model = Net()
    optimizer = adamw(model.parameters())
    change = lambda i: optimizer.param_groups[0].update(lr=0.01 / (i + 1))  # noqa: E731
    return train(model=model, optimizer=optimizer, change=change)


@more
def learning_rate_zero_for_a_while() -> Made:
    model = Net()
    optimizer = momentum(model.parameters())
    change = lambda i: optimizer.param_groups[0].update(lr=0.0 if i in (2, 3) else 0.05)  # noqa: E731
    return train(model=model, optimizer=optimizer, change=change)


@more
def learning_rate_as_a_tensor() -> Made:
    model = Net()
    rate = torch.tensor(0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    return train(model=model, optimizer=optimizer, change=at(3, rate.fill_, 0.001))


@case
def betas_changed() -> Made:
    return with_option_set(adamw, betas=(0.5, 0.9))


@more
def epsilon_changed() -> Made:
    return with_option_set(adamw, eps=0.5)


@case
def decay_switched_on() -> Made:
    return with_option_set(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0), weight_decay=0.5)


@more
def decay_of_sgd_switched_on() -> Made:
    return with_option_set(sgd, weight_decay=0.1)


@case
def momentum_switched_on() -> Made:
    return with_option_set(sgd, momentum=0.9)


@more
def momentum_switched_off() -> Made:
    return with_option_set(momentum, momentum=0.0)


@case
def nesterov_switched_on() -> Made:
    return with_option_set(momentum, nesterov=True)


@more
def dampening_changed() -> Made:
    return with_option_set(momentum, dampening=0.5)


@case
def maximize_switched_on() -> Made:
    return with_option_set(adamw, maximize=True)


@more
def amsgrad_from_the_start() -> Made:
    return train(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True))


@case
def amsgrad_switched_off() -> Made:
    return with_option_set(lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True), amsgrad=False)


# ---- groups and state ----


@more
def two_groups_with_their_own_rates() -> Made:
    model = Net()
    groups = [{"params": model.a.parameters(), "lr": 0.1}, {"params": model.b.parameters(), "lr": 0.01}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    change = at(3, lambda: [group.update(lr=group["lr"] * 0.1) for group in optimizer.param_groups])
    return train(model=model, optimizer=optimizer, change=change)


@case
def group_added() -> Made:
    model = Net()
    optimizer = adamw(model.b.parameters())
    change = at(3, lambda: optimizer.add_param_group({"params": list(model.a.parameters()), "lr": 1e-3}))
    return train(model=model, optimizer=optimizer, change=change)


@case
def group_removed() -> Made:
    model = Net()
    optimizer = torch.optim.SGD([{"params": model.a.parameters()}, {"params": model.b.parameters()}], lr=0.1)
    return train(model=model, optimizer=optimizer, change=at(3, optimizer.param_groups.pop))


@more
def parameter_moved_to_another_group() -> Made:
    model = Net()
    optimizer = torch.optim.AdamW(
        [{"params": model.a.parameters()}, {"params": model.b.parameters(), "lr": 0.1}], lr=1e-3
    )

    def change(i: int) -> None:
        if i == 3:
            first, second = (group["params"] for group in optimizer.param_groups)
            second.append(first.pop())

    return train(model=model, optimizer=optimizer, change=change)


@case
def state_cleared() -> Made:
    model = Net()
    optimizer = adamw(model.parameters())
    return train(model=model, optimizer=optimizer, change=at(3, optimizer.state.clear))


@more
def state_of_one_parameter_deleted() -> Made:
    model = Net()
    optimizer = momentum(model.parameters())
    return train(model=model, optimizer=optimizer, change=at(3, optimizer.state.pop, model.a.weight))


@more
def state_scaled_in_place() -> Made:
    model = Net()
    optimizer = adamw(model.parameters())
    change = at(3, lambda: [state["exp_avg"].mul_(0.1) for state in optimizer.state.values()])
    return train(model=model, optimizer=optimizer, change=change)


@more
def state_tensor_replaced() -> Made:
    model = Net()
    optimizer = momentum(model.parameters())
    change = at(3, lambda: [state.update(momentum_buffer=torch.ones_like(p)) for p, state in optimizer.state.items()])
    return train(model=model, optimizer=optimizer, change=change)


@case
def optimizer_state_loaded() -> Made:
    model = Net()
    optimizer, saved = adamw(model.parameters()), []

    def change(i: int) -> None:
        if i == 2:
            saved.append(copy.deepcopy(optimizer.state_dict()))
        if i == 4:
            optimizer.load_state_dict(saved[0])

    return train(model=model, optimizer=optimizer, change=change)


@more
def optimizer_state_loaded_with_another_rate() -> Made:
    model = Net()
    optimizer = adamw(model.parameters())
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.1
    return train(model=model, optimizer=optimizer, change=at(3, optimizer.load_state_dict, saved))


@more
def rolled_back_to_a_checkpoint() -> Made:
    model = Net()
    optimizer, saved = adamw(model.parameters()), []

    def change(i: int) -> None:
        if i == 2:
            saved.extend(copy.deepcopy([model.state_dict(), optimizer.state_dict()]))
        if i == 4:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])

    return train(model=model, optimizer=optimizer, change=change)


# ---- schedulers ----


@more
def step_schedule() -> Made:
    return scheduled(lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.1))


@more
def lambda_schedule() -> Made:
    return scheduled(lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: min(1.0, (n + 1) / 4)), adamw)


@case
def one_cycle_schedule() -> Made:
    return scheduled(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8), adamw)


@more
def sequential_schedule() -> Made:
    schedulers = torch.optim.lr_scheduler
    parts = lambda o: [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.CosineAnnealingLR(o, 4)]  # noqa: E731
    return scheduled(lambda o: schedulers.SequentialLR(o, parts(o), milestones=[2]), momentum)


@more
def plateau_schedule() -> Made:
    model = Net()
    optimizer = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    return train(model=model, optimizer=optimizer, after=lambda i: scheduler.step(1.0 + i % 2))


# ---- other optimizers, and their steps taken over ----


@more
def adam_with_decay() -> Made:
    return train(optimizer=lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1))


@case
def rmsprop() -> Made:
    return train(optimizer=lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True))


@more
def adagrad() -> Made:
    return train(optimizer=lambda p: torch.optim.Adagrad(p, lr=1e-1, lr_decay=0.1))


@more
def radam() -> Made:
    return train(optimizer=lambda p: torch.optim.RAdam(p, lr=1e-2))


@more
def adafactor() -> Made:
    return train(optimizer=lambda p: torch.optim.Adafactor(p, lr=1e-2))


@more
def foreach_adamw() -> Made:
    return train(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True))


@case
def optimizer_of_ones_own() -> Made:
    class Sign(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad.sign(), alpha=group["lr"])

    return train(optimizer=Sign)


@case
def subclass_that_looks_ahead() -> Made:
    class Lookahead(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            result = super().step(closure)
            if self.calls % 2 == 0:
                for p in self.param_groups[0]["params"]:
                    p.data.mul_(0.9)
            return result

    model = Net()
    optimizer = Lookahead(model.parameters(), lr=0.1)
    return train(model=model, optimizer=optimizer, state=lambda: optimizer.calls)


@case
def step_patched_on_the_instance() -> Made:
    model = Net()
    optimizer, calls = sgd(model.parameters()), []
    step = optimizer.step

    def patched(*args: Any) -> Any:
        calls.append(len(calls))
        return step(*args) if len(calls) % 2 else None

    optimizer.step = patched
    return train(model=model, optimizer=optimizer, state=lambda: calls)


@case
def step_patched_later() -> Made:
    model = Net()
    optimizer = sgd(model.parameters())
    step = optimizer.step

    def patched(*args: Any) -> Any:
        for p in model.parameters():
            p.grad.clamp_(-0.01, 0.01)
        return step(*args)

    return train(model=model, optimizer=optimizer, change=at(3, setattr, optimizer, "step", patched))


@case
def step_patched_on_the_class() -> Made:
    original = torch.optim.SGD.step

    def patched(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.9)
        return result

    cleanup = lambda: setattr(torch.optim.SGD, "step", original)  # noqa: E731
    return train(change=at(3, setattr, torch.optim.SGD, "step", patched), cleanup=cleanup)


@case
def hook_before_the_update() -> Made:
    model = Net()
    optimizer = sgd(model.parameters())

    def halve(*_: Any) -> None:
        for p in model.parameters():
            p.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    return train(model=model, optimizer=optimizer)


@more
def hook_after_the_update() -> Made:
    model = Net()
    optimizer, norms = sgd(model.parameters()), []
    optimizer.register_step_post_hook(lambda *_: norms.append(model.a.weight.norm().item()))
    return train(model=model, optimizer=optimizer, state=lambda: norms)


@case
def hook_after_the_update_added_later() -> Made:
    model = Net()
    optimizer = sgd(model.parameters())
    clamp = lambda *_: model.a.weight.data.clamp_(-0.1, 0.1)  # noqa: E731
    return train(model=model, optimizer=optimizer, change=at(3, optimizer.register_step_post_hook, clamp))


@case
def hook_for_all_optimizers() -> Made:
    calls: list[int] = []
    handles: list[Any] = []
    register = register_optimizer_step_post_hook
    change = at(3, lambda: handles.append(register(lambda *_: calls.append(1))))
    return train(change=change, state=lambda: len(calls), cleanup=lambda: [handle.remove() for handle in handles])


@case
def zero_grad_patched() -> Made:
    """Gradients add up over all steps, since nothing clears them."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.zero_grad = lambda set_to_none=True: None
    return train(model=model, optimizer=optimizer)


# ---- around the update ----


@case
def clipped() -> Made:
    return train(optimizer=adamw, options={"clip_norm": 0.05})


@more
def clipped_with_two_groups() -> Made:
    model = Net()
    optimizer = torch.optim.SGD([{"params": model.a.parameters()}, {"params": model.b.parameters(), "lr": 0.5}], lr=0.1)
    return train(model=model, optimizer=optimizer, options={"clip_norm": 0.1})


@case
def accumulated() -> Made:
    found = pairs(4, 12)
    return train(batches=[found[i : i + 2] for i in range(0, 12, 2)], options={"accumulate": 2}, optimizer=adamw)


@case
def accumulated_with_weights() -> Made:
    def loss(m: Any, b: Any) -> Any:
        kept = (b[1][:, 0] > -0.5).float()
        return ((m(b[0]) - b[1]).square().mean(1) * kept).sum() / kept.sum(), {"weight": kept.sum()}

    found = pairs(6, 12)
    return train(loss, batches=[found[i : i + 2] for i in range(0, 12, 2)], options={"accumulate": 2})


@case
def accumulated_and_clipped_with_a_counter() -> Made:
    calls = [0]

    def loss(m: Any, b: Any) -> torch.Tensor:
        calls[0] += 1
        return mse(m, b) * (1.0 if calls[0] < 8 else 0.1)

    found, options = pairs(4, 18), {"accumulate": 3, "clip_norm": 0.5}
    return train(loss, batches=[found[i : i + 3] for i in range(0, 18, 3)], options=options, state=lambda: calls[0])


@case
def update_of_ones_own() -> Made:
    model = Net()

    @torch.no_grad()
    def after(i: int) -> None:
        for p in model.parameters():
            p.sub_(p.grad, alpha=0.1 / (i + 1))
            p.grad = None

    return train(model=model, optimizer=None, after=after)


@more
def update_of_ones_own_by_an_optimizer() -> Made:
    model = Net()
    optimizer, norms = adamw(model.parameters()), []

    def after(i: int) -> None:
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()

    return train(model=model, optimizer=None, after=after, state=lambda: norms)


@case
def update_of_ones_own_every_second_step() -> Made:
    """Gradients add up in p.grad until the update."""
    model = Net()
    optimizer = sgd(model.parameters())

    def after(i: int) -> None:
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()

    return train(model=model, optimizer=None, after=after)


@more
def averaged_weights() -> Made:
    model = Net()
    average = swa_utils.AveragedModel(model)
    after = lambda i: average.update_parameters(model)  # noqa: E731
    return train(model=model, after=after, state=lambda: list(average.parameters()))


@case
def not_finite_and_allowed() -> Made:
    batches = pairs()
    batches[3] = (batches[3][0] * float("nan"), batches[3][1])
    return train(batches=batches, optimizer=momentum)


@more
def gradient_that_vanishes() -> Made:
    """With a factor of zero the gradients are zero, not absent: Adam goes on by its moments."""
    weight = [1.0]
    return train(lambda m, b: mse(m, b) * weight[0], at(3, weight.__setitem__, 0, 0.0), optimizer=adamw)
