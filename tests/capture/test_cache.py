"""Captured graphs on disk: found by a fresh process, missed when anything changed, ignored when torn."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.capture.readings import reading_of
from tests.runtime.twins import Side, class_batches, classify, eager_update, small_mlp
from torch import nn

import wholestep
from wholestep.capture.cache import capture_key
from wholestep.capture.subject import make_subject

ROOT = Path(__file__).resolve().parents[2]
BATCH = class_batches(1)[0]

SCRIPT = """
import json, sys
import torch
from torch import nn
import wholestep

def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1]) * 2.0

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
batch = torch.ones(5, 4), torch.zeros(5, dtype=torch.long)
step = wholestep.compile(model, loss_fn, optimizer, batch, backend="interpret", clip_norm=1.0)
print(json.dumps([step._latest.capture.from_cache, [float(step(batch)) for _ in range(3)], step.rung]))
"""


def test_a_fresh_process_finds_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path / "cache"))
    runpy.run_path(str(script), run_name="__main__")
    first, losses, rung = json.loads(capsys.readouterr().out)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert not first and rung == "whole step" and json.loads(done.stdout.splitlines()[-1]) == [True, losses, rung]


# ---- the key ----


def key_of(
    model: nn.Module | None = None, loss_fn: Any = classify, optimizer: Any = None, batch: Any = BATCH, **options: Any
) -> str:
    model = model or network()
    optimizer = optimizer or torch.optim.AdamW
    made = optimizer(model.parameters(), lr=0.01) if isinstance(optimizer, type) else optimizer(model)
    subject = make_subject(model, loss_fn, made, **options)
    return capture_key(subject, reading_of(subject, batch))


def network(width: int = 6, p: float = 0.1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.Dropout(p), nn.Linear(width, 3))


def scaled_loss(scale: Any) -> Any:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return classify(model, batch) * scale

    return loss_fn


def scaled_by_an_option(model: Any, batch: Any) -> torch.Tensor:
    return classify(model, batch) * (5.0 + model[0].options["depth"][1])


def frozen_first() -> nn.Sequential:
    model = network()
    model[0].requires_grad_(False)
    return model


def evaluating() -> nn.Sequential:
    return network().eval()


def hooked() -> nn.Sequential:
    model = network()
    model[0].weight.register_hook(lambda g: g * 2)
    return model


def configured(value: int) -> nn.Sequential:
    model = network()
    model[0].options = {"depth": [1, value]}
    return model


def test_the_same_program_has_the_same_key() -> None:
    """Whatever the weights are, the optimizer's numbers, what the loss never reads, and the container of the batch."""
    assert key_of() == key_of()
    assert key_of() == key_of(
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.5, betas=(0.1, 0.2), weight_decay=3.0)
    )
    assert key_of(loss_fn=scaled_loss(2.0)) == key_of(loss_fn=scaled_loss(2.0))
    assert key_of(clip_norm=1.0) == key_of(clip_norm=2.0)
    assert key_of(configured(1)) == key_of(configured(2)) == key_of(), "no forward reads them"
    assert key_of(batch=list(BATCH)) == key_of()


OTHERS: dict[str, Any] = {
    "layer size": lambda: key_of(network(width=7)),
    "dropout": lambda: key_of(network(p=0.2)),
    "eval": lambda: key_of(evaluating()),
    "frozen": lambda: key_of(frozen_first()),
    "dtype": lambda: key_of(network().double(), batch=(BATCH[0].double(), BATCH[1])),
    "hook": lambda: key_of(hooked()),
    "nested attribute": lambda: key_of(configured(1), loss_fn=scaled_by_an_option),
    "another nested attribute": lambda: key_of(configured(2), loss_fn=scaled_by_an_option),
    "loss code": lambda: key_of(loss_fn=lambda m, b: classify(m, b) * 2),
    "another constant in the loss code": lambda: key_of(loss_fn=lambda m, b: classify(m, b) * 3),
    "closure constant": lambda: key_of(loss_fn=scaled_loss(2.0)),
    "another closure constant": lambda: key_of(loss_fn=scaled_loss(3.0)),
    "amsgrad": lambda: key_of(optimizer=lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True)),
    "adam": lambda: key_of(optimizer=torch.optim.Adam),
    "sgd": lambda: key_of(optimizer=torch.optim.SGD),
    "momentum": lambda: key_of(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)),
    "groups": lambda: key_of(optimizer=lambda m: torch.optim.AdamW([{"params": [p]} for p in m.parameters()])),
    "clip": lambda: key_of(clip_norm=1.0),
    "accumulate": lambda: key_of(accumulate=2),
    "precision": lambda: key_of(precision="bf16"),
    "batch size": lambda: key_of(batch=class_batches(1, size=7)[0]),
    "batch structure": lambda: key_of(
        batch={"x": BATCH[0], "y": BATCH[1]}, loss_fn=lambda m, b: classify(m, (b["x"], b["y"]))
    ),
}


def test_every_change_is_another_key() -> None:
    keys = {"as it was": key_of()} | {name: make() for name, make in OTHERS.items()}
    by_key: dict[str, list[str]] = {}
    for name, key in keys.items():
        by_key.setdefault(key, []).append(name)
    assert [names for names in by_key.values() if len(names) > 1] == []


HELPER_SCALE = 1.0


def helper(loss: torch.Tensor) -> torch.Tensor:
    return loss * HELPER_SCALE


