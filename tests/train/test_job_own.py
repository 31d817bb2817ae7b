"""MODEL as package.module:callable: parameters by --set, one batch or a DataLoader, and every way to get it wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import wholestep
from wholestep.errors import BadBatch, BadOption, WholestepError
from wholestep.train.job import make_job, make_job_again
from wholestep.train.loader import LoaderBatches, is_iterable_of_batches

SETUP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def loss(model, batch):
    return model(batch[0] if isinstance(batch, (list, tuple)) else batch).square().mean()

def setup(width=8, batch=3, lr=0.1):
    model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.1), nn.Linear(width, 1))
    return model, loss, torch.optim.SGD(model.parameters(), lr=lr), torch.ones(batch, 4)

def loaded():
    model, loss, optimizer, _ = setup()
    rows = torch.arange(40.0).reshape(10, 4)
    return model, loss, optimizer, DataLoader(TensorDataset(rows), batch_size=4, shuffle=True)

def frozen():
    model, loss, optimizer, batch = setup()
    for p in model.parameters():
        p.requires_grad_(False)
    return model, loss, optimizer, batch

def needs(size):
    return setup(size)

def three():
    return 1, 2, 3

def raises():
    raise RuntimeError("two\\nlines")

def without():
    return nn.Linear(1, 1), loss, None, torch.ones(1, 1)
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("program")
    (folder / "own_training_of_the_tests.py").write_text(SETUP)
    (folder / "own_broken_module_of_the_tests.py").write_text("x = 1 / 0")
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(folder))
    yield "own_training_of_the_tests"
    patch.undo()


def test_a_function_becomes_a_job(module: str) -> None:
    job = make_job(f"{module}:setup", sets=("width=6", "clip_norm=2"), batch=5, steps=9, precision="bf16")
    assert job.name == f"{module}:setup" and job.settings["config"] == {"width": 6, "batch": 5}
    assert job.model[0].out_features == 6 and job.batches.units == 5 and job.scheduler is None
    assert job.settings["steps"] == 9
    assert job.compile_options == {"precision": "bf16", "clip_norm": 2.0, "accumulate": 1}
    assert job.batches.batch(3).shape == (5, 4) and "the same at every step" in job.batches.describe()
    again = make_job_again(json.loads(json.dumps(job.settings)))
    assert again.settings == job.settings and again.model[0].weight.equal(job.model[0].weight)


def test_a_loader_is_gone_through_again_and_a_position_is_a_number(module: str) -> None:
    job = make_job(f"{module}:loaded", seed=3)
    state = torch.get_rng_state()
    seen = [job.batches.batch(number)[0] for number in range(9)]
    assert torch.get_rng_state().equal(state)
    epochs = [torch.cat(seen[i : i + 3]).flatten().sort().values.tolist() for i in (0, 3, 6)]
    assert epochs == [[float(i) for i in range(40)]] * 3
    assert not seen[0].equal(seen[3])  # shuffled anew
    again = make_job(f"{module}:loaded", seed=3)
    assert all(again.batches.batch(number)[0].equal(seen[number]) for number in (7, 8, 2))
    assert not make_job(f"{module}:loaded", seed=4).batches.batch(0)[0].equal(seen[0])
    assert "3 batches from a DataLoader" in job.batches.describe()


def test_it_trains(module: str) -> None:
    job = make_job(f"{module}:loaded")
    step = wholestep.compile(
        job.model, job.loss_fn, job.optimizer, job.batches.batch(0), backend="interpret", verbose=False
    )
    assert float(step(job.batches.batch(0))) > 0


def test_what_an_iterable_draws_does_not_disturb_training() -> None:
    class Noisy:
        def __iter__(self) -> Iterator[torch.Tensor]:
            for _ in range(3):
                yield torch.rand(2) + random.random() + np.random.rand()

    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    one = LoaderBatches(Noisy(), 0, torch.device("cpu"))
    seen = [one.batch(n) for n in range(7)]
    assert random.getstate() == before[0] and (np.random.get_state()[1] == before[1]).all()
    assert torch.get_rng_state().equal(before[2])
    assert LoaderBatches(Noisy(), 0, torch.device("cpu")).batch(6).equal(seen[6])
    assert len({tuple(s.tolist()) for s in seen}) == 7


def test_what_counts_as_batches() -> None:
    for batch in (torch.ones(2), {"x": 1}, [1], (1, 2), np.ones(2), "text"):
        assert not is_iterable_of_batches(batch)
    assert is_iterable_of_batches(iter([1])) and is_iterable_of_batches(range(3))


def test_batches_that_end_or_cannot_be_repeated() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(BadBatch, match="empty"):
        LoaderBatches(iter([]), 0, cpu)
    with pytest.raises(BadBatch, match="empty"):
        LoaderBatches(range(0), 0, cpu)
    once = LoaderBatches(iter([torch.ones(1), torch.zeros(1)]), 0, cpu)
    assert once.batch(0).item() == 1 and once.batch(1).item() == 0
    with pytest.raises(BadBatch, match="ended after 2"):
        once.batch(2)
    with pytest.raises(BadBatch, match="only once"):
        once.batch(0)


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        ("setpu", {}, "did you mean own_training_of_the_tests:setup?"),
        ("SETTINGS", {}, "has no function"),
        ("three", {}, "returned a tuple of 3. return (model, loss_fn, optimizer, example_batch)"),
        ("needs", {}, "needs size. give --set size=VALUE"),
        ("raises", {}, "raised RuntimeError: two lines (at "),
        ("without", {}, "no optimizer"),
        ("setup", {"sets": ("widht=3",)}, "did you mean width?"),
        ("setup", {"sets": ("clip_norm=-1",)}, "more than 0"),
        ("setup", {"seq": 3}, "makes its own batches"),
        ("loaded", {"batch": 3}, "give the function a parameter batch"),
        ("setup", {"init": "."}, "builds its own model"),
    ],
)
def test_bad_functions_are_one_line(module: str, function: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(WholestepError) as caught:
        make_job(f"{module}:{function}", **options)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_module_that_fails_is_one_line_with_its_place(module: str) -> None:
    with pytest.raises(BadOption, match=r"raised ZeroDivisionError.*own_broken_module_of_the_tests\.py:1"):
        make_job("own_broken_module_of_the_tests:setup")


def test_nothing_to_train_is_told_by_compile(module: str) -> None:
    job = make_job(f"{module}:frozen")
    with pytest.raises(WholestepError, match="nothing to train"):
        wholestep.compile(
            job.model, job.loss_fn, job.optimizer, job.batches.batch(0), backend="interpret", verbose=False
        )
