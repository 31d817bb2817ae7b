"""Finds mistakes without torch, which takes seconds to load: in names, values, paths and files.

In: a request. Out: the error that would come later; or what was found, for callers that look further. What only torch,
transformers or the user's code can decide is left to them.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wholestep.data import look
from wholestep.data.sources import refuse_given
from wholestep.data.texts import OTHER_DATA, TEXTS
from wholestep.data.tokens import read_tokens
from wholestep.errors import BadOption, NotEnoughMemory, WholestepError, WholestepWarning
from wholestep.graph.bytes import show_bytes
from wholestep.train import resolve
from wholestep.train.checkpoint_files import checkpoints, open_stored
from wholestep.train.families import Family, find_by_sources, image_shape
from wholestep.train.models.configs import LAYERS, GPTConfig, ResNetConfig
from wholestep.train.presets import DEFAULT_ON_CPU, DEFAULT_ON_GPU, refuse_missing
from wholestep.train.run_folder import FACTS, RunFolder
from wholestep.train.saved import find_saved, given_tokenizer, is_model_folder, no_run
from wholestep.train.settings import is_function, resolve_settings

_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""One of them is there where torch may find a GPU."""

MOST_TIMES = 16
"""A card may hold more than the host, though not so many times more."""
_CHECKPOINT_BYTES = 2**26
"""Hashed in a fifth of a second; larger ones are looked at once, when they are loaded."""

Found = tuple[dict[str, Any], Family]


class _LeftToThePackage(Exception):
    """Only transformers itself can tell."""


def look_ahead(
    model: str | None,
    *,
    init: str | None = None,
    on_gpu: bool = False,
    reads_data: bool = True,
    keeps_all: bool = False,
    **asked: Any,
) -> Found | None:
    """An error where `make_job` would find one, as far as that can be seen from here; else the settings and the family, or None.

    Args:
        on_gpu: whether the defaults of a GPU are taken.
        reads_data: whether data is read at all.
        keeps_all: whether a step is run, and neither a budget, a plan nor a recipe lets it recompute what it needs again.
        asked: as for `resolve_settings`.
    """
    names = [model or init] if model or init else [DEFAULT_ON_CPU]
    if not (model or init) and any(map(os.path.exists, _DEVICES)):
        names.append(DEFAULT_ON_GPU)
    errors = []
    for name in names:  # which of the defaults it will be is not known yet: both have to be wrong
        try:
            found = _looked(name, model, init, on_gpu, asked)
            break
        except WholestepError as error:
            errors.append(error)
    else:
        raise errors[-1]
    if found is not None and reads_data:
        _refuse_impossible(*found, keeps_all=keeps_all)
        look_at_data(*found)
    return found


def _looked(
    name: str | None, model: str | None, init: str | None, on_gpu: bool, asked: Mapping[str, Any]
) -> Found | None:
    assert name is not None
    if is_function(name) and not name.startswith("hf:"):
        resolve.refuse_missing(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WholestepWarning)  # they come later, once
        try:
            settings, family = resolve_settings(
                model or (None if init else name), init=init, on_gpu=on_gpu, find=_by_sources, **asked
            )
        except _LeftToThePackage:
            return None
    return None if family is None else (settings, family)


def _by_sources(name: str, *, said: str) -> Family:
    family = find_by_sources(name, said=said)
    if family is None:
        raise _LeftToThePackage
    return family


def _refuse_impossible(settings: Mapping[str, Any], family: Family, *, keeps_all: bool) -> None:
    """Sizes that no memory here could hold: a batch or weights as plain numbers, or what a step at least keeps of them."""
    import psutil

    has, rows = psutil.virtual_memory().total + psutil.swap_memory().total, settings["batch"]
    made = family.configure({"vocab_size": 256, **settings["config"]} if family.task == "next" else settings["config"])
    size, channels = image_shape(made) if family.reads_images else (1, 1)
    batch = 4 * rows * settings.get("seq", 1) * size * size * channels
    if batch > has:
        what = f"--batch {rows}: one batch takes {show_bytes(batch)}, this machine has {show_bytes(has)}"
        raise BadOption(what, hint="use a smaller batch")
    most = MOST_TIMES * has if any(map(os.path.exists, _DEVICES)) else has
    if family.task == "next":
        weights = 4 * (12 * made.layers * made.width**2 + made.width * (made.vocab_size + made.context))
        if weights > MOST_TIMES * has:
            what = f"a model of {show_bytes(weights)}: this machine has {show_bytes(has)}"
            raise BadOption(what, hint="use fewer layers, or a smaller width, context or vocab_size")
    kept = rows // settings["accumulate"] * settings.get("seq", 1) * _least_kept(made)
    kept *= 4 if settings["precision"] == "fp32" else 2
    if keeps_all and kept > most:
        raise NotEnoughMemory(
            f"--batch {rows}: a step keeps more than {show_bytes(kept)} for its backward pass, this machine has {show_bytes(has)}",
            hint="use a smaller batch, or a budget (--memory), which recomputes values in the backward pass",
        )


