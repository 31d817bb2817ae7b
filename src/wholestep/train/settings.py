"""Resolves a request into settings: plain JSON from which a Job is built (job.py).

In: MODEL, data, sizes and `--set`. Out: (settings, the family of the model). No data is read, no model built, and for models of
this package torch is not loaded, so most mistakes are reported at once.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wholestep.data.image_files import IMAGES_WANTED
from wholestep.data.texts import OTHER_DATA, TEXTS, unknown_data
from wholestep.data.token_files import is_token_file
from wholestep.data.tokens import KINDS, TOKENIZER_FILE, bpe_available, find_tokenizer
from wholestep.errors import BadOption, WholestepWarning, did_you_mean, one_of
from wholestep.graph.plan_file import PRECISIONS
from wholestep.train import resolve, wishes
from wholestep.train.families import Family, find_family
from wholestep.train.presets import (
    DEFAULT_ON_CPU,
    DEFAULT_ON_GPU,
    IMAGE_DEFAULTS,
    PRESETS,
    TEXT_DEFAULTS,
    Preset,
    refuse_unknown,
)
from wholestep.train.saved import Saved, find_saved, weights_at

OWN_STEPS = 100
"""Steps of a run over the user's own function, when nothing is said."""
GRAPHS = ("runs over one whole graph at every step", "--set files=N changes its size")
"""Why there is nothing to cut, and what there is instead."""
_NO_TEXT = "ids"
"""The tokenizer of data that holds ids already."""


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
    on_gpu: bool,
    init: str | None = None,
    find: Callable[..., Family] = find_family,
) -> tuple[dict[str, Any], Family | None]:
    """(settings, the family; None for the user's own function). Every argument that is None takes the model's own value.

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
        on_gpu: whether the defaults of a GPU are taken.
        init: a run, a checkpoint or a folder of transformers whose weights to start from, rather than drawing new ones.
        find: how the family of a model is found by its name.
    """
    name = model or init or (DEFAULT_ON_GPU if on_gpu else DEFAULT_ON_CPU)
    _refuse_values(precision, batch=batch, seq=seq, steps=steps)
    if init is not None and not (model and is_function(model)):  # a function is refused whatever the weights are
        weights_at(init)
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
    family = find(family_name, said=name)
    weights, beside = (None, saved and saved.tokenizer) if init is None else weights_at(init)
    sizes["beside"] = beside
    settings = _settings(name, family_name, family, defaults, asked, sizes, on_gpu)
    return settings | {"seed": seed, "init": False if weights is None else str(weights)}, family


def _refuse_values(precision: str | None, **counts: int | None) -> None:
    for option, value in counts.items():
        if value is not None and value < 1:
            raise BadOption(f"--{option} {value}", hint="use 1 or more")
    one_of("--precision", precision, PRECISIONS)


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
    on_gpu: bool,
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
    precision = sizes["precision"] or (row.precision if on_gpu else "fp32")
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


# ---- what fits what ----


def is_function(data: str) -> bool:
    """`package.module:callable`."""
    return ":" in data and not os.path.exists(os.path.expanduser(data))


def check_data_fits(data: str, family: Family, said: str) -> None:
    """Text for what reads text, images for what sees them, a graph for what runs over one."""
    wanted, verb = (
        ("images", "sees")
        if family.reads_images
        else ("a graph", "runs over")
        if family.reads_graphs
        else ("text", "reads")
    )
    own = os.path.exists(os.path.expanduser(data)) and data not in (*TEXTS, *OTHER_DATA)
    if is_function(data) and not family.reads_graphs:
        return
    if own and family.reads_images and not os.path.isdir(os.path.expanduser(data)):
        raise BadOption(f"data {data!r} is one file, {said} sees images", hint=f"give {IMAGES_WANTED}")
    if own and not family.reads_graphs:
        return
    if family.reads_images and data not in (*TEXTS, *OTHER_DATA):
        raise unknown_data(data, tuple(OTHER_DATA))
    is_a = OTHER_DATA.get(data, "text")
    if is_a != wanted:
        fitting = [name for name, what in OTHER_DATA.items() if what == wanted]
        hint = f"use {fitting[0]}" if fitting else f"use {', '.join(TEXTS)} or the path of a text file or folder"
        if wanted == "images":
            hint += f", or give {IMAGES_WANTED}"
        raise BadOption(f"data {data!r} is {is_a}, {said} {verb} {wanted}", hint=hint)


def check_sequence(seq: int, family: Family, config: Any, said: str) -> None:
    """A sequence the model can read."""
    longest = family.context(config)
    if longest is not None and seq > longest:
        longer = f" or --set {family.longer}={seq}" if family.longer else ""
        raise BadOption(
            f"--seq {seq}: {said} reads at most {longest} tokens", hint=f"use --seq {longest} or less{longer}"
        )
    if family.task == "causal" and seq < 2:
        raise BadOption(f"--seq {seq}: there is no next token to learn", hint="use --seq 2 or more")


# ---- the user's own function ----


def _own_settings(name: str, asked: dict[str, Any], sizes: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """`--set` goes to the function's parameters; so do --batch, --seq and --data where it has one of that name."""
    takes, any_other = resolve.parameters(resolve.find_function(name))
    options = {key: asked.pop(key) for key in ("clip_norm", "accumulate") if key in asked and key not in takes}
    options = {key: wishes.check_training(key, value) for key, value in options.items()}
    values = dict(asked)
    for key in values:
        if key not in takes and not any_other:
            listed = f"it has {', '.join(takes)}" if takes else "it has none"
            otherwise = f"{listed}; clip_norm, accumulate and seed go to the step"
            hint = did_you_mean(key, [*takes, *wishes.OWN], otherwise)
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
