"""A Job: everything one training run needs, built from what was asked on the command line.

In: MODEL (a preset, `hf:<model_type>`, a folder with a config.json, a run, or `package.module:callable`), data, sizes.
Out: model, loss, optimizer, schedule and a source of batches, ready for `wholestep.compile`, and the settings they came from.

What was asked is first resolved into settings, plain JSON; the Job is then built from the settings alone. `make_job_again` is that
second half, so a saved run can be made again on any day.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from wholestep.data.texts import OTHER_DATA, TEXTS
from wholestep.data.token_files import is_token_file
from wholestep.data.tokens import KINDS, TOKENIZER_FILE, bpe_available, find_tokenizer
from wholestep.errors import BadOption, WholestepWarning
from wholestep.train import resolve, wishes
from wholestep.train.build import build, check_data_fits, check_sequence, is_function
from wholestep.train.checkpoint import load_weights
from wholestep.train.checkpoint_files import open_stored
from wholestep.train.families import Family, find_family
from wholestep.train.loader import LoaderBatches, OneBatch, is_iterable_of_batches, on_device
from wholestep.train.optimizers import make_optimizer
from wholestep.train.presets import (
    DEFAULT_ON_CPU,
    DEFAULT_ON_GPU,
    IMAGE_DEFAULTS,
    PRESETS,
    TEXT_DEFAULTS,
    Preset,
    refuse_unknown,
)
from wholestep.train.saved import IN_EVERY_JOB, Kept, Saved, find_saved, weights_at
from wholestep.train.schedule import make_scheduler

PRECISIONS = ("fp32", "bf16", "fp16")
OWN_STEPS = 100
"""Steps of a run over the user's own function, when nothing is said."""
GRAPHS = ("runs over one whole graph at every step", "--set files=N changes its size")
"""Why there is nothing to cut, and what there is instead."""
_NO_TEXT = "ids"
"""The tokenizer of data that holds ids already."""


class Batches(Protocol):
    """Where batches come from. A batch is a pure function of its number, so one integer is the position in the data."""

    unit: str
    """What a batch holds: `tokens` or `samples`."""
    units: int
    """How many of them per batch."""

    def batch(self, number: int) -> Any:
        """Batch `number` (from 0), on the device of the model."""
        ...

    def describe(self) -> str:
        """One line: what the data is, how much of it, how it is cut."""
        ...


