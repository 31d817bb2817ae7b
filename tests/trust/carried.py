"""Tensors and plans carried from step to step by the code itself: hidden states, running means, queues, caches."""

from __future__ import annotations

import collections
from typing import Any

import torch
import torch.nn.functional as F
from tests.trust.case import (
    Made,
    Net,
    adamw,
    cases_of,
    cross_entropy,
    momentum,
    mse,
    sgd,
    tokens,
    train,
)
from torch import nn

case, more = cases_of("carried state")


class LanguageModel(nn.Module):
    """Embedding, recurrent layer, output; hidden states go in and come out."""

    def __init__(self, cell: type[nn.RNNBase] = nn.RNN) -> None:
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(11, 8), cell(8, 8, batch_first=True), nn.Linear(8, 11)

    def forward(self, x: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, Any]:
        out, hidden = self.rnn(self.embed(x), hidden)
        return self.out(out), hidden


def next_token_loss(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, 11), batch[:, 1:].reshape(-1))


# ---- hidden states and other tensors carried from step to step ----


@case
def hidden_state_in_a_dictionary() -> Made:
    carried: dict[str, Any] = {"hidden": torch.zeros(1, 4, 8)}

    def loss(m: Any, b: Any) -> torch.Tensor:
        logits, hidden = m(b[:, :-1], carried["hidden"].detach())
        carried["hidden"] = hidden
        return next_token_loss(logits, b)

    return train(loss, model=LanguageModel(), batches=tokens(), state=lambda: dict(carried))


@more
def hidden_states_of_an_lstm() -> Made:
    hidden = (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))

    def loss(m: Any, b: Any) -> torch.Tensor:
        nonlocal hidden
        logits, hidden = m(b[:, :-1], hidden)
        hidden = tuple(h.detach() for h in hidden)
        return next_token_loss(logits, b)

    return train(loss, model=LanguageModel(nn.LSTM), batches=tokens(), state=lambda: hidden)


@more
def hidden_state_on_the_model() -> Made:
    class Model(LanguageModel):
        hidden: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits, hidden = super().forward(x, self.hidden)
            self.hidden = hidden.detach()
            return logits

    model = Model(nn.GRU)
    loss = lambda m, b: next_token_loss(m(b[:, :-1]), b)  # noqa: E731
    return train(loss, model=model, batches=tokens(), state=lambda: model.hidden)


@more
def hidden_state_reset_between_epochs() -> Made:
    carried: dict[str, Any] = {"hidden": None}

    def loss(m: Any, b: Any) -> torch.Tensor:
        logits, hidden = m(b[:, :-1], carried["hidden"])
        carried["hidden"] = hidden.detach()
        return next_token_loss(logits, b)

    change = lambda i: carried.update(hidden=None) if i % 3 == 0 else None  # noqa: E731
    return train(loss, change, model=LanguageModel(), batches=tokens(), state=lambda: dict(carried))


@more
def average_of_losses_in_the_closure() -> Made:
    average = torch.zeros(())

    def loss(m: Any, b: Any) -> torch.Tensor:
        nonlocal average
        found = mse(m, b)
        average = 0.9 * average + 0.1 * found.detach()
        return found / (1.0 + average)

    return train(loss, state=lambda: average)


@case
def running_mean_attribute_replaced() -> Made:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.zeros(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.a(x))
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
            return self.b(h - self.mean)

    model = Model()
    return train(model=model, state=lambda: model.mean)


@case
def running_mean_buffer_in_place() -> Made:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.a(x))
            with torch.no_grad():
                self.mean.lerp_(h.mean(0), 0.1)
            return self.b(h - self.mean)

    return train(model=Model())


@more
def buffer_reassigned_in_the_forward() -> Made:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            self.center = self.center * 0.9 + out.detach().mean(0) * 0.1
            return out - self.center

    return train(model=Model())


@more
def batch_norm_statistics() -> Made:
    return train(model=nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), optimizer=momentum)


@more
def batch_norm_with_cumulative_average() -> Made:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3))
    return train(model=model)


@case
def attribute_from_none_to_tensor() -> Made:
    model = Net()
    model.previous = None

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = m(b[0])
        drift = 0.0 if m.previous is None else F.mse_loss(out, m.previous)
        m.previous = out.detach()
        return F.mse_loss(out, b[1]) + 0.1 * drift

    return train(loss, model=model, state=lambda: model.previous)


@case
def queue_with_a_tensor_pointer() -> Made:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.randn(24, 3))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = m(b[0])
        found = F.mse_loss(out, b[1]) + (out @ m.queue.clone().T).logsumexp(1).mean()
        place = int(m.place)
        m.queue[place : place + 8] = out.detach()
        m.place[0] = (place + 8) % 24
        return found

    return train(loss, model=Model())


@more
def queue_with_a_python_pointer() -> Made:
    class Model(Net):
        place = 0

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.randn(24, 3))

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = m(b[0])
        found = F.mse_loss(out, b[1]) + (out @ m.queue.clone().T).logsumexp(1).mean()
        m.queue[m.place : m.place + 8] = out.detach()
        m.place = (m.place + 8) % 24
        return found

    model = Model()
    return train(loss, model=model, state=lambda: model.place)


@more
def replay_list() -> Made:
    memory: list[Any] = []

    def loss(m: Any, b: Any) -> torch.Tensor:
        found = mse(m, b) + sum(0.1 * mse(m, old) for old in memory[-2:])
        memory.append(b)
        return found

    return train(loss, state=lambda: memory)


@case
def replay_deque() -> Made:
    memory: collections.deque[torch.Tensor] = collections.deque(maxlen=3)

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = m(b[0])
        memory.append(out.detach().mean(0))
        return F.mse_loss(out, b[1]) + 0.1 * (out - torch.stack(list(memory)).mean(0)).square().mean()

    return train(loss, state=lambda: list(memory))