def loss_with_helper(model: nn.Module, batch: Any) -> torch.Tensor:
    return helper(classify(model, batch))


def test_globals_of_helper_functions_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(loss_fn=loss_with_helper)
    monkeypatch.setitem(globals(), "HELPER_SCALE", 2.0)
    assert key_of(loss_fn=loss_with_helper) != before


def test_globals_count_also_when_the_closure_holds_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()

    def loss_fn(_: Any, batch: Any) -> torch.Tensor:
        return sum(classify(model, batch) * HELPER_SCALE for _ in range(2))

    before = key_of(model, loss_fn)
    assert key_of(model, loss_fn) == before
    monkeypatch.setitem(globals(), "HELPER_SCALE", 2.0)
    assert key_of(model, loss_fn) != before


# ---- files ----


def compile_cached(model: nn.Module | None = None, loss_fn: Any = classify, **options: Any) -> Any:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return wholestep.compile(model, loss_fn, optimizer, BATCH, backend="interpret", **options)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path))
    return tmp_path / "captures"


def test_torn_files_are_ignored(folder: Path) -> None:
    reference = [float(compile_cached()(BATCH)) for _ in range(1)]
    (file,) = folder.glob("*.graph")
    whole = file.read_bytes()
    for torn in (
        b"",
        whole[:40],
        whole[: len(whole) // 2],
        whole[:-1],
        b"\0" * 200,
        whole[:300] + b"x" * 20 + whole[320:],
    ):
        file.write_bytes(torn)
        step = compile_cached()
        assert float(step(BATCH)) == reference[0]
        assert not step._latest.capture.from_cache
        file.write_bytes(whole)
    assert compile_cached()._latest.capture.from_cache


def test_other_numbers_in_a_file_are_noticed(folder: Path) -> None:
    """Of two groups the second trains by the first one's learning rate, if `"group": 1` becomes 0."""

    def trained() -> tuple[list[torch.Tensor], bool]:
        torch.manual_seed(1)
        model = small_mlp()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 1.0}]
        step = wholestep.compile(
            model, classify, torch.optim.SGD(groups, lr=0.01), BATCH, backend="interpret", check="off"
        )
        step(BATCH)
        return [p.detach() for p in model.parameters()], step._latest.capture.from_cache

    wanted, _ = trained()
    (file,) = folder.glob("*.graph")
    whole = file.read_bytes()
    damaged = whole.replace(b'"group": 1', b'"group": 0')
    assert damaged != whole and trained()[1]
    file.write_bytes(damaged)
    found, cached = trained()
    assert not cached and all(map(torch.equal, wanted, found))


def test_cache_false_neither_reads_nor_writes(folder: Path) -> None:
    compile_cached(cache=False)
    assert not folder.exists() or not list(folder.iterdir())
    compile_cached()
    assert not compile_cached(cache=False)._latest.capture.from_cache


def test_a_cached_step_trains_as_the_captured_one(folder: Path) -> None:
    """Loss, gradient norm, optimizer state and notes: nothing is lost on the way through the file."""
    results = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))
        torch.manual_seed(1)
        for p in model.parameters():
            nn.init.normal_(p, std=0.3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = wholestep.compile(
            model, classify, optimizer, BATCH, backend="interpret", clip_norm=0.1, accumulate=1, seed=0
        )
        losses = [float(step(BATCH)) for _ in range(3)]
        results.append((losses, float(step.grad_norm), model[1].running_mean.tolist(), step._latest.capture.from_cache))
    assert results[0][:3] == results[1][:3] and [r[3] for r in results] == [False, True]


def test_notes_come_back_with_what_they_tell_code(folder: Path) -> None:
    steps = [compile_cached() for _ in range(2)]
    assert [step._latest.capture.from_cache for step in steps] == [False, True]
    captured, cached = ([(note, note.kind, dict(note.data)) for note in step.notes] for step in steps)
    assert captured == cached and "pass" in [kind for _, kind, _ in captured]


def test_a_tensor_that_the_loss_reaches_is_an_input_of_the_cached_graph(folder: Path) -> None:
    """The graph from the disk is given the tensor of now, not the one it was traced with."""
    for weights, found in ((torch.ones(3), False), (torch.tensor([1.0, 0.2, 3.0]), True)):

        def loss_fn(model: nn.Module, batch: Any, weights: torch.Tensor = weights) -> torch.Tensor:
            return F.cross_entropy(model(batch[0]), batch[1], weight=weights)

        step = compile_cached(loss_fn=loss_fn)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        theirs = Side(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss_fn)
        assert step._latest.capture.from_cache is found
        assert [float(step(BATCH)) for _ in range(2)] == [float(eager_update(theirs, BATCH)[0]) for _ in range(2)]


def test_the_attention_implementation_of_a_config_is_in_the_key() -> None:
    """`to_dict` leaves it out: a model with eager attention would be given the graph of one with sdpa."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30)
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "labels": torch.zeros(2, 4, dtype=torch.long)}
    keys = set()
    for implementation in ("sdpa", "eager"):
        config = transformers.BertConfig(**sizes)
        model = transformers.BertForMaskedLM._from_config(config, attn_implementation=implementation)
        subject = make_subject(model, None, torch.optim.SGD(model.parameters(), lr=0.1))
        keys.add(capture_key(subject, reading_of(subject, batch)))
    assert len(keys) == 2
