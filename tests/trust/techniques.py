"""What recipes of training do between two steps: adapters, averages, pruning, growing, schedules, several optimizers."""

from __future__ import annotations

import copy
import io
import types
from typing import Any

import torch
import torch.nn.functional as F
from tests.trust.case import STEPS, Made, Net, adamw, at, cases_of, momentum, mse, pairs, sgd, tokens, train
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm
from torch.optim import swa_utils

case, more = cases_of("techniques")


class Adapted(nn.Module):
    """A linear layer with low-rank adapters by name."""

    def __init__(self, base: nn.Linear, *names: str) -> None:
        super().__init__()
        self.base, self.merged, self.active, self.scaling = base, False, names[0], {n: 1.0 for n in names}
        out, width = base.weight.shape
        self.down = nn.ParameterDict({n: nn.Parameter(torch.randn(2, width) * 0.3) for n in names})
        self.up = nn.ParameterDict({n: nn.Parameter(torch.randn(out, 2) * 0.3) for n in names})

    def delta(self) -> torch.Tensor:
        return self.up[self.active] @ self.down[self.active] * self.scaling[self.active]

    def merge(self, sign: int = 1) -> None:
        with torch.no_grad():
            self.base.weight += sign * self.delta()
        self.merged = sign == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        return (
            out
            if self.merged
            else out + x @ self.down[self.active].T @ self.up[self.active].T * self.scaling[self.active]
        )


def adapted(*names: str) -> Net:
    model = Net()
    model.requires_grad_(False)
    model.b.bias.requires_grad_(True)
    model.a = Adapted(model.a, *names)
    return model


@case
def adapter_merged_and_taken_out_again() -> Made:
    model = adapted("one")

    def change(i: int) -> None:
        if i == 2:
            model.a.merge()
        if i == 4:
            model.a.merge(-1)

    return train(model=model, change=change, optimizer=adamw)


@more
def another_adapter_becomes_active() -> Made:
    model = adapted("one", "two")
    return train(model=model, change=at(3, setattr, model.a, "active", "two"), optimizer=momentum)


@more
def scaling_of_an_adapter() -> Made:
    model = adapted("one")
    return train(model=model, change=lambda i: model.a.scaling.update(one=0.5 * i), optimizer=adamw)


@more
def adapter_of_a_larger_rank() -> Made:
    model = adapted("one")
    optimizer = adamw(model.parameters())

    def change(i: int) -> None:
        if i == 3:
            old = [model.a.down["one"], model.a.up["one"]]
            model.a.down["one"] = nn.Parameter(torch.cat([old[0].data, torch.full((1, 6), 0.1)]))
            model.a.up["one"] = nn.Parameter(torch.cat([old[1].data, torch.zeros(16, 1)], 1))
            for p, new in zip(old, [model.a.down["one"], model.a.up["one"]]):
                optimizer.state.pop(p, None)
                params = optimizer.param_groups[0]["params"]
                params[next(k for k, q in enumerate(params) if q is p)] = new

    return train(model=model, change=change, optimizer=optimizer)


@case
def averaged_model_swapped_in_and_out() -> Made:
    """Evaluation with averaged weights: their data is exchanged, and back again."""
    model = Net()
    shadow = copy.deepcopy(model)
    scores: list[float] = []

    def swap() -> None:
        for p, q in zip(model.parameters(), shadow.parameters()):
            p.data, q.data = q.data, p.data

    def after(i: int) -> None:
        with torch.no_grad():
            for p, q in zip(model.parameters(), shadow.parameters()):
                q.lerp_(p, 0.1)
        swap()
        scores.append(float(model(torch.ones(1, 6)).sum().detach()))
        if i != 3:  # once it is forgotten to swap back
            swap()

    return train(model=model, after=after, state=lambda: [scores, shadow.state_dict()])


@more
def stochastic_weight_averaging() -> Made:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = sgd(model.parameters())
    average = swa_utils.AveragedModel(model, use_buffers=True)
    schedule = swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)

    def after(i: int) -> None:
        if i >= 2:
            average.update_parameters(model)
            schedule.step()

    return train(model=model, optimizer=optimizer, after=after, state=lambda: dict(average.state_dict()))


@more
def average_is_the_teacher() -> Made:
    model = Net()
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.8))

    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.no_grad():
            wanted = average(b[0])
        return mse(m, b) + F.mse_loss(m(b[0]), wanted)

    return train(loss, model=model, after=lambda i: average.update_parameters(model))


@more
def slow_weights_by_hand() -> Made:
    """Lookahead written in the loop, with the momentum reset."""
    model = Net()
    optimizer = momentum(model.parameters())
    slow = [p.detach().clone() for p in model.parameters()]

    def after(i: int) -> None:
        if i % 2:
            with torch.no_grad():
                for p, q in zip(model.parameters(), slow):
                    q += 0.5 * (p - q)
                    p.copy_(q)
            for state in optimizer.state.values():
                state["momentum_buffer"] = None

    return train(model=model, optimizer=optimizer, after=after, state=lambda: slow)


