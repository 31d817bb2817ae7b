"""Memory and graphs that are shared: by entries of a batch, by parameters and what the code keeps, with what ran before."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.trust.case import STEPS, Made, Net, adamw, at, cases_of, momentum, mse, pairs, sgd, train
from torch import nn

case, more = cases_of("aliases")


def whole_and_parts(shared: Any) -> list[Any]:
    """Batches of a tensor and a part of it, which share memory at the steps that `shared` tells."""
    found = []
    for i, (x, y) in enumerate(pairs()):
        part = x[:, :3]
        found.append((x, part if shared(i) else part.clone(), y))
    return found


def scaled_in_place(model: Any, batch: Any) -> torch.Tensor:
    x, part, y = batch
    x.mul_(2.0)
    return F.mse_loss(model(x) + part, y)


@case
def part_of_the_batch_shares_memory_later() -> Made:
    return train(scaled_in_place, batches=whole_and_parts(lambda i: i >= 3))


@more
def part_of_the_batch_shares_memory_at_first() -> Made:
    return train(scaled_in_place, batches=whole_and_parts(lambda i: i < 3))


@case
def same_tensor_twice_and_written() -> Made:
    batches = [(x, x if i % 2 else x.clone(), y) for i, (x, y) in enumerate(pairs())]

    def loss(model: Any, batch: Any) -> torch.Tensor:
        batch[0].add_(1.0)
        return F.mse_loss(model(batch[1]), batch[2])

    return train(loss, batches=batches, state=lambda: [b[1] for b in batches])


@more
def batch_holds_a_weight_of_the_model() -> Made:
    """A penalty on whatever the loop passes in: another weight at each step, a free tensor at last."""
    model, batches = Net(), pairs()
    places = [model.a.weight, model.a.weight, model.b.weight, model.b.weight, torch.ones(2, 2), torch.ones(2, 2)]
    batches = [(x, y, w) for (x, y), w in zip(batches, places)]
    return train(lambda m, b: mse(m, b) + b[2].square().mean(), model=model, batches=batches)


@more
def batch_holds_a_buffer_of_the_model() -> Made:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    batches = [(x, y, model[1].running_mean if i < 4 else torch.ones(4)) for i, (x, y) in enumerate(pairs())]
    return train(lambda m, b: mse(m, b) + (m[2].weight * b[2]).square().mean(), model=model, batches=batches)


@more
def features_computed_before_the_step() -> Made:
    """A graph from outside of the step: its parameters are trained through it."""
    model = nn.ModuleDict({"encoder": nn.Linear(6, 5), "head": nn.Linear(5, 3)})
    data = pairs()
    batches: list[Any] = [(torch.zeros(8, 5), y) for _, y in data]

    def change(i: int) -> None:
        batches[i] = (torch.tanh(model["encoder"](data[i][0])), data[i][1])

    change(0)
    return train(lambda m, b: F.mse_loss(m["head"](b[0]), b[1]), change, model=model, batches=batches)


@case
def features_computed_before_later_steps() -> Made:
    model = nn.ModuleDict({"encoder": nn.Linear(6, 5), "head": nn.Linear(5, 3)})
    data = pairs()
    batches: list[Any] = [(torch.ones(8, 5), y) for _, y in data]

    def change(i: int) -> None:
        if i >= 3:
            batches[i] = (torch.tanh(model["encoder"](data[i][0])), data[i][1])

    return train(lambda m, b: F.mse_loss(m["head"](b[0]), b[1]), change, model=model, batches=batches)


@more
def penalty_computed_before_the_step() -> Made:
    """A loss that closes over a tensor with a graph, made anew for every step."""
    model = Net()
    held: dict[str, torch.Tensor] = {}

    def change(i: int) -> None:
        held["penalty"] = model.a.weight.square().mean()

    change(0)
    return train(lambda m, b: mse(m, b) + held["penalty"], change, model=model)


@more
def weight_with_a_graph_on_the_model() -> Made:
    """A hyper-network outside of the step writes a plain attribute; its own parameters are in the optimizer."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker, self.head = nn.Linear(2, 6), nn.Linear(6, 3)
            self.gain: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x * self.gain)

    model = Model()

    def change(i: int) -> None:
        model.gain = model.maker(torch.ones(2))

    change(0)
    return train(change=change, model=model)


