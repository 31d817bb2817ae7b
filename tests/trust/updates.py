"""What loops do to gradients, optimizers and their state between two steps; marks on parameters; steps that share modules."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
import torch.nn.functional as F
from tests.trust.case import Made, Net, adamw, at, cases_of, labelled, momentum, mse, pairs, sgd, train
from torch import nn

case, more = cases_of("updates")


@more
def gradients_reversed_by_a_schedule() -> Made:
    """A Function whose backward reads the module that called it."""

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, owner: Any) -> torch.Tensor:
            ctx.owner = owner
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return -ctx.owner.strength * grad, None

    owner = types.SimpleNamespace(strength=0.0)
    loss = lambda m, b: F.mse_loss(m.b(Reverse.apply(torch.tanh(m.a(b[0])), owner)), b[1])  # noqa: E731
    return train(loss, lambda i: setattr(owner, "strength", 0.2 * i))


@more
def node_hook_on_the_gradient_accumulator() -> Made:
    """What data-parallel wrappers of old do: a hook where autograd adds up a parameter's gradient."""
    model = Net()
    nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
    by_node = dict(zip(nodes, model.parameters()))

    def halve(node: Any) -> Any:
        def hook(*_: Any) -> None:
            by_node[node].grad.mul_(0.5)

        return hook

    for node in nodes:
        node.register_hook(halve(node))
    return train(model=model, state=lambda: len(nodes))


@case
def hook_on_the_gradient_accumulator_from_the_start() -> Made:
    model = Net()
    nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
    for node in nodes:
        node.register_prehook(lambda grads: tuple(g * 0.5 for g in grads))
    return train(model=model, state=lambda: len(nodes))


@more
def generator_and_critic_share_a_trunk() -> Made:
    """Two steps on modules that share weights, each with an optimizer of its own; flags are switched around each."""
    trunk, one, two = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)
    first, second = nn.Sequential(trunk, nn.Tanh(), one), nn.Sequential(trunk, nn.Tanh(), two)
    partner = Made(second, mse, momentum(second.parameters()), [])

    def change(i: int) -> None:
        trunk.requires_grad_(i % 3 != 2)

    return train(model=first, change=change, optimizer=adamw(first.parameters()), partner=partner)


@more
def parameters_handed_from_one_optimizer_to_another() -> Made:
    """Each optimizer holds the parameters in turns; the loop switches by its groups."""
    model = Net()
    optimizer = torch.optim.AdamW(
        [{"params": [*model.a.parameters()]}, {"params": [*model.b.parameters()], "lr": 0.05}]
    )

    def change(i: int) -> None:
        if i == 3:
            optimizer.param_groups.reverse()
        if i == 4:
            for group in optimizer.param_groups:
                group["params"].reverse()

    return train(model=model, change=change, optimizer=optimizer)


@case
def betas_and_flags_flip() -> Made:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    flips = {
        1: {"foreach": True},
        2: {"maximize": True},
        3: {"amsgrad": True},
        4: {"fused": True, "foreach": False, "amsgrad": False},
    }

    def change(i: int) -> None:
        optimizer.param_groups[0].update(flips.get(i, {}))
        if i == 3:
            for state in optimizer.state.values():
                state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])

    return train(model=model, change=change, optimizer=optimizer)


@more
def step_counts_set_by_hand() -> Made:
    model = Net()
    optimizer = adamw(model.parameters())

    def change(i: int) -> None:
        if i == 2:
            for state in optimizer.state.values():
                state["step"].fill_(100.0)
        if i == 4:
            for state in optimizer.state.values():
                state["step"] = torch.tensor(1.0)

    return train(model=model, change=change, optimizer=optimizer)


@case
def step_count_of_one_parameter_set() -> Made:
    model = Net()
    optimizer = adamw(model.parameters())
    change = at(3, lambda: optimizer.state[model.b.bias]["step"].fill_(0.0))
    return train(model=model, change=change, optimizer=optimizer)


@more
def moments_shared_and_in_another_precision() -> Made:
    model = Net()
    optimizer = momentum(model.parameters())

    def change(i: int) -> None:
        if i == 3:
            for state in optimizer.state.values():
                state["momentum_buffer"] = state["momentum_buffer"].double()

    return train(
        model=model.double(), change=change, optimizer=optimizer, batches=[(x.double(), y.double()) for x, y in pairs()]
    )


@more
def every_schedule_of_torch() -> Made:
    model = Net()
    optimizer = momentum(model.parameters())
    made = torch.optim.lr_scheduler
    schedules = [
        made.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2), made.ExponentialLR(optimizer, 0.9),
        made.CosineAnnealingWarmRestarts(optimizer, 2), made.PolynomialLR(optimizer, 4),
    ]  # fmt: skip

    def after(i: int) -> None:
        schedules[i % 4].step()

    return train(model=model, optimizer=optimizer, after=after)


@more
def rates_by_layer_with_tensors() -> Made:
    model = Net()
    rates = [torch.tensor(0.1), torch.tensor(0.01)]
    groups = [{"params": [*m.parameters()], "lr": r} for m, r in zip((model.a, model.b), rates)]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    return train(model=model, optimizer=optimizer, change=lambda i: rates[i % 2].mul_(0.5))


