"""What the loss and the forward write: counters, logs, metrics, caches, hidden states carried from step to step."""

from __future__ import annotations

import collections
import contextlib
import io
import logging
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.trust.case import (
    STEPS,
    Made,
    Net,
    adamw,
    cases_of,
    cross_entropy,
    labelled,
    momentum,
    mse,
    sgd,
    tokens,
    train,
)
from torch import nn

case = cases_of("left behind")

SEEN = 0


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


# ---- counters ----


@case
def counter_in_the_closure() -> Made:
    count = 0

    def loss(m: Any, b: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        return mse(m, b)

    return train(loss, state=lambda: count)


@case
def warm_up_by_a_closure_counter() -> Made:
    count = 0

    def loss(m: Any, b: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        return mse(m, b) * min(1.0, count / 4)

    return train(loss, state=lambda: count)


@case
def counter_of_the_module_level() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        global SEEN
        SEEN += len(b[0])
        return mse(m, b) * (1.0 if SEEN < 30 else 0.1)

    return train(loss, state=lambda: SEEN, cleanup=lambda: globals().update(SEEN=0))


@case
def counter_of_a_class() -> Made:
    class Model(Net):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Model.calls += 1
            return super().forward(x)

    return train(model=Model(), state=lambda: Model.calls)


@case
def counter_on_a_function() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        loss.calls += 1
        return mse(m, b) / loss.calls

    loss.calls = 0
    return train(loss, state=lambda: loss.calls)


@case
def counters_by_name() -> Made:
    counts: collections.defaultdict[str, int] = collections.defaultdict(int)

    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            counts[f"{self.in_features}x{self.out_features}"] += 1
            return super().forward(x)

    model = nn.Sequential(Counted(6, 8), nn.Tanh(), Counted(8, 8), nn.Tanh(), Counted(8, 3))
    return train(model=model, state=lambda: dict(counts))


@case
def tensor_counter() -> Made:
    count = torch.zeros((), dtype=torch.long)

    def loss(m: Any, b: Any) -> torch.Tensor:
        count.add_(1)
        return mse(m, b) / count

    return train(loss, state=lambda: count)


@case
def context_manager_counts() -> Made:
    depth = {"entered": 0, "left": 0}

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        depth["entered"] += 1
        try:
            yield
        finally:
            depth["left"] += 1

    def loss(m: Any, b: Any) -> torch.Tensor:
        with scope():
            return mse(m, b)

    return train(loss, state=lambda: dict(depth))


@case
def class_based_context_manager() -> Made:
    class Scope:
        open, total = 0, 0

        def __enter__(self) -> None:
            self.open += 1

        def __exit__(self, *_: Any) -> None:
            self.open, self.total = self.open - 1, self.total + 1

    scope = Scope()

    def loss(m: Any, b: Any) -> torch.Tensor:
        with scope:
            return mse(m, b)

    return train(loss, state=lambda: (scope.open, scope.total))


# ---- logs ----


@case
def losses_logged_by_item() -> Made:
    history: list[float] = []

    def loss(m: Any, b: Any) -> torch.Tensor:
        found = mse(m, b)
        history.append(found.item())
        return found

    return train(loss, state=lambda: history)


@case
def losses_logged_as_tensors() -> Made:
    history: list[torch.Tensor] = []

    def loss(m: Any, b: Any) -> torch.Tensor:
        found = mse(m, b)
        history.append(found.detach())
        return found

    return train(loss, state=lambda: history)


@case
def losses_logged_with_their_graphs() -> Made:
    history: list[torch.Tensor] = []

    def loss(m: Any, b: Any) -> torch.Tensor:
        history.append(mse(m, b))
        return history[-1]

    return train(loss, state=lambda: history)


@case
def logs_in_a_trainer() -> Made:
    trainer = types.SimpleNamespace(logs=collections.defaultdict(list), step=0)

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = m(b[0])
        trainer.step += 1
        trainer.logs["mean"].append(float(out.mean()))
        trainer.logs["step"].append(trainer.step)
        return F.mse_loss(out, b[1])

    return train(loss, state=lambda: (trainer.step, dict(trainer.logs)))


@case
def lightning_log() -> Made:
    class Lightning(Net):
        def __init__(self) -> None:
            super().__init__()
            self.logged: dict[str, Any] = {}

        def log(self, name: str, value: Any) -> None:
            self.logged[name] = value.detach() if isinstance(value, torch.Tensor) else value

        def training_step(self, batch: Any) -> torch.Tensor:
            loss = mse(self, batch)
            self.log("train/loss", loss)
            self.log("train/rows", len(batch[0]))
            return loss

    model = Lightning()
    return train(lambda m, b: m.training_step(b), model=model, state=lambda: model.logged)


@case
def running_average_of_floats() -> Made:
    meter = {"average": 0.0, "count": 0}

    def loss(m: Any, b: Any) -> torch.Tensor:
        found = mse(m, b)
        meter["count"] += 1
        meter["average"] += (found.item() - meter["average"]) / meter["count"]
        return found

    return train(loss, state=lambda: dict(meter))


@case
def loss_balanced_by_its_own_history() -> Made:
    history: list[float] = []

    def loss(m: Any, b: Any) -> torch.Tensor:
        found = mse(m, b)
        scale = 1.0 if len(history) < 2 else history[-1] / history[-2]
        history.append(found.item())
        return found * scale

    return train(loss, state=lambda: history)


@case
def best_loss_kept() -> Made:
    best = {"loss": float("inf")}

    def loss(m: Any, b: Any) -> torch.Tensor:
        found = mse(m, b)
        if found.item() < best["loss"]:
            best["loss"] = found.item()
        return found

    return train(loss, state=lambda: dict(best))


@case
def printed_to_a_buffer() -> Made:
    out = io.StringIO()

    def loss(m: Any, b: Any) -> torch.Tensor:
        print("rows", len(b[0]), file=out)
        return mse(m, b)

    return train(loss, state=out.getvalue)


@case
def printed_plainly() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        print("", end="")
        return mse(m, b)

    return train(loss)


@case
def logged_by_logging() -> Made:
    logger = logging.getLogger("wholestep.trust.quiet")

    def loss(m: Any, b: Any) -> torch.Tensor:
        logger.debug("rows %d", len(b[0]))
        return mse(m, b)

    return train(loss)


@case
def log_records_collected() -> Made:
    logger, records = logging.getLogger("wholestep.trust.collected"), []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    handler = Collect()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False

    def loss(m: Any, b: Any) -> torch.Tensor:
        logger.info("rows %d", len(b[0]))
        return mse(m, b)

    return train(loss, state=lambda: records, cleanup=lambda: logger.removeHandler(handler))


@case
def warned_in_the_forward() -> Made:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            warnings.warn("this layer is deprecated", DeprecationWarning, stacklevel=2)
            return super().forward(x)

    return train(model=Model())


@case
def numpy_history() -> Made:
    history, row = np.zeros(STEPS), [0]

    def loss(m: Any, b: Any) -> torch.Tensor:
        found = mse(m, b)
        history[row[0]] = found.item()
        row[0] += 1
        return found

    return train(loss, state=lambda: history)


# ---- metrics ----


class Accuracy:
    """As metric libraries have it: counts in attributes that `update` replaces."""

    def __init__(self) -> None:
        self.right, self.total = torch.zeros(()), 0

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.right = self.right + (logits.argmax(-1) == labels).sum()
        self.total += labels.numel()


@case
def metric_object() -> Made:
    metric = Accuracy()

    def loss(m: Any, b: Any) -> torch.Tensor:
        logits = m(b[0])
        metric.update(logits, b[1])
        return F.cross_entropy(logits, b[1])

    return train(loss, batches=labelled(), state=lambda: (metric.right, metric.total))


@case
def metric_module_with_buffers() -> Made:
    class Metric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("counts", torch.zeros(3, 3))

        def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
            self.counts += F.one_hot(labels, 3).float().T @ F.one_hot(logits.argmax(-1), 3).float()

    metric = Metric()

    def loss(m: Any, b: Any) -> torch.Tensor:
        logits = m(b[0])
        metric(logits.detach(), b[1])
        return F.cross_entropy(logits, b[1])

    return train(loss, batches=labelled(), state=lambda: metric.counts)


@case
def class_counts_added_in_place() -> Made:
    counts = torch.zeros(3)

    def loss(m: Any, b: Any) -> torch.Tensor:
        counts.index_add_(0, b[1], torch.ones(len(b[1])))
        return F.cross_entropy(m(b[0]), b[1], weight=1.0 / (1.0 + counts))

    return train(loss, batches=labelled(), state=lambda: counts)


@case
def metric_reset_every_second_step() -> Made:
    metric = Accuracy()

    def loss(m: Any, b: Any) -> torch.Tensor:
        logits = m(b[0])
        metric.update(logits, b[1])
        return F.cross_entropy(logits, b[1])

    return train(
        loss, lambda i: metric.__init__() if i % 2 == 0 else None, batches=labelled(),
        state=lambda: (metric.right, metric.total),
    )  # fmt: skip


@case
def numpy_confusion_matrix() -> Made:
    matrix = np.zeros((3, 3), dtype=np.int64)

    def loss(m: Any, b: Any) -> torch.Tensor:
        logits = m(b[0])
        np.add.at(matrix, (b[1].numpy(), logits.detach().argmax(-1).numpy()), 1)
        return F.cross_entropy(logits, b[1])

    return train(loss, batches=labelled(), state=lambda: matrix)


# ---- hidden states and other tensors carried from step to step ----


@case
def hidden_state_in_a_dictionary() -> Made:
    carried: dict[str, Any] = {"hidden": torch.zeros(1, 4, 8)}

    def loss(m: Any, b: Any) -> torch.Tensor:
        logits, hidden = m(b[:, :-1], carried["hidden"].detach())
        carried["hidden"] = hidden
        return next_token_loss(logits, b)

    return train(loss, model=LanguageModel(), batches=tokens(), state=lambda: dict(carried))


@case
def hidden_states_of_an_lstm() -> Made:
    hidden = (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))

    def loss(m: Any, b: Any) -> torch.Tensor:
        nonlocal hidden
        logits, hidden = m(b[:, :-1], hidden)
        hidden = tuple(h.detach() for h in hidden)
        return next_token_loss(logits, b)

    return train(loss, model=LanguageModel(nn.LSTM), batches=tokens(), state=lambda: hidden)


@case
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


@case
def hidden_state_reset_between_epochs() -> Made:
    carried: dict[str, Any] = {"hidden": None}

    def loss(m: Any, b: Any) -> torch.Tensor:
        logits, hidden = m(b[:, :-1], carried["hidden"])
        carried["hidden"] = hidden.detach()
        return next_token_loss(logits, b)

    change = lambda i: carried.update(hidden=None) if i % 3 == 0 else None  # noqa: E731
    return train(loss, change, model=LanguageModel(), batches=tokens(), state=lambda: dict(carried))


@case
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


@case
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


@case
def batch_norm_statistics() -> Made:
    return train(model=nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), optimizer=momentum)


@case
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


@case
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


@case
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


@case
def last_output_on_the_model() -> Made:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = super().forward(x)
            return self.last

    model = Model()
    return train(model=model, state=lambda: getattr(model, "last", None))


@case
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


@case
def set_of_sizes_seen() -> Made:
    sizes: set[int] = set()

    def loss(m: Any, b: Any) -> torch.Tensor:
        sizes.add(len(b[0]))
        return mse(m, b)

    return train(loss, state=lambda: sorted(sizes))


@case
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


@case
def dictionary_edited_in_many_ways() -> Made:
    book: dict[str, Any] = {"old": 1}

    def loss(m: Any, b: Any) -> torch.Tensor:
        book.setdefault("first", len(b[0]))
        book["steps"] = book.get("steps", 0) + 1
        book.pop("old", None)
        return mse(m, b)

    return train(loss, state=lambda: dict(book))


@case
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


@case
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
