"""The presets: one row per model that `wholestep train` knows by name. A row is data; nothing is built here.

In: nothing. Out: PRESETS, a table that reads as the list of what there is. `--set` changes any field of a row's `config` and any
of its training values.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from wholestep.errors import BadOption, did_you_mean

FORMS = "a preset, hf:<model_type>, a folder with a config.json, a run, or package.module:callable"

OPTIMIZERS = ("adamw", "sgd")
SCHEDULES = ("sqrt", "cosine", "constant")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model, the data it trains on, and how."""

    summary: str
    family: str
    """`gpt`, `resnet` and `rgcn` are this package's own; `hf:<model_type>` is built by transformers."""
    config: dict[str, Any]
    parameters: int
    """How many the model has as it stands here, tied ones counted once; without the embeddings of a graph's nodes."""
    data: str
    batch: int
    steps: int
    lr: float
    """The peak."""
    seq: int | None = None
    """Tokens per row; None for images, whose size is in the configuration, and for graphs."""
    tokenizer: str = "bpe"
    vocabulary: int = 8192
    """How many ids a BPE is trained to have."""
    weight_decay: float = 0.1
    """Of matrices; vectors are never decayed."""
    warmup: int = 100
    schedule: str = "sqrt"
    clip_norm: float | None = 1.0
    optimizer: str = "adamw"
    precision: str = "bf16"
    """On a GPU. The default on a CPU is fp32, where autocast is slower on most."""


_LLAMA = {"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096}
_DIGITS = {"num_labels": 10}

# fmt: off
PRESETS: dict[str, Preset] = {
    "gpt-1m": Preset(
        summary="a small GPT that learns to write like Shakespeare in two minutes on two CPU cores",
        family="gpt", config={"width": 128, "layers": 4, "heads": 4, "context": 64, "dropout": 0.0}, parameters=1_063_680,
        data="shakespeare", vocabulary=2048, batch=16, seq=64, steps=1200, lr=4e-3, warmup=100, precision="fp32",
    ),
    "gpt-10m": Preset(
        summary="a GPT for a long lunch on a CPU, or a minute on a GPU",
        family="gpt", config={"width": 320, "layers": 8, "heads": 5, "context": 256, "dropout": 0.1}, parameters=10_601_600,
        data="shakespeare", vocabulary=2048, batch=32, seq=256, steps=1000, lr=1.5e-3,
    ),
    "gpt-30m": Preset(
        summary="a GPT for any GPU; the default where there is one",
        family="gpt", config={"width": 512, "layers": 9, "heads": 8, "context": 256, "dropout": 0.2}, parameters=30_600_704,
        data="shakespeare", vocabulary=4096, batch=64, seq=256, steps=500, lr=1e-3,
    ),
    "gpt2-medium": Preset(
        summary="GPT-2 medium, 355M", family="hf:gpt2",
        config={"n_embd": 1024, "n_layer": 24, "n_head": 16}, parameters=354_823_168,
        data="stdlib", batch=16, seq=1024, steps=1000, lr=3e-4, warmup=200,
    ),
    "bert-large": Preset(
        summary="BERT large, 335M, guessing masked words", family="hf:bert",
        config={"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        parameters=335_174_458, data="stdlib", batch=32, seq=512, steps=1000, lr=1e-4, warmup=200, weight_decay=0.01,
    ),
    "llama-1b": Preset(
        summary="a Llama of 1.2B", family="hf:llama",
        config={**_LLAMA, "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "tie_word_embeddings": True},
        parameters=1_235_814_400, data="stdlib", batch=8, seq=2048, steps=1000, lr=3e-4, warmup=200,
    ),
    "llama-8b": Preset(
        summary="a Llama of 8B", family="hf:llama",
        config={**_LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336},
        parameters=8_030_261_248, data="stdlib", batch=1, seq=2048, steps=1000, lr=2e-4, warmup=200,
    ),
    "vit-small": Preset(
        summary="ViT-S/16 on handwritten digits", family="hf:vit",
        config={**_DIGITS, "hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536},
        parameters=21_669_514, data="digits", batch=64, steps=500, lr=5e-4, weight_decay=0.05, warmup=50,
    ),
    "resnet-18": Preset(
        summary="ResNet-18 for small images, on handwritten digits", family="resnet",
        config={"depth": 18, "image_size": 32, "channels": 1, "stem": "small"}, parameters=11_172_810,
        data="digits", batch=64, steps=300, lr=3e-3, weight_decay=0.05, warmup=20,
    ),
    "resnet-50": Preset(
        summary="ResNet-50 at 224 pixels, on handwritten digits", family="resnet",
        config={"depth": 50, "image_size": 224, "channels": 3, "stem": "large"}, parameters=23_528_522,
        data="digits", batch=64, steps=500, lr=2e-3, weight_decay=0.05, warmup=50,
    ),
    "rgcn": Preset(
        summary="an R-GCN that classifies modules, classes, functions and methods by who contains, imports, calls, inherits whom",
        family="rgcn", config={"width": 32}, parameters=18_660,
        data="pygraph", batch=1, steps=60, lr=1e-2, warmup=10, precision="fp32",
    ),
}
# fmt: on

DEFAULT_ON_CPU = "gpt-1m"
DEFAULT_ON_GPU = "gpt-30m"

TEXT_DEFAULTS = Preset(
    summary="", family="", config={}, parameters=0, data="shakespeare", batch=8, seq=128, steps=200, lr=5e-4, warmup=50
)
"""For `hf:<model_type>` and folders whose model reads text ..."""
IMAGE_DEFAULTS = Preset(
    summary="",
    family="",
    config={},
    parameters=0,
    data="digits",
    batch=32,
    steps=200,
    lr=5e-4,
    warmup=50,
    weight_decay=0.05,
)
"""... or images."""


def refuse_unknown(name: str) -> None:
    """An error when MODEL is none of its forms; what is a folder, or names a type or a function, is looked at later."""
    if name in PRESETS or ":" in name or os.path.exists(os.path.expanduser(name)):
        return
    if os.sep in name or name.startswith((".", "~")):
        raise BadOption(f"MODEL {name!r}: there is no such folder", hint=f"name {FORMS}")
    near, presets = did_you_mean(name, PRESETS), f"presets: {', '.join(PRESETS)}"
    if near:
        raise BadOption(f"MODEL {name!r} is not a preset", hint=f"{near} ({presets})")
    raise BadOption(f"MODEL {name!r} is none of: {FORMS}", hint=presets)


def refuse_missing(run: str) -> None:
    """An error when there is nothing at that path; whether what is there is a run is looked at later."""
    if not os.path.exists(os.path.expanduser(run)):
        what = "is a preset, which has no weights" if run in PRESETS else "is no run: there is no such folder"
        raise BadOption(f"{run} {what}", hint="give the folder of a run, as `wholestep train` prints it")
