"""The presets: each is built on the meta device, at its stated size; each family trains two tiny steps."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

import wholestep
from wholestep.train.families import find_family
from wholestep.train.job import make_job
from wholestep.train.presets import DEFAULT_ON_CPU, DEFAULT_ON_GPU, PRESETS
from wholestep.train.wishes import check_training

SMALL_HF = ("hidden_size=32", "num_hidden_layers=2", "num_attention_heads=2", "intermediate_size=64")
TINY = {
    "gpt-1m": (("width=16", "layers=2", "heads=2", "context=16", "tokenizer=bytes"), {"seq": 16}),
    "gpt-10m": (
        ("width=16", "layers=2", "heads=2", "context=16", "tokenizer=bytes", "tied=false", "accumulate=2"),
        {"seq": 16},
    ),
    "gpt-30m": (("width=16", "layers=2", "heads=2", "tokenizer=bytes"), {"seq": 8}),
    "gpt2-medium": (("n_embd=32", "n_layer=2", "n_head=2", "vocab_size=300", "tokenizer=bytes"), {"seq": 8}),
    "bert-large": ((*SMALL_HF, "vocab_size=300", "tokenizer=bytes"), {"seq": 16}),
    "llama-1b": ((*SMALL_HF, "num_key_value_heads=1", "vocab_size=300", "tokenizer=bytes"), {"seq": 8}),
    "llama-8b": ((*SMALL_HF, "num_key_value_heads=1", "vocab_size=300", "tokenizer=bytes"), {"seq": 8}),
    "vit-small": ((*SMALL_HF, "image_size=16", "patch_size=4", "num_channels=1"), {}),
    "resnet-18": (("width=8", "image_size=16"), {}),
    "resnet-50": (("width=4", "image_size=32"), {}),
    "rgcn": (("width=8", "files=8", "bases=3", "dropout=0.1"), {"batch": 1}),
}


TRAINED = [name for name in TINY if name not in ("llama-8b", "gpt-30m")]  # of their families there are others
SLOW = ("resnet-50", "vit-small", "gpt2-medium", "bert-large")


def test_the_defaults_are_presets() -> None:
    assert DEFAULT_ON_CPU in PRESETS and DEFAULT_ON_GPU in PRESETS
    assert TINY.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_its_stated_size(name: str) -> None:
    row = PRESETS[name]
    family = find_family(row.family, said=name)
    assert row.config.keys() <= family.fields.keys()
    config = family.configure(row.config | ({"vocab_size": row.vocabulary} if row.family == "gpt" else {}))
    with torch.device("meta"):
        model = family.build(config, False)
    assert sum(p.numel() for p in model.parameters()) == row.parameters
    assert all(p.is_meta for p in model.parameters())
    assert (row.seq is None) == (family.reads_images or family.reads_graphs)
    assert row.seq is None or row.seq <= (family.context(config) or row.seq)


@pytest.mark.parametrize("name", PRESETS)
def test_a_row_holds_values_that_set_would_take(name: str) -> None:
    row = dataclasses.asdict(PRESETS[name])
    for key in ("lr", "weight_decay", "warmup", "schedule", "clip_norm", "optimizer", "tokenizer", "vocabulary"):
        assert check_training(key, row[key]) == row[key]
    assert row["batch"] >= 1 and row["steps"] > row["warmup"] and row["summary"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in TRAINED])
def test_a_preset_trains_when_made_small(name: str, tmp_path: Path) -> None:
    sets, sizes = TINY[name]
    (tmp_path / "notes.txt").write_text("Whence cam'st thou, worthy thane?\n" * 200)
    data = str(tmp_path / "notes.txt") if "seq" in sizes else PRESETS[name].data
    job = make_job(name, sets=sets, data=data, device="cpu", **{"batch": 4, **sizes})
    step = wholestep.compile(
        job.model, job.loss_fn, job.optimizer, job.batches.batch(0), backend="interpret", check="off", verbose=False,
        **job.compile_options,
    )  # fmt: skip
    assert step.rung == "whole step"
    losses = []
    for number in range(2):
        losses.append(float(step(job.batches.batch(number))))
        job.scheduler.step()
    assert all(math.isfinite(loss) for loss in losses)
    # The last has another shape and is captured again, which is the slow part of this test.
    edges = job.edge_batches[: 3 if name in ("gpt-10m", "vit-small") else 2]
    assert all(math.isfinite(float(step(batch))) for batch in edges) and len(job.edge_batches) == 3
    assert job.held_out and job.write_sample is not None and job.write_sample()
