"""A trained model, opened from a run, a checkpoint or a folder of transformers: what sample, eval and export work on.

In: a path. Out: a Trained: the module in eval mode with its weights, its family, tokens and settings.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from wholestep.data.tokens import RESERVED, TOKENIZER_FILE, Bytes, Numbers, Tokens, read_tokens
from wholestep.disk import read_json
from wholestep.errors import BadOption
from wholestep.train.checkpoint import load_weights
from wholestep.train.families import Family, find_family
from wholestep.train.job import Job, device_named, own_job
from wholestep.train.presets import refuse_missing
from wholestep.train.saved import Saved, find_saved, given_tokenizer, is_model_folder, no_run
from wholestep.train.settings import resolve_settings


@dataclasses.dataclass(slots=True, kw_only=True)
class Trained:
    """A model that has learnt."""

    name: str
    path: Path
    """The folder with the weights."""
    settings: dict[str, Any]
    family: Family | None
    """None for a function of the user's own, whose job it then is."""
    model: Any
    tokens: Tokens | None
    """None for a model that reads no text, or whose tokenizer nobody kept."""
    device: torch.device
    job: Job | None = None

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def images(self) -> dict[str, Any] | None:
        """Classes, mean and spread of the images it was trained on."""
        return self.settings.get("images")


def open_trained(name: str, *, tokenizer: str | None = None, device: str | None = None) -> Trained:
    """The model at that path, found whole."""
    where = device_named(device)
    saved = find_saved(name)
    if saved is not None:
        return _of_run(name, saved, tokenizer, where)
    folder = Path(name).expanduser().absolute()
    refuse_missing(name)
    if not is_model_folder(folder):
        raise no_run(name)
    settings, family = resolve_settings(str(folder), on_gpu=where.type == "cuda")
    assert family is not None
    config = family.configure({})
    if family.reads_images:
        settings["images"] = _images_of(folder, config)
        settings["config"] = {**settings["config"], "num_labels": config.num_labels}
    model = family.build(config, str(folder)).to(where).eval()
    tokens = _tokens(folder / TOKENIZER_FILE, family, settings, tokenizer)
    return Trained(
        name=name, path=folder, settings=settings, family=family, model=model, tokens=tokens, device=where
    )  # fmt: skip


def _of_run(name: str, saved: Saved, tokenizer: str | None, device: torch.device) -> Trained:
    stored, settings = saved.open(), dict(saved.settings)
    if saved.family is None:
        job = own_job({**settings, "init": False}, device)
        load_weights(stored, job.model)
        return Trained(
            name=name, path=stored.path, settings=settings, family=None, model=job.model, tokens=None, device=device, job=job
        )  # fmt: skip
    family = find_family(saved.family, said=name)
    with device:
        model = family.build(family.configure(dict(saved.row.config)), None)
    load_weights(stored, model)
    tokens = _tokens(stored.path / TOKENIZER_FILE, family, settings, tokenizer)
    return Trained(
        name=name, path=stored.path, settings=settings, family=family, model=model.to(device).eval(), tokens=tokens,
        device=device,
    )  # fmt: skip


def _tokens(path: Path, family: Family, settings: dict[str, Any], given: str | None) -> Tokens | None:
    if family.reads_images or family.reads_graphs:
        if given is not None:
            raise BadOption(f"--tokenizer {given}: this model reads no text", hint="leave it out")
        return None
    if given is not None:
        return read_tokens(given_tokenizer(given))
    if settings.get("tokenizer") == "bytes":
        return Bytes(0 if family.task == "next" else len(RESERVED))
    if settings.get("tokenizer") == "ids":
        return Numbers(settings["vocabulary"])
    return read_tokens(path) if path.is_file() else None


def _images_of(folder: Path, config: Any) -> dict[str, Any] | None:
    """What a folder of transformers says of its images, where it says it."""
    try:
        prepared = read_json(folder / "preprocessor_config.json")
        classes = [config.id2label[number] for number in range(config.num_labels)]
        return {"classes": classes, "mean": prepared["image_mean"], "std": prepared["image_std"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