@dataclasses.dataclass(slots=True, kw_only=True)
class Job:
    """What a run needs. Making it again from the same settings gives the same numbers."""

    name: str
    settings: dict[str, Any]
    """Resolved, as JSON: model and its configuration, data, sizes, learning rate ... Saved with every run and checkpoint."""
    model: Any
    loss_fn: Callable[[Any, Any], Any] | None
    optimizer: Optimizer
    scheduler: Any
    """One of torch's, stepped after every step; or None."""
    batches: Batches
    compile_options: dict[str, Any]
    """For `wholestep.compile`: precision, clip_norm, accumulate."""
    held_out: Sequence[Any] = ()
    """Batches that are not trained on, on the device; may be empty."""
    edge_batches: Sequence[Any] = ()
    """Awkward batches for `verify`."""
    write_sample: Callable[[], str] | None = None
    """A text the model writes, or what it says about a few images; None when there is nothing to show."""
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    """Written beside the weights of every checkpoint: configuration and tokenizer, for other programs."""
    data_files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The files it trains on: name -> hash."""


def make_job(
    model: str | None,
    *,
    sets: Sequence[str] = (),
    data: str | None = None,
    glob: str | None = None,
    field: str | None = None,
    tokenizer: str | None = None,
    batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    steps: int | None = None,
    seed: int = 0,
    device: str | None = None,
    init: str | None = None,
) -> Job:
    """What to train, as asked: every argument that is None takes the model's own value.

    Args:
        model: a preset, `hf:<model_type>`, a folder with a config.json, a run or checkpoint, or `package.module:callable`;
            None is that of `init`, or a small GPT, larger on a GPU.
        sets: `key=value` texts: training values and fields of the model's configuration.
        data: `shakespeare`, `stdlib`, `digits`, `pygraph`, a path (docs/data.md), or `package.module:callable`.
        glob, field: which files of a folder, which field of a row.
        tokenizer: `bytes`, `bpe`, or a folder with a tokenizer.json.
        batch, seq: rows per batch, tokens per row.
        precision: fp32, bf16 or fp16; None is the model's own on a GPU, fp32 on a CPU.
        steps: how long the run is meant to be.
        seed: of weights, data and dropout.
        device: None is the GPU where there is one.
        init: a run, a checkpoint or a folder of transformers whose weights to start from, rather than drawing new ones.
    """
    where = device_named(device)
    settings, family = resolve_settings(
        model,
        sets=sets,
        data=data,
        glob=glob,
        field=field,
        tokenizer=tokenizer,
        batch=batch,
        seq=seq,
        precision=precision,
        steps=steps,
        seed=seed,
        where=where,
        init=init,
    )
    return own_job(settings, where) if family is None else _job(settings, family, where)


def resolve_settings(
    model: str | None,
    *,
    sets: Sequence[str] = (),
    data: str | None = None,
    glob: str | None = None,
    field: str | None = None,
    tokenizer: str | None = None,
    batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    steps: int | None = None,
    seed: int = 0,
    where: torch.device,
    init: str | None = None,
) -> tuple[dict[str, Any], Family | None]:
    """The first half of `make_job`: (settings, the family; None for the user's own function). Reads no data, builds no model."""
    name = model or init or (DEFAULT_ON_GPU if where.type == "cuda" else DEFAULT_ON_CPU)
    for option, value in (("batch", batch), ("seq", seq), ("steps", steps)):
        if value is not None and value < 1:
            raise BadOption(f"--{option} {value}", hint="use 1 or more")
    if precision is not None and precision not in PRECISIONS:
        close = difflib.get_close_matches(precision, PRECISIONS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use {', '.join(PRECISIONS)}"
        raise BadOption(f"--precision {precision}", hint=hint)
    family_name, defaults, saved = _located(name)
    asked = wishes.parse(sets)
    sizes: dict[str, Any] = {
        "data": data, "glob": glob, "field": field, "tokenizer": tokenizer, "batch": batch, "seq": seq, "steps": steps,
        "precision": precision,
    }  # fmt: skip
    seed = wishes.check_training("seed", asked.pop("seed", seed))
    if family_name is None:
        if init is not None and saved is None:
            hint = "load the weights in the function, or name a run of it in place of MODEL"
            raise BadOption(f"--init {init}: {name} builds its own model", hint=hint)
        if saved is not None:
            name, asked = saved.settings["model"], {**saved.settings["config"], **asked}
            sizes |= {"precision": precision or saved.settings["precision"], "steps": steps or saved.settings["steps"]}
        settings = _own_settings(name, asked, sizes, seed)
        return settings | ({"init": str(weights_at(init)[0])} if init is not None else {}), None
    family = find_family(family_name, said=name)
    weights, beside = (None, saved and saved.tokenizer) if init is None else weights_at(init)
    sizes["beside"] = beside
    settings = _settings(name, family_name, family, defaults, asked, sizes, where)
    return settings | {"seed": seed, "init": False if weights is None else str(weights)}, family


def make_job_again(
    settings: Mapping[str, Any], *, steps: int | None = None, device: str | None = None, kept: Kept | None = None
) -> Job:
    """The Job whose `settings` these are. `steps` may be changed: nothing else depends on it.

    `kept`: what the run holds of itself. With a checkpoint, weights and tokenizer come from there.
    """
    where = device_named(device)
    settings = dict(settings) | ({} if steps is None else {"steps": steps})
    missing = [name for name in IN_EVERY_JOB if name not in settings]
    if missing:
        raise BadOption(
            f"these are not the settings of a Job: {missing[0]} is missing", hint="use what Job.settings holds"
        )
    if settings["family"] is None:
        return own_job(settings, where)
    return _job(settings, find_family(settings["family"], said=settings["model"]), where, kept or Kept())


# ---- resolving ----


def device_named(name: str | None) -> torch.device:
    """The GPU where there is one, when None."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadOption(f"--device {name!r} is no device", hint="use cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadOption(f"--device {name}: this machine has no GPU that torch can use", hint="use cpu")
    return device


def _located(name: str) -> tuple[str | None, Preset | None, Saved | None]:
    """(the family, None for the user's own function; its defaults, None where there are none; the run it is)."""
    if name in PRESETS:
        return PRESETS[name].family, PRESETS[name], None
    if name.startswith("hf:"):
        return name, None, None
    path = os.path.expanduser(name)
    saved = find_saved(path) if os.path.exists(path) else None
    if saved is not None:
        return saved.family, None if saved.family is None else saved.row, saved
    if os.path.isdir(path):
        return os.path.abspath(path), None, None
    refuse_unknown(name)
    return None, None, None


def _settings(
    name: str, family_name: str, family: Family, row: Preset | None, asked: Mapping[str, Any], sizes: Mapping[str, Any],
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """Everything but seed and init; cheap mistakes are told here, before data is read or a model built."""
    if row is None:
        row = IMAGE_DEFAULTS if family.reads_images else TEXT_DEFAULTS
    training, changes = wishes.sort_out(asked, family.fields, model=name, where=family.where, typed=family.typed)
    data = sizes["data"] or row.data
    config = {**row.config, **changes}
    if family.reads_images and row is IMAGE_DEFAULTS:
        config = {"num_labels": 10} | config
    if family.reads_images and sizes["data"] not in (None, *OTHER_DATA):  # its folders say how many classes there are
        config = {key: config[key] for key in config if key in changes or key not in ("classes", "num_labels")}
    check_data_fits(data, family, name)
    chosen = {
        key: training.get(key, getattr(row, key))
        for key in ("optimizer", "lr", "weight_decay", "warmup", "schedule", "clip_norm")
    }
    steps, batch, accumulate = sizes["steps"] or row.steps, sizes["batch"] or row.batch, training.get("accumulate", 1)
    if family.reads_graphs and (batch, accumulate) != (1, 1):
        what = f"--batch {batch}" if batch != 1 else f"--set accumulate={accumulate}"
        raise BadOption(f"{what}: {name} {GRAPHS[0]}", hint=f"leave it out; {GRAPHS[1]}")
    if batch % accumulate:
        raise BadOption(
            f"--batch {batch} cannot be cut into accumulate={accumulate} equal parts", hint="use a multiple"
        )
    precision = sizes["precision"] or (row.precision if device.type == "cuda" else "fp32")
    return {
        "model": os.path.abspath(os.path.expanduser(name)) if os.path.exists(os.path.expanduser(name)) and name not in PRESETS
        else name,
        "family": family_name, "config": config, "data": _absolute(data), "data_digest": None,
        **{key: sizes[key] for key in ("glob", "field") if sizes[key] is not None},
        **_text_settings(name, family, row, config, training, sizes),
        "batch": batch, "steps": steps, "precision": precision, **chosen,
        "schedule_steps": steps if chosen["schedule"] == "cosine" else None, "accumulate": accumulate,
    }  # fmt: skip


def _absolute(data: str) -> str:
    """A path that also leads to the file from elsewhere; the names of data sets as they are."""
    path = os.path.expanduser(data)
    return os.path.abspath(path) if os.path.exists(path) and data not in (*TEXTS, *OTHER_DATA) else data


def _text_settings(
    name: str,
    family: Family,
    row: Preset,
    config: Mapping[str, Any],
    training: Mapping[str, Any],
    sizes: Mapping[str, Any],
) -> dict[str, Any]:
    """Sequence length and tokens; nothing for images and graphs."""
    if family.reads_images or family.reads_graphs:
        sees, size = ("sees images", "--set image_size=N changes their size") if family.reads_images else GRAPHS
        tokenizers = (("--set tokenizer", training.get("tokenizer")), ("--tokenizer", sizes["tokenizer"]))
        for key, given in (("--seq", sizes["seq"]), *tokenizers):
            if given is not None:
                raise BadOption(f"{key} {given}: {name} {sees}", hint=f"leave it out; {size}")
        return {}
    with_vocabulary = {"vocab_size": 256, **config} if family.task == "next" else dict(config)
    longest = family.context(family.configure(with_vocabulary))
    seq = sizes["seq"] or min(row.seq or 128, longest or 128 if row is TEXT_DEFAULTS else longest or 2048)
    check_sequence(seq, family, family.configure(with_vocabulary), name)
    vocabulary = training.get("vocabulary", row.vocabulary)
    return {"seq": seq, **_tokenizer(family, row, training, sizes), "vocabulary": vocabulary}


def _tokenizer(family: Family, row: Preset, training: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Which tokens: as asked; else those that belong to the weights or lie in the model's folder; else the model's own kind."""
    given, data = sizes["tokenizer"] or training.get("tokenizer"), sizes["data"] or row.data
    if given is not None and given not in KINDS:
        return {"tokenizer": "file", "tokenizer_file": str(find_tokenizer(Path(given).expanduser()).absolute())}
    has_ids = is_token_file(data) or is_function(data)
    if given == "bpe" and has_ids:
        hint = "leave it out, or name a folder with the tokenizer they were made with"
        raise BadOption(f"--tokenizer bpe: data {data!r} holds no text to learn from", hint=hint)
    beside = sizes.get("beside")
    if given is None and beside is None and family.folder is not None and (family.folder / TOKENIZER_FILE).is_file():
        beside = family.folder / TOKENIZER_FILE
    if given is None and beside is not None and row.tokenizer != "bytes":
        return {"tokenizer": "file", "tokenizer_file": str(beside)}
    kind = given or (_NO_TEXT if has_ids else row.tokenizer)
    if given is None and kind == "bpe" and not bpe_available():
        text = "the package tokenizers is not installed: tokens are bytes, and words take longer to learn"
        warnings.warn(text, WholestepWarning, stacklevel=5)
        kind = "bytes"
    return {"tokenizer": kind}


# ---- building ----


def _job(settings: dict[str, Any], family: Family, device: torch.device, kept: Kept | None = None) -> Job:
    """The Job of resolved settings."""
    parts = build(settings, family, device, kept or Kept())
    optimizer = make_optimizer(
        settings["optimizer"], parts.model, lr=settings["lr"], weight_decay=settings["weight_decay"]
    )
    scheduler = make_scheduler(
        settings["schedule"],
        optimizer,
        warmup=settings["warmup"],
        total=settings["schedule_steps"] or settings["steps"],
    )
    return Job(
        name=settings["model"], settings=settings | parts.found, model=parts.model, loss_fn=family.loss_fn,
        optimizer=optimizer, scheduler=scheduler, batches=parts.batches, compile_options=compile_options_of(settings),
        held_out=parts.held_out, edge_batches=parts.edge_batches, write_sample=parts.write_sample, files=parts.files,
        data_files=parts.data_files,
    )  # fmt: skip


def compile_options_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: settings[key] for key in ("precision", "clip_norm", "accumulate")}


# ---- the user's own function ----


def _own_settings(name: str, asked: dict[str, Any], sizes: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """`--set` goes to the function's parameters; so do --batch, --seq and --data where it has one of that name."""
    takes, any_other = resolve.parameters(resolve.find_function(name))
    options = {key: asked.pop(key) for key in ("clip_norm", "accumulate") if key in asked and key not in takes}
    options = {key: wishes.check_training(key, value) for key, value in options.items()}
    values = dict(asked)
    for key in values:
        if key not in takes and not any_other:
            close = difflib.get_close_matches(key, [*takes, *wishes.OWN], n=1)
            listed = f"it has {', '.join(takes)}" if takes else "it has none"
            hint = f"did you mean {close[0]}?" if close else f"{listed}; clip_norm, accumulate and seed go to the step"
            raise BadOption(f"--set {key}: {name} has no such parameter", hint=hint)
    for key in ("batch", "seq", "data", "glob", "field", "tokenizer"):
        if sizes[key] is not None:
            if key not in takes and not any_other:
                raise BadOption(f"--{key}: {name} makes its own batches", hint=f"give the function a parameter {key}")
            values[key] = sizes[key]
    return {
        "model": name, "family": None, "config": values, "data": None, "steps": sizes["steps"] or OWN_STEPS,
        "precision": sizes["precision"] or "fp32", "clip_norm": options.get("clip_norm"),
        "accumulate": options.get("accumulate", 1), "seed": seed, "init": False,
    }  # fmt: skip


def own_job(settings: dict[str, Any], device: torch.device) -> Job:
    """What the function returned, as a Job. It places its own model; batches follow the model."""
    name, seed = settings["model"], settings["seed"]
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    model, loss_fn, optimizer, fourth = resolve.resolve(name, settings["config"])
    if not isinstance(optimizer, Optimizer):
        what = "no optimizer" if optimizer is None else f"a {type(optimizer).__name__} as its optimizer"
        raise BadOption(f"{name} returned {what}", hint="return one of torch.optim: training needs it")
    if settings["init"]:
        load_weights(open_stored(Path(settings["init"])), model)
    place = _place(model, device)
    batches: Batches
    if is_iterable_of_batches(fourth):
        batches = LoaderBatches(fourth, seed, place)
    else:
        batches = OneBatch(on_device(fourth, place), place)
    return Job(
        name=name, settings=settings, model=model, loss_fn=loss_fn, optimizer=optimizer, scheduler=None, batches=batches,
        compile_options=compile_options_of(settings),
    )  # fmt: skip


def _place(model: Any, otherwise: torch.device) -> torch.device:
    """Where the model is."""
    inside = model.values() if isinstance(model, Mapping) else model if isinstance(model, (list, tuple)) else (model,)
    for module in inside:
        if isinstance(module, nn.Module):
            for parameter in module.parameters():
                return parameter.device
    return otherwise
