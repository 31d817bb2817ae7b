"""The folder of a run: made once, never overwritten, found again by `--resume` and `explain`.

    run.json        what was asked, what it resolved to, versions, device, how it went; there from the first moment
    metrics.jsonl   one row per step (train/metrics.py)
    checkpoints/    train/checkpoint.py
    run.toml        what was asked, as resolved, for `--config` (train/config_file.py)
    explain.txt     what was captured and how it runs
    loss.svg, sample.txt   at the end

A folder appears under its name with run.json already inside, so whatever a killed run leaves is a run or nothing. One process
at a time trains in it: a lock on the folder, which ends with the process, says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import platform
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wholestep.disk import read_json, why_not_new, write_whole
from wholestep.errors import BadOption, WholestepError, WholestepWarning

FORMAT = "wholestep run"
VERSION = 1
RUNS = Path("runs")
FACTS = "run.json"
CHECKPOINTS = "checkpoints"
EXPLAIN = "explain.txt"
SAMPLE = "sample.txt"
PICTURE = "loss.svg"
KINDS: dict[str, type | tuple[type, ...]] = {
    "name": str, "status": str, "created": str, "steps": int, "parameters": int, "backend": str, "data": str,
    "request": dict, "settings": dict, "compile": dict, "result": dict, "versions": dict, "device": dict,
}  # fmt: skip
"""What the entries of run.json are, where they are there; null stands for nothing."""
MOST_RUNS = 10_000
"""Numbers tried for a default name before giving up."""


@dataclasses.dataclass(slots=True)
class RunFolder:
    """A run on disk, and what its run.json holds."""

    path: Path
    facts: dict[str, Any]
    _lock: int | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def update(self, **facts: Any) -> None:
        """Put these into run.json."""
        self.facts |= facts
        write_file(self.path / FACTS, _text(self.facts))

    def take(self) -> None:
        """From now on this process is the one that trains here; an error when another one is."""
        try:
            import fcntl
        except ImportError:  # not on this system; then the user has to know
            return
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                self.release()
                raise BadOption(
                    f"another process is training in {self.path}",
                    hint="wait for it, or stop it; a new run takes another --out",
                ) from error

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Remove a run that never took a step."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.path.parent == RUNS:
            with contextlib.suppress(OSError):  # there are other runs
                RUNS.rmdir()


def new_run(out: Path | None, name: str, facts: Mapping[str, Any]) -> RunFolder:
    """A folder that was not there: `out`, or `runs/<name>`, numbered when that is taken. The disk is tried here, first of all."""
    if out is not None:
        new_run_is_possible(out)
    parent = RUNS if out is None else out.parent
    wanted = out.name if out is not None else slug(name)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "status": "compiling",
    }
    made = head | dict(facts)
    temporary = parent / f".new-{uuid.uuid4().hex[:12]}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        with (temporary / FACTS).open("w", encoding="utf-8") as file:
            file.write(_text(made))
            file.flush()
            os.fsync(file.fileno())  # a full disk may say so only here
        path = _rename(temporary, parent, wanted, numbered=out is None)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        why = f"{parent} is not a folder" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
        raise BadOption(
            f"a run cannot be written to {out or parent / wanted}: {why or error}",
            hint="name another folder with --out, or make room or permission there",
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return RunFolder(path, made)


def new_run_is_possible(out: Path) -> None:
    """An error when `out` holds something already, or cannot be made where it is."""
    why = f"{out} is a file" if out.is_file() else None if out.is_dir() else why_not_new(out)
    if why is not None:
        raise BadOption(f"a run cannot be written to {out}: {why}", hint="name another folder with --out")
    if (out / FACTS).exists():
        raise BadOption(
            f"{out} already holds a run", hint="add --resume to go on with it, or name another folder with --out"
        )
    with contextlib.suppress(OSError):  # what cannot be listed is told when it is written to
        if out.is_dir() and any(out.iterdir()):
            raise BadOption(f"{out} holds files that are no run", hint="name a folder that is new or empty with --out")


def _rename(temporary: Path, parent: Path, wanted: str, *, numbered: bool) -> Path:
    for count in range(1, MOST_RUNS):
        path = parent / (wanted if count == 1 else f"{wanted}-{count}")
        if numbered and path.exists():
            continue
        try:
            os.rename(temporary, path)
        except OSError as error:
            if not numbered or error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            continue  # another run took the name a moment ago
        return path
    raise BadOption(f"{parent} holds {MOST_RUNS} runs of {wanted}", hint="remove some, or use --out")


def slug(name: str) -> str:
    """A name fit for a folder."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"


def open_run(path: Path) -> RunFolder:
    """A run that is there: its folder, its run.json, or one of its checkpoints; an error when it is none."""
    folder = path
    for candidate in (path, path.parent if path.name == FACTS else path, path.parent, path.parent.parent):
        if (candidate / FACTS).is_file() and (candidate == path or _belongs(path, candidate)):
            folder = candidate
            break
    try:
        return RunFolder(folder, _read_facts(folder))
    except (FileNotFoundError, NotADirectoryError):
        missing = "does not exist" if not path.exists() else f"is not a run: it holds no {FACTS}"
        raise BadOption(f"{path} {missing}", hint=_known_runs()) from None
    except BadOption as error:
        raise BadOption(error.what, hint=error.hint or _known_runs()) from error