class Anchored(Net):
    """Keeps a view of a weight, or a copy, at its first call."""

    def __init__(self, keep: Any) -> None:
        super().__init__()
        self.keep, self.anchor = keep, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.anchor is None:
            self.anchor = self.keep(self.a.weight)
        return super().forward(x) + 0.1 * self.anchor.sum()


@case
def view_of_a_weight_kept_at_the_first_call() -> Made:
    model = Anchored(lambda w: w.detach())
    return train(model=model, state=lambda: model.anchor)


@more
def part_of_a_weight_kept_at_the_first_call() -> Made:
    model = Anchored(lambda w: w.data[:2])
    return train(model=model, state=lambda: model.anchor)


@more
def copy_of_a_weight_kept_at_the_first_call() -> Made:
    model = Anchored(lambda w: w.detach().clone())
    return train(model=model, state=lambda: model.anchor)


@case
def spectral_norm_keeps_what_it_writes_by_out() -> Made:
    """`self._u = F.normalize(..., out=self._u)`: the buffer itself, after the write."""
    model = Net()
    nn.utils.parametrizations.spectral_norm(model.a)
    return train(model=model, state=lambda: [b for _, b in model.named_buffers()])


@case
def weights_of_every_step_kept_as_views() -> Made:
    """A history of `detach()`, all of which show the newest weights, as people find out."""
    kept: list[torch.Tensor] = []

    def loss(model: Any, batch: Any) -> torch.Tensor:
        kept.append(model.b.bias.detach())
        return mse(model, batch)

    return train(loss, state=lambda: kept)


@case
def weights_returned_as_aux() -> Made:
    return train(lambda m, b: (mse(m, b), {"bias": m.b.bias.detach(), "part": m.a.weight.detach()[0]}))


@more
def weights_and_statistics_in_aux() -> Made:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    return train(lambda m, b: (mse(m, b), {"mean": m[1].running_mean, "weight": m[0].weight}), model=model)


@more
def batch_returned_as_aux() -> Made:
    return train(lambda m, b: (mse(m, b), {"x": b[0], "part": b[0][:, 0]}))


@more
def batch_kept_on_the_model() -> Made:
    """The last input is kept, and the loop writes into the batch afterwards."""

    class Model(Net):
        last: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = 0.0 if self.last is None else self.last.mean()
            self.last = x
            return super().forward(x) + before

    model, batches = Model(), pairs()
    return train(model=model, batches=batches, after=lambda i: batches[i][0].add_(1.0), state=lambda: model.last)


@more
def part_of_the_batch_kept_on_the_model() -> Made:
    class Model(Net):
        last: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = 0.0 if self.last is None else self.last.mean()
            self.last = x[:2].detach()
            return super().forward(x) + before

    model, batches = Model(), pairs()
    return train(model=model, batches=batches, after=lambda i: batches[i][0].add_(1.0), state=lambda: model.last)


@more
def two_views_of_one_result_kept() -> Made:
    """One is written between two steps, and the other is read."""
    held: dict[str, torch.Tensor] = {}

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        before = held["part"].mean() if held else 0.0
        held["all"] = out.detach()
        held["part"] = held["all"][:, 0]
        return F.mse_loss(out, batch[1]) + (out * before).mean()

    return train(loss, after=lambda i: held["all"].mul_(0.5), state=lambda: held)


@more
def buffer_view_kept() -> Made:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(6.0))
            self.row: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.row = self.table[1:4]
            return super().forward(x) * self.row.mean()

    model = Model()
    return train(model=model, change=lambda i: model.table.mul_(0.9), state=lambda: model.row)


@case
def weight_normalised_by_data_in_the_forward() -> Made:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.b.weight.data = F.normalize(self.b.weight.data, dim=1)
            return super().forward(x)

    return train(model=Model())


@more
def weight_written_by_data_before_its_use() -> Made:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.b.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    return train(model=Model(), optimizer=momentum)


@more
def weight_written_by_data_after_its_use() -> Made:
    """Autograd does not notice: the backward of the layer sees the new weight."""

    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            self.b.weight.data.mul_(0.9)
            return out

    return train(model=Model())


@more
def activation_written_by_data_after_its_use() -> Made:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.a(x))
            out = self.b(hidden)
            hidden.data.mul_(0.5)
            return out

    return train(model=Model())