@more
def attribute_of_a_parameter_read() -> Made:
    """`p.penalty`, as optimizers and regularisers mark parameters."""
    model = Net()
    for p in model.parameters():
        p.penalty = 0.1

    def loss(m: Any, b: Any) -> torch.Tensor:
        return mse(m, b) + sum(p.square().sum() * p.penalty for p in m.parameters())

    return train(loss, at(3, lambda: setattr(model.a.weight, "penalty", 1.0)), model=model)


@case
def attribute_of_a_parameter_appears() -> Made:
    model = Net()

    def loss(m: Any, b: Any) -> torch.Tensor:
        return mse(m, b) + sum(p.square().sum() for p in m.parameters() if getattr(p, "decayed", False))

    return train(loss, at(3, lambda: setattr(model.a.weight, "decayed", True)), model=model)


@more
def attribute_of_a_batch_tensor_read() -> Made:
    batches = pairs()
    for i, (x, _) in enumerate(batches):
        x.importance = 1.0 if i < 3 else 0.1
    return train(lambda m, b: mse(m, b) * b[0].importance, batches=batches)


@more
def dropout_replaced_by_a_noise_free_one() -> Made:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 3))

    def change(i: int) -> None:
        model[1].p = 1.0 if i in (2, 3) else 0.0
        model[1].inplace = i >= 4

    return train(model=model, change=change)


@more
def criterion_with_other_arguments() -> Made:
    """functools.partial made anew by the trainer when its settings change."""
    trainer = types.SimpleNamespace(criterion=functools.partial(F.cross_entropy, label_smoothing=0.0))
    loss = lambda m, b: trainer.criterion(m(b[0]), b[1])  # noqa: E731
    change = at(3, lambda: setattr(trainer, "criterion", functools.partial(trainer.criterion, label_smoothing=0.3)))
    return train(loss, change, batches=labelled())


@case
def masks_that_become_full_or_empty() -> Made:
    """`if mask.any()`: some steps have nothing masked, some everything."""
    counts = [4, 0, 8, 1, 0, 8]
    batches = [(x, y, torch.arange(8) < n) for (x, y), n in zip(pairs(), counts)]

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = m(b[0])
        if b[2].any():
            return F.mse_loss(out[b[2]], b[1][b[2]])
        return out.square().mean() * 0.1

    return train(loss, batches=batches)


@more
def loss_of_an_untouched_parameter_is_zero() -> Made:
    """DDP's trick: 0 * sum of unused parameters, so that all have gradients."""
    model = nn.ModuleDict({"one": nn.Linear(6, 3), "two": nn.Linear(6, 3)})
    picked = {"name": "one"}

    def loss(m: Any, b: Any) -> torch.Tensor:
        return F.mse_loss(m[picked["name"]](b[0]), b[1]) + 0.0 * sum(p.sum() for p in m.parameters())

    change = lambda i: picked.update(name="two" if i % 2 else "one")  # noqa: E731
    return train(loss, change, model=model, optimizer=adamw)


@more
def parameter_unused_at_some_steps() -> Made:
    """Without the trick: no gradient, no decay, no momentum at those steps."""
    model = nn.ModuleDict({"one": nn.Linear(6, 3), "two": nn.Linear(6, 3)})
    picked = {"name": "one"}
    loss = lambda m, b: F.mse_loss(m[picked["name"]](b[0]), b[1])  # noqa: E731
    change = lambda i: picked.update(name="two" if i % 2 else "one")  # noqa: E731
    return train(loss, change, model=model, optimizer=adamw)


@more
def several_backward_passes_for_one_step() -> Made:
    """Two losses on one graph, as the sum that a step wants; the weight of the second changes."""
    weights = torch.ones(2)

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = m(b[0])
        first, second = F.mse_loss(out, b[1]), out.abs().mean()
        grads = torch.autograd.grad(first, m.b.weight, retain_graph=True)[0].norm()
        return first * weights[0] + second * weights[1] / (grads.detach() + 1.0)

    return train(loss, lambda i: weights[1].fill_(0.3 * i))


@case
def rate_set_by_the_loss() -> Made:
    """A warm-up that stands in the training function: the update of this very step takes the new rate."""
    model = Net()
    optimizer = momentum(model.parameters())

    def loss(m: Any, b: Any) -> torch.Tensor:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        return mse(m, b)

    return train(loss, model=model, optimizer=optimizer, state=lambda: optimizer.param_groups[0]["lr"])


@more
def gradient_given_by_the_loss() -> Made:
    """What the backward then adds to."""

    def loss(m: Any, b: Any) -> torch.Tensor:
        m.a.weight.grad = torch.full_like(m.a.weight, 0.1)
        return mse(m, b)

    return train(loss)


@more
def attribute_of_the_optimizer_written() -> Made:
    model = Net()
    optimizer = sgd(model.parameters())
    optimizer.gain = 1.0

    def loss(m: Any, b: Any) -> torch.Tensor:
        optimizer.gain = optimizer.gain * 0.5
        return mse(m, b) * optimizer.gain

    return train(loss, model=model, optimizer=optimizer, state=lambda: optimizer.gain)
