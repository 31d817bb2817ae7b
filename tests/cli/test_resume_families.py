"""Five steps, then --resume to ten, equal ten at once, bit for bit: every family of presets, made small, by the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.calls import Call
from tests.train.test_presets import TINY, TRAINED

from wholestep.train.presets import PRESETS

DROPOUT = {
    "gpt": "dropout=0.1", "hf:gpt2": "resid_pdrop=0.2", "hf:bert": "hidden_dropout_prob=0.2",
    "hf:llama": "attention_dropout=0.2", "hf:vit": "hidden_dropout_prob=0.2",
}  # fmt: skip


SLOW = ("resnet-18", "resnet-50", "vit-small", "bert-large", "gpt-10m", "gpt2-medium", "llama-1b")
"""Their like are quicker: gpt-1m of the language models; statistics of batch norm are in tests/train/test_checkpoint.py."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in TRAINED])
def test_stopped_and_resumed_equals_never_stopped(name: str, call: Call, tmp_path: Path) -> None:
    sets, sizes = TINY[name]
    family = PRESETS[name].family
    sets = (*sets, *([DROPOUT[family]] if family in DROPOUT else []))
    options = [f"--set={s}" for s in sets] + [f"--{k}={v}" for k, v in {"batch": 2, **sizes}.items()]
    common = [name, "--backend", "interpret", "--quiet", *options]
    assert call("train", *common, "--steps", "10", "--out", str(tmp_path / "whole")).code == 0
    assert call("train", *common, "--steps", "5", "--out", str(tmp_path / "parts")).code == 0
    done = call("train", *common, "--steps", "10", "--out", str(tmp_path / "parts"), "--resume")
    assert done.code == 0, done.err
    folders = [tmp_path / run / "checkpoints" / "step-000010" for run in ("whole", "parts")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        whole, parts = (load_file(folder / file) for folder in folders)
        assert whole.keys() == parts.keys()
        for key in whole:
            assert torch.equal(whole[key], parts[key]), key
    first = load_file(tmp_path / "parts" / "checkpoints" / "step-000005" / "model.safetensors")
    assert any(not torch.equal(first[key], value) for key, value in load_file(folders[1] / "model.safetensors").items())