@more
def activation_written_through_detach_before_its_use() -> Made:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.a(x)
            hidden.detach().clamp_(-0.5, 0.5)
            return self.b(hidden * hidden)

    return train(model=Model())


@more
def embedding_with_a_largest_norm() -> Made:
    """The forward writes the rows that it looks up."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(7, 6, max_norm=0.5), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(x).mean(1))

    source = torch.Generator().manual_seed(3)
    batches = [(torch.randint(0, 7, (4, 3), generator=source), torch.randn(4, 3)) for _ in range(STEPS)]
    return train(model=Model(), batches=batches)


@more
def embedding_whose_largest_norm_changes() -> Made:
    model = nn.Sequential(nn.Embedding(7, 6, max_norm=5.0), nn.Flatten(), nn.Linear(18, 3))
    source = torch.Generator().manual_seed(3)
    batches = [(torch.randint(0, 7, (4, 3), generator=source), torch.randn(4, 3)) for _ in range(STEPS)]
    return train(model=model, batches=batches, change=at(3, setattr, model[0], "max_norm", 0.3))


@case
def negated_and_conjugated_views() -> Made:
    """A tensor that carries its sign as a bit, then one that does not."""
    batches = []
    for i, (x, y) in enumerate(pairs()):
        imaginary = torch.complex(x, x).conj().imag
        batches.append((imaginary if i % 2 else imaginary.resolve_neg(), y))
    return train(batches=batches)


@more
def conjugated_batch() -> Made:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(torch.view_as_real(batch[0].resolve_conj() * (1 + 1j))[..., 1]), batch[1])

    batches = []
    for i, (x, y) in enumerate(pairs()):
        z = torch.complex(x, 2 * x)
        batches.append((z.conj() if i >= 3 else z, y))
    return train(loss, batches=batches)


@more
def tensor_made_in_inference_mode() -> Made:
    batches = []
    for i, (x, y) in enumerate(pairs()):
        with torch.inference_mode(i >= 2):
            batches.append((x * 2.0, y))
    return train(lambda m, b: F.mse_loss(m(b[0] + 0.0), b[1]), batches=batches)


@more
def gradient_set_by_hand_before_the_step() -> Made:
    """`zero_grad` comes first in the loop: it counts for nothing."""
    model = Net()

    def change(i: int) -> None:
        for p in model.parameters():
            p.grad = torch.full_like(p, 100.0)

    return train(model=model, change=change, optimizer=adamw)


@more
def gradient_of_a_parameter_not_in_the_optimizer() -> Made:
    model = Net()
    return train(model=model, optimizer=sgd(model.b.parameters()), change=lambda i: None)


@more
def expanded_and_written() -> Made:
    """A batch of one row, shown eight times, that the loss replaces."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        x = batch[0] * 1.0
        x[0] += 1.0
        return F.mse_loss(model(x), batch[1])

    batches = [(x[:1].expand(8, 6) if i >= 2 else x, y) for i, (x, y) in enumerate(pairs())]
    return train(loss, batches=batches)


@case
def storage_swapped_under_a_tensor() -> Made:
    """`set_` gives a weight other memory without a new tensor."""
    model = Net()

    def change(i: int) -> None:
        if i in (2, 4):
            with torch.no_grad():
                model.a.weight.set_(torch.full_like(model.a.weight, 0.1 * i))

    return train(model=model, change=change, optimizer=momentum)


@more
def weights_in_one_flat_tensor() -> Made:
    """All parameters become views of one tensor, as flat optimizers do; the flat one is then averaged in place."""
    model = Net()

    def change(i: int) -> None:
        if i == 2:
            flat = torch.cat([p.data.reshape(-1) for p in model.parameters()])
            model.flat = flat
            start = 0
            for p in model.parameters():
                p.data = flat[start : start + p.numel()].view_as(p)
                start += p.numel()
        if i == 4:
            model.flat.mul_(0.5)

    return train(model=model, change=change)


@case
def weights_added_to_by_the_loss() -> Made:
    """`layer.bias += ...`: Python stores the parameter where it was."""

    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.no_grad():
            m.b.bias += 0.1
        return mse(m, b)

    model = Net()
    return train(loss, model=model, state=lambda: isinstance(model.b.bias, nn.Parameter))
