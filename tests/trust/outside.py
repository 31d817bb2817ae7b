"""What the loss reads outside its own objects: environment, files, clocks, threads, caches, iterators, modes of torch."""

from __future__ import annotations

import contextvars
import datetime
import functools
import itertools
import json
import logging
import os
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from tests.trust.case import Made, Net, adamw, at, cases_of, mse, train

case, more = cases_of("outside")

NAME = "WHOLESTEP_TRUST_WEIGHT"
FORGET = functools.partial(os.environ.pop, NAME, None)
WEIGHT = contextvars.ContextVar("weight", default=1.0)


def environment(value: str | None) -> None:
    os.environ.pop(NAME, None)
    if value is not None:
        os.environ[NAME] = value


@case
def environment_entry() -> Made:
    environment("1.0")
    return train(lambda m, b: mse(m, b) * float(os.environ[NAME]), at(3, environment, "0.1"), cleanup=FORGET)


@case
def environment_get() -> Made:
    environment(None)
    return train(lambda m, b: mse(m, b) * float(os.environ.get(NAME, "1")), at(3, environment, "0.1"), cleanup=FORGET)


@case
def environment_getenv() -> Made:
    environment("1.0")
    return train(lambda m, b: mse(m, b) * float(os.getenv(NAME, "1")), at(3, environment, "0.1"), cleanup=FORGET)


@more
def environment_name_present() -> Made:
    environment(None)
    loss = lambda m, b: mse(m, b) * (0.1 if NAME in os.environ else 1.0)  # noqa: E731
    return train(loss, at(3, environment, ""), cleanup=FORGET)


@more
def environment_read_by_a_model() -> Made:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            return self.b(torch.relu(h) if os.getenv(NAME) == "relu" else torch.tanh(h))

    environment("tanh")
    return train(model=Model(), change=at(3, environment, "relu"), cleanup=FORGET)


@case
def context_variable() -> Made:
    WEIGHT.set(1.0)
    return train(lambda m, b: mse(m, b) * WEIGHT.get(), at(3, WEIGHT.set, 0.1), cleanup=lambda: WEIGHT.set(1.0))


@case
def thread_local() -> Made:
    local = threading.local()
    local.weight = 1.0
    return train(lambda m, b: mse(m, b) * local.weight, at(3, setattr, local, "weight", 0.1))


@case
def lru_cached_and_never_cleared() -> Made:
    """The cached number is old in eager too: the step must not see the new one."""
    values = {"weight": 1.0}
    read = functools.lru_cache(lambda: values["weight"])
    return train(lambda m, b: mse(m, b) * read(), at(3, values.update, weight=0.1))


@case
def lru_cached_and_cleared() -> Made:
    values = {"weight": 1.0}
    read = functools.lru_cache(lambda: values["weight"])

    def change(i: int) -> None:
        values["weight"] = 1.0 if i < 2 else 0.1
        if i == 4:
            read.cache_clear()

    return train(lambda m, b: mse(m, b) * read(), change)