@case
def hidden_tensors_collected() -> Made:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.collected: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.a(x))
            self.collected.append(h)
            return self.b(h)

    def loss(m: Any, b: Any) -> torch.Tensor:
        m.collected.clear()
        return mse(m, b) + 0.01 * sum(h.abs().mean() for h in m.collected)

    model = Model()
    return train(loss, model=model, state=lambda: model.collected)


@more
def last_output_on_the_model() -> Made:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = super().forward(x)
            return self.last

    model = Model()
    return train(model=model, state=lambda: getattr(model, "last", None))


@more
def auxiliary_loss_left_on_a_layer() -> Made:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.penalty = nn.Linear(6, 6), 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = self.layer(x).softmax(-1)
            self.penalty = gate.mean(0).square().sum()
            return x * gate

    model = nn.Sequential(Gate(), Gate(), nn.Linear(6, 3))
    return train(lambda m, b: mse(m, b) + 0.1 * (m[0].penalty + m[1].penalty), model=model)


@case
def outputs_as_aux() -> Made:
    def loss(m: Any, b: Any) -> Any:
        out = m(b[0])
        return F.mse_loss(out, b[1]), {"out": out, "largest": out.max(), "rows": torch.tensor(len(b[0]))}

    return train(loss)


# ---- caches ----


@case
def mask_made_at_the_first_call() -> Made:
    class Model(Net):
        mask: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.mask is None or self.mask.shape[0] != x.shape[0]:
                self.mask = torch.linspace(0.5, 1.5, x.shape[0])[:, None]
            return super().forward(x) * self.mask

    model = Model()
    return train(model=model, state=lambda: model.mask)


@case
def cache_by_size() -> Made:
    cache: dict[int, torch.Tensor] = {}

    def positions(n: int) -> torch.Tensor:
        if n not in cache:
            cache[n] = torch.arange(n, dtype=torch.float32)[:, None] / n
        return cache[n]

    return train(lambda m, b: mse(m, (b[0] + positions(len(b[0])), b[1])), state=lambda: dict(cache))


@more
def set_of_sizes_seen() -> Made:
    sizes: set[int] = set()

    def loss(m: Any, b: Any) -> torch.Tensor:
        sizes.add(len(b[0]))
        return mse(m, b)

    return train(loss, state=lambda: sorted(sizes))


@more
def layer_made_at_the_first_call() -> Made:
    """Not trained: the optimizer was made before it."""

    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "extra"):
                self.extra = nn.Linear(3, 3)
                nn.init.eye_(self.extra.weight)
                nn.init.zeros_(self.extra.bias)
            return self.extra(super().forward(x))

    return train(model=Model())


@case
def attribute_set_at_the_first_call() -> Made:
    model = Net()
    model.problem = None

    def loss(m: Any, b: Any) -> torch.Tensor:
        if m.problem is None:
            m.problem = "regression" if b[1].is_floating_point() else "classes"
        return mse(m, b) if m.problem == "regression" else cross_entropy(m, b)

    return train(loss, model=model, state=lambda: model.problem)


# ---- plans used up, containers edited ----


@case
def schedule_popped() -> Made:
    schedule = [1.0, 1.0, 0.5, 0.5, 0.1, 0.1]
    return train(lambda m, b: mse(m, b) * schedule.pop(0), state=lambda: schedule)


@more
def dictionary_edited_in_many_ways() -> Made:
    book: dict[str, Any] = {"old": 1}

    def loss(m: Any, b: Any) -> torch.Tensor:
        book.setdefault("first", len(b[0]))
        book["steps"] = book.get("steps", 0) + 1
        book.pop("old", None)
        return mse(m, b)

    return train(loss, state=lambda: dict(book))


@more
def list_rotated() -> Made:
    tasks = ["square", "absolute", "huber"]

    def loss(m: Any, b: Any) -> torch.Tensor:
        tasks.append(tasks.pop(0))
        error = m(b[0]) - b[1]
        if tasks[0] == "square":
            return error.square().mean()
        return error.abs().mean() if tasks[0] == "absolute" else F.huber_loss(m(b[0]), b[1])

    return train(loss, state=lambda: tasks)


# ---- weights that the forward itself moves ----


@more
def codebook_moved_in_the_forward() -> Made:
    class Quantised(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(5, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.a(x))
            nearest = torch.cdist(h, self.codes).argmin(1)
            q = self.codes[nearest]
            with torch.no_grad():
                chosen = F.one_hot(nearest, 5).float()
                self.codes.mul_(0.9).add_(0.1 * (chosen.T @ h) / (chosen.sum(0)[:, None] + 1.0))
            return self.b(h + (q - h).detach())

    return train(model=Quantised())


@case
def momentum_encoder_moved_in_the_loss() -> Made:
    online, target = Net(), Net().requires_grad_(False)

    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.no_grad():
            for mine, its in zip(m["target"].parameters(), m["online"].parameters()):
                mine.mul_(0.9).add_(its, alpha=0.1)
            wanted = m["target"](b[0])
        return F.mse_loss(m["online"](b[0]), wanted + b[1])

    model = {"online": online, "target": target}
    return train(loss, model=model, optimizer=sgd(online.parameters()))


@case
def temperature_clamped_in_the_loss() -> Made:
    model = Net()
    model.temperature = nn.Parameter(torch.tensor(0.1))

    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.no_grad():
            m.temperature.clamp_(0.05, 0.2)
        return F.mse_loss(m(b[0]) * m.temperature.exp(), b[1])

    return train(loss, model=model, optimizer=adamw)