def _least_kept(made: Any) -> int:
    """Fewer values than a step keeps for its backward pass where nothing is recomputed: per token, or per image of a ResNet.

    What goes into products and convolutions has to be there again: in a layer of a GPT ten times its width (eight are counted),
    in a block of a ResNet its result. Of a layer of transformers, which may be of any kind, its input.
    """
    if isinstance(made, GPTConfig):
        return 8 * made.layers * made.width
    if isinstance(made, ResNetConfig):
        side, growth = made.image_size // (1 if made.stem == "small" else 4), 1 if made.depth == 18 else 4
        return sum(
            count * growth * made.width * 2**stage * (side // 2**stage) ** 2
            for stage, count in enumerate(LAYERS[made.depth])
        )
    layers, width = (getattr(made, name, None) for name in ("num_hidden_layers", "hidden_size"))
    return layers * width if isinstance(layers, int) and isinstance(width, int) else 0


def look_at_data(settings: Mapping[str, Any], family: Family) -> None:
    """The files of the data and the tokenizer."""
    if settings.get("tokenizer_file"):
        read_tokens(Path(settings["tokenizer_file"]))
    data, glob, field = settings["data"], settings.get("glob"), settings.get("field")
    if is_function(data) or data in (*TEXTS, *OTHER_DATA):
        refuse_given(data, glob=glob, field=field)
        if is_function(data):
            resolve.refuse_missing(data, what="data")
    else:
        path = Path(data).expanduser()
        if family.reads_images:
            look.at_images(path, glob)
        else:
            exact = settings["tokenizer"] in ("bytes", "bpe")  # a token is a byte or more
            least = settings["seq"] * (2 if family.task == "seq2seq" else 1) if exact else 0
            look.at_texts(path, glob, field, least=least, seq=settings["seq"])


def look_at_run(folder: RunFolder, checkpoint: Path | None = None) -> None:
    """A run that is resumed: its data, and the checkpoint that it goes on from."""
    settings = folder.facts.get("settings")
    if not settings:
        what = f"{folder.path / FACTS} does not say what is trained: settings is missing"
        raise BadOption(what, hint="start a new run without --resume; this one has not begun")
    family = settings.get("family") and find_by_sources(settings["family"], said=str(settings.get("model")))
    if family and isinstance(settings.get("data"), str):
        with contextlib.suppress(KeyError, TypeError):  # damaged, which is told when a job is made of it
            look_at_data({**settings, "tokenizer_file": None}, family)  # its checkpoint has the tokenizer
    stored = checkpoint or next((path for _, path in checkpoints(folder.checkpoints)), None)
    if stored is not None:
        look_at_checkpoint(stored, taken_by="wholestep train --resume --out {}")


def look_at_trained(run: str, *, tokenizer: str | None = None, **asked: Any) -> str | None:
    """What is sampled, evaluated or exported; the task it was trained for, None where that is not known yet.

    `asked`: other data and sizes to evaluate it on.
    """
    refuse_missing(run)
    saved = find_saved(run)
    if saved is None and not is_model_folder(Path(run).expanduser()):
        raise no_run(run)
    if saved is not None and saved.checkpoint is None:
        saved.open()
    if saved is not None and saved.checkpoint is not None:
        look_at_checkpoint(saved.checkpoint)
    if tokenizer is not None:
        read_tokens(given_tokenizer(tokenizer))
    given = {name: value for name, value in asked.items() if value is not None}
    found = look_ahead(run, reads_data="data" in given, **given)
    return None if found is None else found[1].task


def look_at_checkpoint(path: Path, *, taken_by: str = "{}") -> None:
    """Whether a checkpoint is whole, where that is soon found out."""
    with contextlib.suppress(OSError):
        if sum(file.stat().st_size for file in path.iterdir()) > _CHECKPOINT_BYTES:
            return
    open_stored(path, taken_by=taken_by)