def _read_facts(folder: Path) -> dict[str, Any]:
    """run.json, found to be one. Tells of nothing but this file: the hints of an error look at the other runs, damaged or not."""
    try:
        facts = read_json(folder / FACTS)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadOption(f"{folder / FACTS} cannot be read: {why}") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise BadOption(f"{folder / FACTS} does not describe a run: it does not say {FORMAT!r}")
    if not isinstance(facts.get("version"), int) or facts["version"] > VERSION:
        what = f"{folder} has format version {facts.get('version')!r}, this Wholestep reads up to {VERSION}"
        raise BadOption(what, hint="update Wholestep")
    for name, kind in KINDS.items():
        if facts.get(name) is not None and not isinstance(facts[name], kind):
            raise BadOption(f"{folder / FACTS} is damaged: its {name!r} is a {type(facts[name]).__name__}")
    return facts


def _belongs(path: Path, run: Path) -> bool:
    """Whether `path` is run.json, checkpoints/ or one checkpoint of `run`."""
    return path in (run / FACTS, run / CHECKPOINTS) or path.parent == run / CHECKPOINTS


def _known_runs() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WholestepWarning)  # one line is about to be told, of the run that was named
        runs = [run.path for run in all_runs()[:3]]
    return (
        f"there are {', '.join(map(str, runs))}" if runs else "give the folder of a run, as `wholestep train` prints it"
    )


def all_runs(root: Path | None = None) -> list[RunFolder]:
    """The runs below `root` (by default runs/), the one that was active last first; what is damaged is passed over and said."""
    found: list[tuple[float, RunFolder]] = []
    with contextlib.suppress(OSError):
        for path in (RUNS if root is None else root).iterdir():
            if path.name.startswith("."):
                continue
            if not (path / FACTS).exists():
                continue
            try:
                times = [(path / name).stat().st_mtime for name in (FACTS, "metrics.jsonl") if (path / name).exists()]
                found.append((max(times), RunFolder(path, _read_facts(path))))
            except (OSError, WholestepError) as error:
                why = error.what if isinstance(error, WholestepError) else f"{path}: {error.strerror or error}"
                warnings.warn(f"{why}; this run is passed over", WholestepWarning, stacklevel=2)
    return [run for _, run in sorted(found, key=lambda pair: -pair[0])]


def newest_run(model: str | None, data: str | None) -> RunFolder:
    """What `--resume` without `--out` means: the newest run, of that model and data where they are given."""
    runs = all_runs()
    for run in runs:
        request, settings = run.facts.get("request") or {}, run.facts.get("settings") or {}
        same_model = model is None or model in (request.get("model"), run.facts.get("name"))
        if same_model and (data is None or data in (request.get("data"), settings.get("data"))):
            return run
    wanted = " on ".join(filter(None, (model, data)))
    what = f"there is no run of {wanted} in {RUNS}/" if wanted else f"there is no run in {RUNS}/"
    hint = f"the newest is {runs[0].path}: name it with --out" if runs else "leave --resume out to start one"
    raise BadOption(f"{what} to resume", hint=hint)


# ---- what may differ between a run and its continuation ----

MAY_GROW = ("steps",)
NOT_COMPARED = ("device",)
"""A run may go on elsewhere, though not bit for bit."""
FOLLOW = (
    "data_digest",
    "tokenizer_digest",
    "config.vocab_size",
    "config.num_labels",
    "config.classes",
    "images.classes",
)
"""Decided by data and tokenizer, which are named rather than these."""
DECISIONS = ("plan_digest", "recipe_digest")
"""Runs that are older than these do not have them."""


def refuse_changed(stored: Any, now: Any, where: Path) -> None:
    """An error naming the first setting that differs from what the run was started with, and both values."""
    change = first_change(stored, now)
    if change is not None:
        name, before, after, more = change
        raise BadOption(
            f"{where} was trained with {name}={before}, asked for now is {name}={after}{more}",
            hint="leave it as it was, or start a new run without --resume; only --steps may grow",
        )


def first_change(stored: Any, now: Any) -> tuple[str, str, str, str] | None:
    """The first setting that differs, both values, and how many more do; None when none does."""
    before, after = flat(stored), flat(now)
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name) and name not in NOT_COMPARED]
    changed = [name for name in changed if name not in DECISIONS or before.get(name) is not None]
    for name in [name for name in changed if name in MAY_GROW]:
        old, new = before.get(name), after.get(name)
        if isinstance(old, int) and isinstance(new, int) and new > old:
            changed.remove(name)
    if not changed:
        return None
    changed.sort(key=lambda name: name in FOLLOW)
    more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
    return changed[0], _shown(before, changed[0]), _shown(after, changed[0]), more


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """`{"model.layers": 4, ...}`, through JSON: a tuple and a list are the same there."""
    if not prefix:
        settings = json.loads(json.dumps(settings))
    if not isinstance(settings, dict):
        return {prefix or "settings": settings}
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= (
            flat(value, f"{prefix}.{name}" if prefix else name)
            if isinstance(value, dict)
            else ({f"{prefix}.{name}" if prefix else name: value})
        )
    return found


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return repr(settings[name]) if name in settings else "(not set)"


def surroundings(device: Any) -> dict[str, Any]:
    """Versions and device, for run.json."""
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    place: dict[str, Any] = {"type": device.type, "threads": torch.get_num_threads()}
    if device.type == "cuda":
        place |= {"name": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return {"versions": versions, "device": place}


# ---- writing ----


def write_file(path: Path, text: str) -> None:
    """A text file of the run, whole or not at all; an error says what the disk refused."""
    with telling_what_the_disk_refused(path):
        write_whole(path, text.encode())


@contextlib.contextmanager
def telling_what_the_disk_refused(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        good = max((p.name for p in (path.parent / CHECKPOINTS).glob("step-*")), default=None)
        kept = "there is no checkpoint yet" if good is None else f"checkpoint {good} is kept; make room, then --resume"
        raise WholestepError(f"{path} could not be written: {error.strerror or error}", hint=kept) from error


def _text(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, indent=1) + "\n"
