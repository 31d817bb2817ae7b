"""A run or a checkpoint in place of MODEL, of `--init`, or of what is sampled, evaluated and exported.

In: a path. Out: a Saved: the settings it was trained with, the checkpoint with its weights, the tokenizer beside them. Finding one
reads little; `open` reads every byte of the checkpoint, to find it whole.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wholestep.data.tokens import KINDS, TOKENIZER_FILE, find_tokenizer
from wholestep.disk import read_json, why_not_new
from wholestep.errors import BadOption
from wholestep.train import run_folder
from wholestep.train.checkpoint_files import FACTS, Stored, checkpoints, open_stored
from wholestep.train.encoding import decode
from wholestep.train.presets import Preset

DATA_FILES = "data.json"
"""In the folder of a run: the hash of every file it is trained on."""
CONFIG_FILE = "config.json"
IN_EVERY_JOB = ("family", "config", "model", "steps", "precision", "clip_norm", "accumulate", "seed")
"""Settings of every job."""


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """What a run left."""

    where: Path
    """As it was named."""
    settings: dict[str, Any]
    checkpoint: Path | None
    """The newest, or the one that was named; None when the run has none yet."""

    def open(self) -> Stored:
        """The checkpoint, found whole."""
        if self.checkpoint is None:
            raise BadOption(f"{self.where} holds no checkpoint yet", hint="wait for its first, or train it first")
        return open_stored(self.checkpoint, taken_by="{}")

    @property
    def tokenizer(self) -> Path | None:
        return _file(self.checkpoint, TOKENIZER_FILE)

    @property
    def family(self) -> str | None:
        """A folder of transformers that a run was made of may be gone: its checkpoint holds the configuration too."""
        name = self.settings["family"]
        if name is not None and os.path.isabs(name) and _file(self.checkpoint, CONFIG_FILE):
            return str(self.checkpoint)
        return name

    @property
    def row(self) -> Preset:
        """The settings as the defaults of another job."""
        fields = {f.name for f in dataclasses.fields(Preset)} & self.settings.keys()
        values = {name: self.settings[name] for name in fields - {"family", "config", "summary", "parameters"}}
        if values.get("tokenizer") in ("bpe", "file") and self.tokenizer is not None:
            values["tokenizer"] = "file"
        config = {} if self.family == str(self.checkpoint) else self.settings["config"]
        return Preset(summary="", parameters=0, family=self.family or "", config=config, **values)


def find_saved(name: str) -> Saved | None:
    """The run or checkpoint at that path; None when it is neither, an error when it is a damaged one."""
    path = Path(name).expanduser()
    if path.name == FACTS:
        path = path.parent
    if (path / FACTS).is_file():
        return _saved(path, _config(path), path.absolute())
    inside = path if path.is_dir() else path.parent
    is_run = (inside / run_folder.FACTS).is_file() or (
        path.name == run_folder.CHECKPOINTS and (path.parent / run_folder.FACTS).is_file()
    )
    if is_run:
        run = run_folder.open_run(path)
        newest = next((found for _, found in checkpoints(run.checkpoints)), None)
        return _saved(path, run.facts.get("settings"), None if newest is None else newest.absolute())
    return None


def _saved(where: Path, settings: Any, checkpoint: Path | None) -> Saved:
    lacking = None if isinstance(settings, dict) else "settings"
    lacking = lacking or next((name for name in IN_EVERY_JOB if name not in settings), None)
    if lacking is not None:
        what = f"{where} does not say how its model is built: {lacking} is missing"
        raise BadOption(what, hint="it was not saved by `wholestep train`; load it with wholestep.load")
    return Saved(where, settings, checkpoint)


def _config(checkpoint: Path) -> Any:
    try:
        return decode(read_json(checkpoint / FACTS)["config"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadOption(
            f"{checkpoint / FACTS} cannot be read: {type(error).__name__}", hint="name another checkpoint"
        ) from None


def _file(folder: Path | None, name: str) -> Path | None:
    return folder / name if folder is not None and (folder / name).is_file() else None


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """What a run that is resumed holds of itself, so that nothing it was made of has to be there still."""

    files: Mapping[str, str] | None = None
    """Of its data: name -> hash."""
    checkpoint: Path | None = None

    @classmethod
    def by(cls, folder: Path) -> Kept:
        """What the folder of a run holds."""
        try:
            files = read_json(folder / DATA_FILES)["files"]
        except (OSError, ValueError, KeyError, TypeError):
            files = None
        newest = next((found for _, found in checkpoints(folder / run_folder.CHECKPOINTS)), None)
        return cls(files if isinstance(files, dict) else None, newest)

    @property
    def tokenizer(self) -> Path | None:
        return _file(self.checkpoint, TOKENIZER_FILE)


def has_weights(model: str) -> bool:
    """Whether there are weights where MODEL says how the model is built."""
    path = Path(model).expanduser()
    saved = find_saved(model) if path.exists() else None
    return saved.checkpoint is not None if saved is not None else path.is_dir() and any(path.glob("*.safetensors"))


def is_model_folder(folder: Path) -> bool:
    """Whether transformers would open it: a configuration, and weights."""
    return (folder / CONFIG_FILE).is_file() and any(folder.glob("*.safetensors"))


def no_run(name: str) -> BadOption:
    what = f"{name} is neither a run nor a folder with a {CONFIG_FILE} and .safetensors weights"
    return BadOption(what, hint="give the folder of a run, as `wholestep train` prints it")


def given_tokenizer(given: str) -> Path:
    """The tokenizer.json that `--tokenizer` names for a model that is trained already."""
    if given in KINDS:
        hint = "leave it out for that of the run, or name a folder with a tokenizer.json"
        raise BadOption(f"--tokenizer {given}: the model has learnt its tokens", hint=hint)
    return find_tokenizer(Path(given).expanduser())


def refuse_taken(out: Path) -> None:
    """An error when an export cannot be written there."""
    try:
        taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    except OSError as error:
        raise BadOption(f"{out} cannot be looked into: {error.strerror}", hint="name another place") from None
    if taken:
        raise BadOption(f"{out} exists already", hint="name a folder or file that is new")
    why = why_not_new(out)
    if not out.exists() and why is not None:
        raise BadOption(f"{out} cannot be written: {why}", hint="name another place")


def weights_at(init: str) -> tuple[Path, Path | None]:
    """What `--init` names: (the folder with the weights, its tokenizer)."""
    saved = find_saved(init)
    if saved is not None:
        if saved.checkpoint is None:
            raise BadOption(f"--init {init}: the run holds no checkpoint yet", hint="wait for its first")
        return saved.checkpoint, saved.tokenizer
    folder = Path(init).expanduser().absolute()
    if not folder.is_dir():
        raise BadOption(
            f"--init {init}: there is no such folder", hint="name a run, a checkpoint, or a folder with weights"
        )
    if not any(folder.glob("*.safetensors")):
        raise BadOption(
            f"--init {init}: there are no .safetensors weights in it", hint="leave --init out to draw new weights"
        )
    return folder, _file(folder, TOKENIZER_FILE)
