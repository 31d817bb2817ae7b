"""What the loss and the forward write for others to read: counters, logs, metrics."""

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
    cases_of,
    labelled,
    mse,
    train,
)
from torch import nn

case, more = cases_of("left behind")

SEEN = 0


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


@more
def counter_of_a_class() -> Made:
    class Model(Net):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Model.calls += 1
            return super().forward(x)

    return train(model=Model(), state=lambda: Model.calls)


@more
def counter_on_a_function() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        loss.calls += 1
        return mse(m, b) / loss.calls

    loss.calls = 0
    return train(loss, state=lambda: loss.calls)


@more
def counters_by_name() -> Made:
    counts: collections.defaultdict[str, int] = collections.defaultdict(int)

    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            counts[f"{self.in_features}x{self.out_features}"] += 1
            return super().forward(x)

    model = nn.Sequential(Counted(6, 8), nn.Tanh(), Counted(8, 8), nn.Tanh(), Counted(8, 3))
    return train(model=model, state=lambda: dict(counts))


@more
def tensor_counter() -> Made:
    count = torch.zeros((), dtype=torch.long)

    def loss(m: Any, b: Any) -> torch.Tensor:
        count.add_(1)
        return mse(m, b) / count

    return train(loss, state=lambda: count)


@more
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


@more
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


@more
def losses_logged_as_tensors() -> Made:
    history: list[torch.Tensor] = []

    def loss(m: Any, b: Any) -> torch.Tensor:
        found = mse(m, b)
        history.append(found.detach())
        return found

    return train(loss, state=lambda: history)


@more
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


@more
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


@more
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


@more
def printed_plainly() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        print("", end="")
        return mse(m, b)

    return train(loss)


@more
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


@more
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


@more
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


@more
def class_counts_added_in_place() -> Made:
    counts = torch.zeros(3)

    def loss(m: Any, b: Any) -> torch.Tensor:
        counts.index_add_(0, b[1], torch.ones(len(b[1])))
        return F.cross_entropy(m(b[0]), b[1], weight=1.0 / (1.0 + counts))

    return train(loss, batches=labelled(), state=lambda: counts)


@more
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


@more
def numpy_confusion_matrix() -> Made:
    matrix = np.zeros((3, 3), dtype=np.int64)

    def loss(m: Any, b: Any) -> torch.Tensor:
        logits = m(b[0])
        np.add.at(matrix, (b[1].numpy(), logits.detach().argmax(-1).numpy()), 1)
        return F.cross_entropy(logits, b[1])

    return train(loss, batches=labelled(), state=lambda: matrix)


class Counting(Net):
    steps = 0


@case
def counter_of_a_class_read_through_an_object() -> Made:
    Counting.steps = 0

    def loss(m: Any, b: Any) -> torch.Tensor:
        Counting.steps += 1
        return mse(m, b) / m.steps

    return train(loss, model=Counting(), state=lambda: Counting.steps)


class CountingToo(Counting):
    pass


@more
def counter_of_a_class_read_through_a_derived_one() -> Made:
    Counting.steps = 0

    def loss(m: Any, b: Any) -> torch.Tensor:
        Counting.steps += 1
        return mse(m, b) / CountingToo.steps

    return train(loss, state=lambda: Counting.steps)


@more
def default_type_set_by_the_loss() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        found = mse(m, b) * torch.ones(())
        torch.set_default_dtype(torch.float64)
        return found

    change = lambda i: torch.set_default_dtype(torch.float32)  # noqa: E731
    return train(loss, change, state=torch.get_default_dtype, cleanup=lambda: torch.set_default_dtype(torch.float32))
