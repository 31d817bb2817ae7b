"""Modules, parameters and buffers added, removed, replaced, frozen, tied or loaded between two steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from tests.trust.case import Made, Net, adamw, at, cases_of, momentum, mse, sgd, train
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

case, more = cases_of("structure")


def with_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Stack(nn.Module):
    """A list of blocks, as most models have."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 0.5


@case
def layer_frozen() -> Made:
    model = Net()
    return train(model=model, change=at(3, model.a.requires_grad_, False))


@more
def layer_thawed() -> Made:
    model = Net()
    model.a.requires_grad_(False)
    return train(model=model, change=at(3, model.a.requires_grad_, True))


@case
def layer_thawed_with_adamw() -> Made:
    model = Net()
    model.b.bias.requires_grad_(False)
    return train(model=model, change=at(2, model.b.bias.requires_grad_, True), optimizer=adamw)


@more
def frozen_in_turns() -> Made:
    model = Net()

    def change(i: int) -> None:
        model.a.requires_grad_(i % 2 == 0)
        model.b.requires_grad_(i % 2 == 1)

    return train(model=model, change=change, optimizer=momentum)


@more
def gradual_unfreezing() -> Made:
    model = Stack(3)
    model.blocks.requires_grad_(False)

    def change(i: int) -> None:
        if i % 2 == 0 and i // 2 < 3:
            model.blocks[-1 - i // 2].requires_grad_(True)

    return train(model=model, change=change)


@case
def evaluation_mode() -> Made:
    model = with_norm()
    return train(model=model, change=lambda i: model.train(i not in (2, 3)))


@more
def one_module_in_evaluation_mode() -> Made:
    model = with_norm()
    return train(model=model, change=at(3, model[1].eval))


@case
def evaluated_between_steps() -> Made:
    model, scores = with_norm(), []

    def after(i: int) -> None:
        model.eval()
        with torch.no_grad():
            scores.append(float(model(torch.ones(2, 6)).sum()))
        model.train()

    return train(model=model, after=after, state=lambda: scores)


@more
def module_appended() -> Made:
    model = Stack()
    return train(model=model, change=at(3, lambda: model.blocks.append(nn.Linear(6, 6))))


@case
def module_appended_and_trained() -> Made:
    model = Stack()
    optimizer = momentum(model.parameters())

    def change(i: int) -> None:
        if i == 3:
            model.blocks.append(nn.Linear(6, 6))
            optimizer.add_param_group({"params": list(model.blocks[-1].parameters()), "lr": 0.01})

    return train(model=model, change=change, optimizer=optimizer)


@case
def module_removed() -> Made:
    model = Stack(3)
    return train(model=model, change=at(3, lambda: model.blocks.__delitem__(1)))


@more
def modules_in_another_order() -> Made:
    model = Stack(3)

    def change(i: int) -> None:
        if i == 3:
            model.blocks = nn.ModuleList(reversed(list(model.blocks)))

    return train(model=model, change=change)


@case
def activation_module_replaced() -> Made:
    model = with_norm()
    return train(model=model, change=at(3, model.__setitem__, 2, nn.Tanh()))


@more
def norm_replaced_by_identity() -> Made:
    model = with_norm()
    return train(model=model, change=at(3, model.__setitem__, 1, nn.Identity()))


@more
def module_inserted_in_a_sequential() -> Made:
    model = with_norm()
    return train(model=model, change=at(3, lambda: model.insert(3, nn.LayerNorm(8))))


@more
def head_of_another_size() -> Made:
    model = Net()
    optimizer = sgd(model.parameters())

    def change(i: int) -> None:
        if i == 3:
            model.b = nn.Linear(16, 5)
            optimizer.add_param_group({"params": list(model.b.parameters())})

    loss = lambda m, b: (m(b[0])[:, :3] - b[1]).square().mean() + m(b[0]).square().mean()  # noqa: E731
    return train(loss, change, model=model, optimizer=optimizer)


@case
def module_chosen_from_a_dictionary() -> Made:
    model = nn.ModuleDict({"one": nn.Linear(6, 3), "two": nn.Linear(6, 3)})
    task = ["one"]
    return train(lambda m, b: mse(m[task[0]], b), lambda i: task.__setitem__(0, ("one", "two")[i % 2]), model=model)


@more
def module_dictionary_gains_a_key() -> Made:
    model = nn.ModuleDict({"one": nn.Linear(6, 3)})
    return train(
        lambda m, b: sum(mse(part, b) for part in m.values()),
        at(3, lambda: model.update({"two": nn.Linear(6, 3)})),
        model=model,
    )


@more
def adapter_wraps_a_layer() -> Made:
    class Adapter(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner = inner.requires_grad_(False)
            self.down, self.up = (
                nn.Linear(inner.in_features, 2, bias=False),
                nn.Linear(2, inner.out_features, bias=False),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + self.up(self.down(x))

    model = Net()
    optimizer = sgd(model.parameters())

    def change(i: int) -> None:
        if i == 3:
            model.a = Adapter(model.a)
            optimizer.add_param_group({"params": [*model.a.down.parameters(), *model.a.up.parameters()]})

    return train(model=model, change=change, optimizer=optimizer)


@case
def weights_tied_later() -> Made:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    return train(model=model, change=at(3, setattr, model[2], "weight", model[0].weight))


@case
def weights_untied_later() -> Made:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    optimizer = sgd(model.parameters())

    def change(i: int) -> None:
        if i == 3:
            model[2].weight = nn.Parameter(model[0].weight.detach().clone())
            optimizer.add_param_group({"params": [model[2].weight]})

    return train(model=model, change=change, optimizer=optimizer)


@more
def weights_tied_from_the_start() -> Made:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    return train(model=model, optimizer=adamw)


@case
def parameter_replaced_and_forgotten_by_the_optimizer() -> Made:
    """The optimizer goes on with the old one: the new parameter is never trained, in eager either."""
    model = Net()
    return train(model=model, change=at(3, lambda: setattr(model.b, "bias", nn.Parameter(torch.ones(3)))))


@case
def parameter_replaced_in_the_optimizer_too() -> Made:
    model = Net()
    optimizer = momentum(model.parameters())

    def change(i: int) -> None:
        if i == 3:
            optimizer.state.pop(model.b.bias)
            model.b.bias = nn.Parameter(torch.ones(3))
            optimizer.param_groups[0]["params"][3] = model.b.bias

    return train(model=model, change=change, optimizer=optimizer)


@more
def parameter_becomes_none() -> Made:
    model = Net()
    return train(model=model, change=at(3, setattr, model.b, "bias", None))


@more
def parameter_registered_later() -> Made:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            return out * self.gain if "gain" in self._parameters else out

    model = Model()
    optimizer = sgd(model.parameters())

    def change(i: int) -> None:
        if i == 3:
            model.gain = nn.Parameter(torch.full((3,), 0.5))
            optimizer.add_param_group({"params": [model.gain]})

    return train(model=model, change=change, optimizer=optimizer)


@case
def data_assigned() -> Made:
    model = Net()
    return train(model=model, change=at(3, lambda: setattr(model.a.weight, "data", model.a.weight.data * 0.5)))


@more
def data_shared_with_another_parameter() -> Made:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    return train(model=model, change=at(3, lambda: setattr(model[2].weight, "data", model[0].weight.data)))


@more
def weights_clamped_between_steps() -> Made:
    model = Net()

    def after(i: int) -> None:
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)

    return train(model=model, after=after, optimizer=momentum)


@more
def weights_copied_in_place() -> Made:
    model = Net()

    @torch.no_grad()
    def halve() -> None:
        for p in model.parameters():
            p.copy_(p * 0.5)

    return train(model=model, change=at(3, halve), optimizer=adamw)


@more
def parameters_set_again() -> Made:
    model = Net()
    return train(model=model, change=at(3, lambda: [model.a.reset_parameters(), model.b.reset_parameters()]))


@case
def state_loaded() -> Made:
    model = with_norm()
    saved = copy.deepcopy(model.state_dict())
    return train(model=model, change=at(3, lambda: model.load_state_dict(saved)))


@more
def state_loaded_by_assignment() -> Made:
    model = with_norm()
    saved = copy.deepcopy(model.state_dict())
    optimizer = sgd(model.parameters())

    def change(i: int) -> None:
        if i == 3:
            model.load_state_dict(saved, assign=True)
            optimizer.param_groups[0]["params"] = list(model.parameters())

    return train(model=model, change=change, optimizer=optimizer)


@more
def vector_to_parameters() -> Made:
    model = Net()
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    return train(model=model, change=at(3, lambda: nn.utils.vector_to_parameters(start * 0.9, model.parameters())))


@more
def weights_moved_to_shared_memory() -> Made:
    model = Net()
    return train(model=model, change=at(3, model.share_memory))


@case
def model_cast_to_double_and_back() -> Made:
    model = Net()

    def change(i: int) -> None:
        model.to(torch.float64 if i in (2, 3) else torch.float32)

    return train(lambda m, b: F.mse_loss(m(b[0].to(m.a.weight.dtype)), b[1].to(m.a.weight.dtype)), change, model=model)


@more
def channels_last_later() -> Made:
    model = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(24, 3))
    return train(model=model, change=at(3, lambda: model.to(memory_format=torch.channels_last)))


@case
def buffer_replaced() -> Made:
    model = Net()
    model.register_buffer("scale", torch.ones(3))
    loss = lambda m, b: F.mse_loss(m(b[0]) * m.scale, b[1])  # noqa: E731
    return train(loss, at(3, setattr, model, "scale", torch.tensor([1.0, 0.1, 2.0])), model=model)


@more
def buffer_written_between_steps() -> Made:
    model = Net()
    model.register_buffer("scale", torch.ones(3), persistent=False)
    loss = lambda m, b: F.mse_loss(m(b[0]) * m.scale, b[1])  # noqa: E731
    return train(loss, lambda i: model.scale.fill_(1.0 / (i + 1)), model=model)


@case
def buffer_registered_later() -> Made:
    model = Net()
    loss = lambda m, b: F.mse_loss(m(b[0]) * (m.scale if hasattr(m, "scale") else 1.0), b[1])  # noqa: E731
    return train(loss, at(3, model.register_buffer, "scale", torch.tensor([1.0, 0.1, 2.0])), model=model)


@more
def buffer_becomes_a_tensor() -> Made:
    model = Net()
    model.register_buffer("mask", None)
    loss = lambda m, b: mse(m, b) if m.mask is None else ((m(b[0]) - b[1]) ** 2 * m.mask).mean()  # noqa: E731
    return train(loss, at(3, setattr, model, "mask", torch.tensor([1.0, 0.0, 1.0])), model=model)


@case
def parametrization_added_later() -> Made:
    model = Net()
    return train(model=model, change=at(3, parametrize.register_parametrization, model.a, "weight", Halved()))


@more
def parametrization_removed_later() -> Made:
    model = Net()
    parametrize.register_parametrization(model.a, "weight", Halved())
    optimizer = sgd(model.parameters())

    def change(i: int) -> None:
        if i == 3:
            parametrize.remove_parametrizations(model.a, "weight")
            optimizer.param_groups[0]["params"] = list(model.parameters())

    return train(model=model, change=change, optimizer=optimizer)


@more
def weight_norm() -> Made:
    model = Net()
    parametrizations.weight_norm(model.a)
    return train(model=model)


@more
def spectral_norm() -> Made:
    """Its power iteration writes buffers in every forward of the training mode."""
    model = Net()
    parametrizations.spectral_norm(model.a)
    return train(model=model)


@case
def pruned_later() -> Made:
    model = Net()
    optimizer = sgd(model.parameters())

    def change(i: int) -> None:
        if i == 3:
            prune.l1_unstructured(model.a, "weight", amount=0.5)

    return train(model=model, change=change, optimizer=optimizer)


@more
def parameter_list_used_in_part() -> Made:
    class Model(nn.Module):
        used = 1

        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(torch.randn(6, 3) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(x @ p for p in self.parts[: self.used])

    model = Model()
    return train(model=model, change=lambda i: setattr(model, "used", 1 + i // 2), optimizer=adamw)


@more
def parameter_the_loss_does_not_use() -> Made:
    model = Net()
    model.spare = nn.Linear(6, 3)
    return train(model=model, optimizer=adamw)


@case
def parameter_used_from_step_three() -> Made:
    model, options = Net(), {"spare": False}
    model.spare = nn.Linear(6, 3)
    loss = lambda m, b: mse(m, b) + (mse(m.spare, b) if options["spare"] else 0.0)  # noqa: E731
    return train(loss, at(3, options.update, spare=True), model=model, optimizer=adamw)


@more
def model_swapped_in_a_dictionary() -> Made:
    """The loss trains whichever module stands in its closure."""
    model = {"first": Net(), "second": Net()}
    current = {"model": model["first"]}
    return train(lambda m, b: mse(current["model"], b), at(3, current.update, model=model["second"]), model=model)


@more
def layers_skipped_by_a_number() -> Made:
    class Model(Stack):
        depth = 1

        def forward(self, x: torch.Tensor) -> Any:
            for block in list(self.blocks)[: self.depth]:
                x = x + torch.tanh(block(x))
            return self.head(x)

    model = Model(3)
    return train(model=model, change=lambda i: setattr(model, "depth", 1 + i // 2))
