"""`--set key=value`: text to typed values, each key known and each value of the right kind, or one clear line.

In: the texts, the fields of the model's configuration. Out: (training values, configuration values).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from wholestep.data.tokens import KINDS
from wholestep.errors import BadOption, did_you_mean
from wholestep.train.presets import OPTIMIZERS, SCHEDULES

TRAINING: dict[str, tuple[type, float | None, str]] = {
    "lr": (float, 0.0, "learning rate at its peak"),
    "weight_decay": (float, 0.0, "of matrices"),
    "warmup": (int, 0, "steps until the learning rate is at its peak"),
    "schedule": (str, None, ", ".join(SCHEDULES)),
    "clip_norm": (float, 0.0, "largest norm of all gradients together; none for no limit"),
    "accumulate": (int, 1, "parts into which a batch is cut"),
    "optimizer": (str, None, ", ".join(OPTIMIZERS)),
    "tokenizer": (str, None, ", ".join(KINDS)),
    "vocabulary": (int, 256, "how many ids a BPE has"),
    "seed": (int, 0, "of weights, data and dropout"),
}
"""Training value -> its type, its least value, what it means."""
_CHOICES: dict[str, tuple[str, ...]] = {"schedule": SCHEDULES, "optimizer": OPTIMIZERS, "tokenizer": KINDS}
_END = {"seed": 2**63, "vocabulary": 10**7, "accumulate": 2**31, "warmup": 2**63}
"""Less than these; a tokenizer takes memory for all the ids it may have."""
OWN = ("clip_norm", "accumulate", "seed")
"""Those that count for a function of the user's own, which has an optimizer already."""
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Of a configuration of transformers, which may take any number until a layer is built."""
_OPTIONS = ("batch", "seq", "steps", "data", "precision", "device")
_WORDS = {"none": None, "null": None, "true": True, "false": False, "yes": True, "no": False}


def parse(texts: Sequence[str]) -> dict[str, Any]:
    """`key=value` texts as typed values: JSON where it is JSON, else the text itself. The last of a key counts."""
    parsed: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise BadOption(f"--set {text!r} is not key=value", hint="for example --set lr=1e-3")
        parsed[key.strip()] = _value(value.strip())
    return parsed


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for read in (json.loads, float):  # float reads 1e-3, .5 and 1_000, which JSON does not
        try:
            return read(text)
        except ValueError:
            continue
    return text


def sort_out(
    wishes: Mapping[str, Any], fields: Mapping[str, Any], *, model: str, where: str, typed: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(training values, configuration values). `fields`: name -> default of the model's configuration, described by `where`;
    with `typed` a value must be of its default's type, otherwise the configuration class checks."""
    training: dict[str, Any] = {}
    config: dict[str, Any] = {}
    for key, value in wishes.items():
        if key in fields:
            kind = type(fields[key])
            config[key] = _as(key, value, kind) if typed and kind in (int, float, bool, str) else value
            if not typed and key in _SIZES and type(value) is int and value < 1:
                raise BadOption(f"--set {key}={value}", hint="use 1 or more")
        elif key in TRAINING:
            training[key] = check_training(key, value)
        else:
            raise _unknown(key, fields, model, where)
    return training, config


def _unknown(key: str, fields: Mapping[str, Any], model: str, where: str) -> BadOption:
    if key in _OPTIONS:
        return BadOption(f"--set {key} is an option of its own", hint=f"use --{key} VALUE")
    listed = f"{model} takes {', '.join(TRAINING)} and {where}"
    hint = f"{did_you_mean(key, [*TRAINING, *fields])} {listed}".strip()
    return BadOption(f"--set {key}: there is no such key", hint=hint)


def check_training(key: str, value: Any) -> Any:
    """`value` as the training value `key` wants it."""
    kind, least, _ = TRAINING[key]
    if key == "clip_norm" and value is None:
        return None
    value = _as(key, value, kind)
    if key in _CHOICES and value not in _CHOICES[key]:
        hint = did_you_mean(value, _CHOICES[key], f"use {' or '.join(_CHOICES[key])}")
        raise BadOption(f"--set {key}={value}", hint=hint)
    if key in ("lr", "clip_norm") and value <= 0:
        raise BadOption(f"--set {key}={value}", hint="use more than 0")
    if least is not None and value < least:
        raise BadOption(f"--set {key}={value}", hint=f"use {least:g} or more")
    if key in _END and value >= _END[key]:
        raise BadOption(f"--set {key}={value}", hint=f"use less than {_END[key]:,}")
    return value


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}


def _as(key: str, value: Any, kind: type) -> Any:
    """`value` as `kind`; 1e3 is a whole number, 1 is a number, and true is neither."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int and number and float(value).is_integer():
        return int(value)
    if kind is float and number and math.isfinite(value):
        return float(value)
    if kind in (bool, str) and isinstance(value, kind):
        return value
    raise wrong_kind(key, value, kind)


def wrong_kind(key: str, value: Any, *kinds: type) -> BadOption:
    """The error for a value of another kind; every whole number is a number."""
    wanted = " or ".join(_NAMES[kind] for kind in kinds if not (kind is int and float in kinds))
    return BadOption(f"--set {key}={value}: not {wanted}", hint=f"give {key} {wanted}")
