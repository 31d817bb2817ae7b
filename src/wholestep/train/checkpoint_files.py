"""Checkpoints as folders on disk: written whole, found again, checked, removed.

In: tensors by file and facts that are no tensors. Out: `folder/step-000123/`, or the newest one there, once every file in it has
been found to be the one that was saved. A damaged checkpoint is an error that names the file and the newest one that is good:
an older one would be another training than asked for. What the files hold is the matter of `checkpoint.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from wholestep.disk import read_json
from wholestep.errors import BadCheckpoint, WholestepWarning
from wholestep.train.checkpoint_hashes import HASHES, difference, read_hashes, write_hashes
from wholestep.train.encoding import DTYPES, decode

if TYPE_CHECKING:  # finding a checkpoint, and finding it damaged, needs no torch
    from torch import Tensor

FORMAT = "wholestep checkpoint"
VERSION = 1
"""Raised when an older Wholestep could not read what is written now."""
FACTS = "checkpoint.json"
_NAME = re.compile(r"step-(\d{6,})(\.replaced)?")
_UNFINISHED = (".saving-", ".removing-")
_ASIDE = "set-aside-"


def folder_name(number: int) -> str:
    return f"step-{number:06d}"


def write(
    root: Path,
    number: int,
    files: Mapping[str, tuple[dict[str, Tensor], dict[str, str]]],
    facts: dict,
    beside: Mapping[str, bytes],
) -> Path:
    """`beside`: name -> content of files that are no tensors."""
    final = root / folder_name(number)
    temporary = root / f"{_UNFINISHED[0]}{final.name}-{uuid.uuid4().hex[:8]}"
    try:
        temporary.mkdir()
        for name, (tensors, metadata) in files.items():
            save_tensors(tensors, temporary / name, metadata)
            _sync(temporary / name)
        for name, content in beside.items():
            (temporary / name).write_bytes(content)
            _sync(temporary / name)
        sizes = {name: (temporary / name).stat().st_size for name in files}
        head = {"format": FORMAT, "version": VERSION, "number": number, "files": sizes, "hashes": HASHES}
        head |= {"beside": {name: len(content) for name, content in beside.items()}}
        (temporary / FACTS).write_text(json.dumps(head | facts, indent=1) + "\n", encoding="utf-8")
        _sync(temporary / FACTS)
        _sync(write_hashes(temporary, [*files, *beside, FACTS]))
        _sync(temporary)
        replaced = final.with_name(final.name + ".replaced")
        if final.exists():  # a folder cannot be renamed over another; `load` also finds it under this name
            os.rename(final, replaced)
        os.rename(temporary, final)
        _sync(root)
        if replaced.exists():
            discard(replaced)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """A file of safetensors, written a tensor at a time: weights and state of a large model are more than a host's memory.
    Equal tensors are equal bytes."""
    import torch

    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that all are aligned
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name in names:
        tensor, begin = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        kind = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            flat = tensors[name].detach().cpu().resolve_neg().contiguous().view(-1)
            if flat.numel():
                file.write(flat.view(torch.uint8).numpy().data)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def telling_what_the_disk_refused(root: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        good = next((path.name for _, path in checkpoints(root) if _is_complete(path)), None)
        kept = "there is no earlier checkpoint" if good is None else f"{good} is complete and kept"
        raise BadCheckpoint(f"the checkpoint could not be written to {root}: {why}", hint=kept) from error


def discard(path: Path) -> None:
    """Remove a checkpoint: renamed first, so that half of one is never taken for a checkpoint."""
    hidden = path.with_name(f"{_UNFINISHED[1]}{path.name}-{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(OSError):  # the next save tries again
        os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def set_aside_newer(root: Path, number: int) -> list[Path]:
    """Rename checkpoints after `number`, so that they are kept and never taken for the newest; their new paths."""
    found = []
    for newer, path in checkpoints(root):
        if newer > number:
            wanted = (path.with_name(f"{_ASIDE}{'' if i == 1 else f'{i}-'}{path.name}") for i in itertools.count(1))
            found.append(path.rename(next(other for other in wanted if not other.exists())))
    return found


def clean(root: Path) -> None:
    """Remove what killed runs left, and finish a replacement they began."""
    for path in root.iterdir():
        if path.name.startswith(_UNFINISHED):
            shutil.rmtree(path, ignore_errors=True)
        elif path.suffix == ".replaced" and _NAME.fullmatch(path.name):
            if path.with_suffix("").exists():
                discard(path)
            else:
                os.rename(path, path.with_suffix(""))


# ---- finding and reading ----


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint on disk whose files are all there."""

    path: Path
    facts: dict[str, Any]

    @property
    def number(self) -> int:
        return int(self.facts["number"])

    def part(self, name: str, tensors: Mapping[str, Tensor] | None = None) -> Any:
        """What an object given to `load` needs; an error when there was none to save."""
        if name not in self.facts:
            raise BadCheckpoint(f"{self.path} was saved without {name}=", hint=f"load it without {name}=")
        return decode(self.facts[name], tensors)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Of one file; none when it was not written. They lie in the mapped file until they are copied."""
        return read_tensors(self.path / name)[0] if name in self.facts["files"] else {}


def checkpoints(root: Path) -> list[tuple[int, Path]]:
    """(number, folder), newest first; a folder being replaced comes after the one that replaces it."""
    try:
        found = [(match, path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    except OSError:
        return []
    ordered = sorted(found, key=lambda pair: (-int(pair[0][1]), pair[0][2] is not None))
    return [(int(match[1]), path) for match, path in ordered]


def open_stored(folder: Path, *, taken_by: str = "load({!r})") -> Stored:
    """The checkpoint to load: the newest below `folder`, or the one that `folder` is. `taken_by` says how to take another one."""
    if not folder.is_dir():
        raise BadCheckpoint(f"there is no folder {folder}", hint="give the folder that was given to save")
    path, beside = folder, checkpoints(folder)
    if (folder / FACTS).exists() or (_NAME.fullmatch(folder.name) and not beside):
        beside = checkpoints(folder.parent)
    elif beside:
        path = beside[0][1]
    else:
        raise BadCheckpoint(f"{folder} holds no checkpoint", hint="give the folder that was given to save")
    damage = _damage(path)
    if damage is not None:
        good = next((other for _, other in beside if other.name != path.name and _is_complete(other)), None)
        hint = "no other checkpoint beside it is good" if good is None else (
            f"{good.name} is good: take it with `{taken_by.format(str(good))}`"
        )  # fmt: skip
        raise BadCheckpoint(f"{path} is damaged: {damage}", hint=hint)
    stored = Stored(path, _read_facts(path))
    if "hashes" not in stored.facts:
        text = f"{path} was saved without hashes, by an older Wholestep: bytes that changed in it since would not be noticed"
        warnings.warn(text, WholestepWarning, stacklevel=3)
    return stored


def _read_facts(path: Path) -> dict[str, Any]:
    """checkpoint.json; ValueError or OSError when damaged, BadCheckpoint when it is none of ours or too new."""
    facts = read_json(path / FACTS)
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise BadCheckpoint(f"{path} was not written by wholestep.save: {FACTS} does not say {FORMAT!r}")
    if not isinstance(facts.get("version"), int) or facts["version"] > VERSION:
        what = f"{path} has format version {facts.get('version')!r}, this Wholestep reads up to {VERSION}"
        raise BadCheckpoint(what, hint="update Wholestep")
    return facts


def _damage(path: Path) -> str | None:
    """What is wrong with which file, or None. Reads every byte; without hashes only sizes and headers can be compared."""
    name = HASHES
    try:
        hashes = read_hashes(path)
        name = FACTS
        if hashes is not None and (wrong := difference(path, FACTS, hashes)):
            return wrong
        facts = _read_facts(path)
        if hashes is None and "hashes" in facts:
            return f"{HASHES} is missing"
        named = _NAME.fullmatch(path.name)
        if named and facts["number"] != int(named[1]):
            return f"{FACTS} is of step {facts['number']!r}"
        for name, size in (facts["files"] | facts.get("beside", {})).items():
            found = (path / name).stat().st_size
            if found != size:
                return f"{name} has {found:,} bytes instead of {size:,}"
            if hashes is not None and (wrong := difference(path, name, hashes)):
                return wrong
            if name in facts["files"]:
                with safe_open(path / name, framework="np"):
                    pass
    except BadCheckpoint:
        raise
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        return f"{name} cannot be read ({error})"
    return None


def _is_complete(path: Path) -> bool:
    try:
        return _damage(path) is None
    except BadCheckpoint:  # none of ours
        return False


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file."""
    with safe_open(path, framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