@more
def cached_by_argument() -> Made:
    epoch = [0]
    weight = functools.cache(lambda n: 1.0 / (1 + n))
    return train(lambda m, b: mse(m, b) * weight(epoch[0]), lambda i: epoch.__setitem__(0, i // 2))


@case
def iterator_of_weights() -> Made:
    weights = iter([1.0, 1.0, 0.5, 0.1, 0.1, 0.3, 7.0])
    return train(lambda m, b: mse(m, b) * next(weights), state=lambda: weights.__length_hint__())


@case
def generator_of_weights() -> Made:
    def decay() -> Iterator[float]:
        weight = 1.0
        while True:
            yield weight
            weight *= 0.5

    weights = decay()
    return train(lambda m, b: mse(m, b) * next(weights))


@more
def cycle_of_weights() -> Made:
    weights = itertools.cycle([1.0, 0.1])
    return train(lambda m, b: mse(m, b) * next(weights))


@more
def count_of_steps() -> Made:
    steps = itertools.count()
    return train(lambda m, b: mse(m, b) / (1 + next(steps)), state=lambda: repr(steps))


@case
def file_read() -> Made:
    folder = tempfile.TemporaryDirectory()
    path = os.path.join(folder.name, "weight")

    def write(text: str) -> None:
        with open(path, "w") as file:
            file.write(text)

    def loss(m: Any, b: Any) -> torch.Tensor:
        with open(path) as file:
            return mse(m, b) * float(file.read())

    write("1.0")
    return train(loss, at(3, write, "0.1"), cleanup=folder.cleanup)


@more
def json_file_read_by_path() -> Made:
    folder = tempfile.TemporaryDirectory()
    path = pathlib.Path(folder.name) / "config.json"
    path.write_text('{"weight": 1.0}')
    loss = lambda m, b: mse(m, b) * json.loads(path.read_text())["weight"]  # noqa: E731
    return train(loss, at(3, path.write_text, '{"weight": 0.1}'), cleanup=folder.cleanup)


@more
def file_exists() -> Made:
    folder = tempfile.TemporaryDirectory()
    path = os.path.join(folder.name, "flag")
    loss = lambda m, b: mse(m, b) * (0.1 if os.path.exists(path) else 1.0)  # noqa: E731
    return train(loss, at(3, pathlib.Path(path).touch), cleanup=folder.cleanup)


@case
def file_written() -> Made:
    folder = tempfile.TemporaryDirectory()
    path = os.path.join(folder.name, "log")

    def loss(m: Any, b: Any) -> torch.Tensor:
        with open(path, "a") as file:
            file.write("step\n")
        return mse(m, b)

    lines = lambda: open(path).read().count("\n") if os.path.exists(path) else 0  # noqa: E731, SIM115
    return train(loss, state=lines, cleanup=folder.cleanup)


@case
def clock() -> Made:
    limit = [time.time() + 1e6]
    loss = lambda m, b: mse(m, b) * (1.0 if time.time() < limit[0] else 0.1)  # noqa: E731
    return train(loss, at(3, limit.__setitem__, 0, 0.0))


@more
def clock_of_the_last_step() -> Made:
    model = Net()
    model.began = None

    def loss(m: Any, b: Any) -> torch.Tensor:
        m.began = time.perf_counter()
        return mse(m, b)

    started: list[float] = []
    return train(loss, model=model, after=lambda i: started.append(model.began), state=lambda: len(set(started)))


@more
def date() -> Made:
    limit = [datetime.datetime.now() + datetime.timedelta(days=9)]
    loss = lambda m, b: mse(m, b) * (1.0 if datetime.datetime.now() < limit[0] else 0.1)  # noqa: E731
    return train(loss, at(3, limit.__setitem__, 0, datetime.datetime(2000, 1, 1)))


@more
def working_directory() -> Made:
    home, other = os.getcwd(), tempfile.gettempdir()
    loss = lambda m, b: mse(m, b) * (1.0 if os.getcwd() == home else 0.1)  # noqa: E731
    return train(loss, at(3, os.chdir, other), cleanup=lambda: os.chdir(home))


@more
def command_line() -> Made:
    loss = lambda m, b: mse(m, b) * (0.1 if "--small" in sys.argv else 1.0)  # noqa: E731
    return train(loss, at(3, sys.argv.append, "--small"), cleanup=lambda: sys.argv.remove("--small"))


@case
def level_of_a_logger() -> Made:
    logger = logging.getLogger("wholestep.trust.level")
    logger.setLevel(logging.WARNING)
    loss = lambda m, b: mse(m, b) * (0.1 if logger.isEnabledFor(logging.DEBUG) else 1.0)  # noqa: E731
    return train(loss, at(3, logger.setLevel, logging.DEBUG), cleanup=lambda: logger.setLevel(logging.NOTSET))


@more
def name_of_the_thread() -> Made:
    thread = threading.current_thread()
    name = thread.name
    loss = lambda m, b: mse(m, b) * (0.1 if threading.current_thread().name == "small" else 1.0)  # noqa: E731
    return train(loss, at(3, setattr, thread, "name", "small"), cleanup=lambda: setattr(thread, "name", name))


@case
def default_dtype_read() -> Made:
    loss = lambda m, b: mse(m, b) * (0.1 if torch.get_default_dtype() is torch.float64 else 1.0)  # noqa: E731
    return train(loss, lambda i: torch.set_default_dtype((torch.float32, torch.float64)[i in (2, 3)]))


@case
def default_dtype_of_new_tensors() -> Made:
    loss = lambda m, b: mse(m, b) * (torch.ones(3).mean() / torch.ones(1000).numel())  # noqa: E731
    return train(loss, at(3, torch.set_default_dtype, torch.float64))


@more
def deterministic_flag_read() -> Made:
    loss = lambda m, b: mse(m, b) * (0.1 if torch.are_deterministic_algorithms_enabled() else 1.0)  # noqa: E731
    change = at(3, torch.use_deterministic_algorithms, True)
    return train(loss, change, cleanup=lambda: torch.use_deterministic_algorithms(False))


@more
def backend_flag_read() -> Made:
    flags = torch.backends.cudnn
    was = flags.benchmark
    loss = lambda m, b: mse(m, b) * (0.1 if torch.backends.cudnn.benchmark else 1.0)  # noqa: E731
    return train(loss, lambda i: setattr(flags, "benchmark", i > 2), cleanup=lambda: setattr(flags, "benchmark", was))


@case
def autocast_entered_in_the_loss() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = m(b[0])
        return (out.float() - b[1]).square().mean()

    return train(loss, optimizer=adamw)


@more
def autocast_switched_on_in_the_loss() -> Made:
    options = {"enabled": False}

    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=options["enabled"]):
            out = m(b[0])
        return (out.float() - b[1]).square().mean()

    return train(loss, at(3, options.update, enabled=True))


@case
def autocast_around_later_steps() -> Made:
    loss = lambda m, b: (m(b[0]).float() - b[1]).square().mean()  # noqa: E731

    def switch(on: bool) -> None:
        torch.set_autocast_enabled("cpu", on)
        torch.clear_autocast_cache()  # as leaving the context does

    return train(loss, lambda i: switch(i in (2, 3)), cleanup=lambda: switch(False))


@case
def grad_mode_switched_inside_the_loss() -> Made:
    options = {"encoder": True}

    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.set_grad_enabled(options["encoder"]):
            h = torch.tanh(m.a(b[0]))
        return (m.b(h) - b[1]).square().mean()

    return train(loss, at(3, options.update, encoder=False))


@more
def grad_mode_read() -> Made:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1.0 if torch.is_grad_enabled() else 3.0)

    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.no_grad():
            target = m(b[0])
        return (m(b[0]) - target * 0.1 - b[1]).square().mean()

    return train(loss, model=Model())


@more
def compiling_is_asked_for() -> Made:
    """Code that looks whether it is compiled trains as it does in eager."""
    loss = lambda m, b: mse(m, b) * (0.1 if torch.jit.is_tracing() or torch.jit.is_scripting() else 1.0)  # noqa: E731
    return train(loss)