@more
def norm_of_weights_added_and_removed() -> Made:
    model = Net()
    optimizer = sgd(model.parameters())

    def change(i: int) -> None:
        if i == 2:
            weight_norm(model.a)
            optimizer.param_groups[0]["params"] = list(model.parameters())
        if i == 4:
            nn.utils.remove_weight_norm(model.a)
            optimizer.param_groups[0]["params"] = list(model.parameters())

    return train(model=model, change=change, optimizer=optimizer)


@more
def orthogonal_weights() -> Made:
    model = Net()
    return train(model=model, change=at(2, lambda: parametrizations.orthogonal(model.a)), optimizer=sgd)


@more
def parametrization_added_to_another() -> Made:
    class Scaled(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w * self.factor

    model = Net()
    parametrize.register_parametrization(model.a, "weight", Scaled(0.5))
    change = at(3, lambda: parametrize.register_parametrization(model.a, "weight", Scaled(3.0)))
    return train(model=model, change=change)


@more
def parametrization_cached_inside_the_loss() -> Made:
    model = Net()
    parametrizations.weight_norm(model.a)

    def loss(m: Any, b: Any) -> torch.Tensor:
        with parametrize.cached():
            return mse(m, b) + m.a.weight.abs().mean()

    return train(loss, model=model)


@more
def pruned_step_by_step_and_made_permanent() -> Made:
    model = Net()
    parts = [(model.a, "weight"), (model.b, "weight")]

    def change(i: int) -> None:
        if i in (1, 3):
            prune.global_unstructured(parts, pruning_method=prune.L1Unstructured, amount=0.3)
        if i == 5:
            for module, name in parts:
                prune.remove(module, name)

    return train(model=model, change=change)


@more
def pruned_by_masks_in_hooks() -> Made:
    model = Net()
    mask = {"a": torch.ones(16, 6)}
    model.a.weight.register_hook(lambda g: g * mask["a"])

    def change(i: int) -> None:
        if i == 2:
            mask["a"] = (model.a.weight.detach().abs() > 0.2).float()
        if i == 4:
            mask["a"].zero_()

    return train(model=model, change=change, optimizer=momentum)


@more
def weights_rewound() -> Made:
    """The lottery ticket: early weights again, with today's masks."""
    model = Net()
    early = copy.deepcopy(model.state_dict())

    def change(i: int) -> None:
        if i == 4:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(early[name] * (p.abs() > 0.1))

    return train(model=model, change=change, optimizer=adamw)


@more
def image_size_grows() -> Made:
    """Progressive resizing: the loader's attribute decides, in the loss."""
    loader = types.SimpleNamespace(size=4, dataset=types.SimpleNamespace(flip=False))
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    source = torch.Generator().manual_seed(1)
    batches = [(torch.randn(4, 3, 8, 8, generator=source), torch.randn(4, 3, generator=source)) for _ in range(STEPS)]

    def loss(m: Any, b: Any) -> torch.Tensor:
        x = F.interpolate(b[0], size=(loader.size, loader.size))
        return F.mse_loss(m(x.flip(-1) if loader.dataset.flip else x), b[1])

    def change(i: int) -> None:
        loader.size = 4 + 2 * (i // 2)
        loader.dataset.flip = i == 5

    return train(loss, change, model=model, batches=batches)


@more
def pooling_of_another_size() -> Made:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LazyLinear(3))
    batches = [(torch.randn(4, 3, 8, 8), torch.randn(4, 3)) for _ in range(STEPS)]
    model(batches[0][0])

    def change(i: int) -> None:
        model[0].padding = (1, 1) if i >= 2 else (0, 0)
        model[0].dilation = (2, 2) if i >= 4 else (1, 1)

    return train(model=model, batches=batches, change=change)


@more
def teacher_forcing_ratio_by_position() -> Made:
    """How many tokens are given, as a number of the trainer that falls."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.cell, self.head, self.ratio = nn.Embedding(11, 6), nn.GRUCell(6, 6), nn.Linear(6, 11), 1.0

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            h, out, token = torch.zeros(len(ids), 6), [], ids[:, 0]
            for t in range(1, ids.shape[1]):
                h = self.cell(self.table(token), h)
                out.append(self.head(h))
                token = ids[:, t] if t <= self.ratio * ids.shape[1] else out[-1].argmax(-1)
            return F.cross_entropy(torch.stack(out, 1).flatten(0, 1), ids[:, 1:].flatten())

    model = Model()
    change = lambda i: setattr(model, "ratio", 1.0 - 0.4 * (i // 2))  # noqa: E731
    return train(lambda m, b: m(b), change, model=model, batches=tokens())


@more
def layers_stacked_progressively() -> Made:
    """Depth doubles: copies of the trained layers, and a new optimizer state for them."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList([nn.Linear(6, 6)]), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + torch.tanh(block(x))
            return self.head(x)

    model = Model()
    optimizer = adamw(model.parameters())

    def change(i: int) -> None:
        if i in (2, 4):
            new = [copy.deepcopy(block) for block in model.blocks]
            model.blocks.extend(new)
            optimizer.add_param_group({"params": [p for block in new for p in block.parameters()]})

    return train(model=model, change=change, optimizer=optimizer)


@more
def wider_layer_by_repeated_columns() -> Made:
    model = Net()
    optimizer = sgd(model.parameters())

    def change(i: int) -> None:
        if i == 3:
            a, b = nn.Linear(6, 32), nn.Linear(32, 3)
            with torch.no_grad():
                a.weight.copy_(model.a.weight.repeat(2, 1))
                a.bias.copy_(model.a.bias.repeat(2))
                b.weight.copy_(model.b.weight.repeat(1, 2) / 2)
            model.a, model.b = a, b
            optimizer.param_groups[0]["params"] = list(model.parameters())

    return train(model=model, change=change, optimizer=optimizer)


@more
def modules_inserted_popped_and_reversed() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x[:, :3]

    model = Model()
    spare = nn.Linear(6, 6)

    def change(i: int) -> None:
        if i == 1:
            model.blocks.insert(1, spare)
        if i == 3:
            model.blocks.pop(0)
        if i == 4:
            model.blocks = nn.ModuleList(reversed(list(model.blocks)))

    return train(model=model, change=change)


@more
def part_of_a_sequential() -> Made:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    cut = {"depth": 4}
    loss = lambda m, b: F.mse_loss(m[: cut["depth"]](b[0])[:, :3], b[1])  # noqa: E731
    return train(loss, lambda i: cut.update(depth=5 if i >= 3 else 4), model=model)


@more
def submodule_swapped_for_a_pickled_copy() -> Made:
    """Saved and loaded in the middle of a run, as notebooks do; the optimizer gets the new parameters."""
    model = Net()
    optimizer = momentum(model.parameters())

    def change(i: int) -> None:
        if i == 3:
            file = io.BytesIO()
            torch.save(model.a, file)
            file.seek(0)
            for p in model.a.parameters():
                optimizer.state.pop(p)
            model.a = torch.load(file, weights_only=False)
            optimizer.param_groups[0]["params"] = list(model.parameters())

    return train(model=model, change=change, optimizer=optimizer)


@more
def states_loaded_into_model_and_optimizer_by_assignment() -> Made:
    model = Net()
    optimizer = adamw(model.parameters())
    kept: dict[str, Any] = {}

    def change(i: int) -> None:
        if i == 2:
            kept["model"], kept["optimizer"] = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        if i == 4:
            model.load_state_dict(kept["model"], assign=True)
            optimizer.param_groups[0]["params"] = list(model.parameters())
            optimizer.state.clear()
            optimizer.load_state_dict(kept["optimizer"])

    return train(model=model, change=change, optimizer=optimizer)


@more
def model_cast_to_bfloat16_later() -> Made:
    model, batches = Net(), pairs()

    def change(i: int) -> None:
        if i == 3:
            model.bfloat16()

    loss = lambda m, b: F.mse_loss(m(b[0].to(m.a.weight.dtype)).float(), b[1])  # noqa: E731
    return train(loss, change, model=model, batches=batches)


@more
def head_in_another_precision() -> Made:
    model = Net()
    loss = lambda m, b: F.mse_loss(m.b(torch.tanh(m.a(b[0])).to(m.b.weight.dtype)).float(), b[1])  # noqa: E731
    return train(loss, at(3, model.b.double), model=model)


@more
def buffers_registered_again_in_another_form() -> Made:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.mask

    model = Model()
    forms = {2: torch.ones(1), 3: torch.tensor([True, False, True]), 4: torch.full((8, 3), 2), 5: torch.tensor(0.5)}
    return train(model=model, change=lambda i: model.register_buffer("mask", forms[i]) if i in forms else None)


@more
def weights_dropped_by_a_wrapper() -> Made:
    """AWD-LSTM: the raw weight is a parameter of the wrapper; the layer's own is replaced at every call."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.keep = nn.Linear(6, 3), 1.0
            raw = self.layer.weight
            del self.layer._parameters["weight"]
            self.layer.register_parameter("weight_raw", nn.Parameter(raw.data))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.layer.weight = self.layer.weight_raw * self.keep
            return self.layer(x)

    model = Dropped()
    return train(model=model, change=at(3, setattr, model, "keep", 0.5))


@more
def recurrent_weights_replaced() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(x[:, None].repeat(1, 3, 1))[0][:, -1])

    model = Model()
    optimizer = sgd(model.parameters())

    def change(i: int) -> None:
        if i == 2:
            model.rnn.weight_hh_l0 = nn.Parameter(torch.eye(5).repeat(3, 1))
            optimizer.param_groups[0]["params"] = list(model.parameters())
        if i == 4:
            model.rnn.batch_first = False

    return train(model=model, change=change, optimizer=optimizer)


@more
def statistics_of_a_norm_switched_off() -> Made:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def change(i: int) -> None:
        if i == 2:
            model[1].reset_running_stats()
        if i == 3:
            model[1].track_running_stats = False
        if i == 4:
            model[1].running_mean = model[1].running_var = None

    return train(model=model, change=change)
