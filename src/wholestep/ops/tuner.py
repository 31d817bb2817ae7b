"""The tuner: which of several ways to compute a thing is taken, by measurement, remembered.

In: a Question (what is chosen, for which call, the candidates). Out: a Choice, the one kind of record for attention kernels, forms
of a product, compiled against interpreted code, and recorded against direct steps; with the times, and why others were ruled out.

A candidate is asked whether it supports the call, compared with the reference on stand-ins, and raced against the others. The
verdict stays in the process and on disk (`choices/` of the cache folder, one file per question, so that processes do not meet),
for one card, driver, version of torch, Triton and Wholestep, and source of the candidates: a changed kernel is measured again. A
resumed run takes the same code, hence ends on the same bits. Nothing is measured while a CUDA graph is recorded, nor in float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from wholestep import compat
from wholestep.disk import cache_folder, read_bytes, write_json
from wholestep.errors import BadOption, NoSuchKernel, did_you_mean
from wholestep.ops.timing import Clock, Failure, Rules, clock_of, race

MEASURED, REMEMBERED = "measured", "remembered"
ONLY_ONE, BY_RULE = "the only one", "by rule"
FLOAT64, RECORDING = "the reference, for float64", "not measured while recording"
NAMED, ASKED_FOR, REFUSED = "named by the plan", "asked for", "refused"
FASTEST = Rules()


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What was taken for one call, and why."""

    what: str
    """`attention`, `weight gradient`, `lowering` or `cuda graph`."""
    call: str
    """Its signature, for people."""
    name: str
    source: str
    """Where it comes from: measured now, remembered, the only one, ..."""
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    ruled_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    short_of_memory: bool = False
    """Whether memory did not suffice to try one that might have won: good for this process, not for others, which may have more."""

    def __str__(self) -> str:
        """`attention flash 0.12 ms (cudnn 0.15)`, or the reason where there are no times."""
        if self.name in self.seconds:
            others = sorted((taken, name) for name, taken in self.seconds.items() if name != self.name)
            beside = ", ".join(f"{name} {1e3 * taken:.2f}" for taken, name in others)
            asked = f"{self.source}; " if self.source == ASKED_FOR else ""
            return f"{self.what} {self.name} {1e3 * self.seconds[self.name]:.2f} ms" + (
                f" ({asked}{beside})" if beside else ""
            )
        reason = next(iter(self.ruled_out.values()), self.source) if self.source == REFUSED else self.source
        return f"{self.what} {self.name} ({reason})"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to compute a thing. A reason is a text for people; None says yes."""

    name: str
    prepare: Callable[[Any], Callable[[], Any]]
    """Stand-ins -> the call that is timed."""
    supports: Callable[[], str | None] = lambda: None
    wrong: Callable[[Any], str | None] = lambda stand_ins: None
    """Stand-ins -> how the results differ from the reference's."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be chosen for one call."""

    what: str
    call: Hashable
    """Whatever the answer may depend on: sizes, types, device, flags."""
    candidates: Sequence[Candidate]
    """In the order of trust, which decides where nothing can be measured."""
    reference: str
    """The candidate that is taken in float64, and where none could be tried."""
    stand_ins: Callable[[int], Any]
    """Tensors like those of the call; for n > 1 an n-th of them, for less memory; None where that is nothing."""
    device: torch.device
    source: str
    """Of the candidates: code, or a hash of it."""
    float64: bool = False
    measures: bool = True
    """Whether the answer is measured; else the first that supports the call is taken."""
    rules: Rules = FASTEST

    def supporting(self) -> tuple[list[Candidate], dict[str, str]]:
        """Candidates that say yes, and the reasons of the others."""
        reasons = {candidate.name: candidate.supports() for candidate in self.candidates}
        refused = {name: reason for name, reason in reasons.items() if reason is not None}
        return [candidate for candidate in self.candidates if candidate.name not in refused], refused


def recording() -> bool:
    """Whether a CUDA graph is being recorded on this stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def refuse_unusable(name: str, what: str, call: str, reasons: Mapping[str, str | None], by: str = "the plan") -> None:
    """One clear line where a plan, or a line of a recipe, names what there is not, or what does not support the call."""
    fit = [candidate for candidate, reason in reasons.items() if reason is None]
    if name not in reasons:
        hint = did_you_mean(name, reasons, f"use one of {', '.join(fit)}")
        raise NoSuchKernel(f"{by} names kernel {name!r} for {what} {call}, which does not exist", hint=hint)
    if reasons[name] is not None:
        hint = f"use one of {', '.join(fit)}, or leave it out and the fastest is found"
        raise BadOption(f"{by} names kernel {name!r} for {what} {call}: {reasons[name]}", hint=hint)


class Tuner:
    """Answers questions, each distinct one once."""

    def __init__(self, clock: Callable[[torch.device], Clock] = clock_of) -> None:
        self.choices: dict[tuple[str, Hashable], Choice] = {}
        self.measurements = 0
        """Questions that were answered by measuring, in this process."""
        self._clock = clock
        self._lock = threading.RLock()

    def choose(self, question: Question) -> Choice:
        place = (question.what, question.call)
        with self._lock:  # two threads with one question measure it once
            if place not in self.choices:
                # also what could not be measured stays for this process: a forward and its backward must agree
                self.choices[place] = self._decided(question)
            return self.choices[place]

    def _decided(self, question: Question) -> Choice:
        usable, refused = question.supporting()
        taken = functools.partial(Choice, question.what, str(question.call), ruled_out=refused)
        if not usable:
            raise RuntimeError(f"{question.what} of {question.call}: no candidate supports it: {refused}")
        if len(usable) == 1 or not question.measures:
            return taken(usable[0].name, ONLY_ONE if len(usable) == 1 else BY_RULE)
        if question.float64:
            return taken(question.reference, FLOAT64)
        key = _key(question)
        known = _remembered(key, question, [candidate.name for candidate in usable])
        if known is not None:
            return known
        if recording():
            return taken(usable[0].name, RECORDING)
        choice = self._measured(question, usable, refused)
        if not choice.short_of_memory:
            _remember(key, choice)
        return choice

    def _measured(self, question: Question, usable: list[Candidate], refused: Mapping[str, str]) -> Choice:
        """On fewer stand-ins where memory does not suffice to try any candidate on all."""
        self.measurements += 1
        parts, best = 1, Choice(question.what, str(question.call), question.reference, MEASURED, ruled_out=refused)
        with torch.no_grad(), torch.autocast(question.device.type, enabled=False), _generator_kept(question.device):
            while (choice := self._tried(question, usable, refused, parts)) is not None:
                best = choice if parts == 1 else dataclasses.replace(choice, short_of_memory=True)
                if choice.seconds or not choice.short_of_memory:
                    break
                parts *= 2
        return best

    def _tried(
        self, question: Question, usable: list[Candidate], refused: Mapping[str, str], parts: int
    ) -> Choice | None:
        """Check and race each candidate; a failure is a reason, not an error. None where there is too little to cut in parts."""
        failures: dict[str, Failure] = {}
        right: list[Candidate] = []
        stand_ins = None
        try:
            stand_ins = question.stand_ins(parts)
            if stand_ins is None:
                return None
        except torch.OutOfMemoryError as error:
            failures = dict.fromkeys((candidate.name for candidate in usable), Failure.of(error))
        if stand_ins is not None:
            right = [candidate for candidate in usable if not _ruled_out(candidate, stand_ins, failures)]
        ready = {candidate.name: functools.partial(candidate.prepare, stand_ins) for candidate in right}
        seconds, late = race(ready, self._clock(question.device), question.rules)
        failures |= late
        # the reference is never lean: that it lacks memory says nothing about the winner
        short = any(failure.out_of_memory for name, failure in failures.items() if name != question.reference)
        reasons = {**refused, **{name: failure.reason for name, failure in failures.items()}}
        name = question.rules.winner(seconds) if seconds else question.reference
        return Choice(question.what, str(question.call), name, MEASURED, seconds, reasons, short)


TUNER = Tuner()
"""Of this process."""


def _ruled_out(candidate: Candidate, stand_ins: Any, failures: dict[str, Failure]) -> bool:
    """Whether it is wrong or cannot be tried; `failures` then says why."""
    try:
        reason = candidate.wrong(stand_ins)
        if reason is not None:
            failures[candidate.name] = Failure(reason, False)
    except Exception as error:
        failures[candidate.name] = Failure.of(error)
    return candidate.name in failures


@contextlib.contextmanager
def _generator_kept(device: torch.device) -> Iterator[None]:
    """On the device; trial dropout must not move the user's random numbers."""
    if device.type != "cuda":
        with torch.random.fork_rng(devices=[]):
            yield
        return
    state = torch.cuda.get_rng_state(device)
    try:
        with torch.cuda.device(device):  # on whose stream marks are taken
            yield
    finally:
        torch.cuda.set_rng_state(state, device)


# ---- on disk -------------------------------------------------------------------------------------------------


def source_of(*modules: ModuleType) -> str:
    """A hash of the files of modules; of the whole folder for a package."""
    return _source_of(tuple(str(module.__file__) for module in modules))


@functools.cache
def _source_of(files: tuple[str, ...]) -> str:
    paths = [Path(file) for file in files]
    found = sorted(
        {one for path in paths for one in (path.parent.rglob("*.py") if path.name == "__init__.py" else [path])}
    )
    return hashlib.sha256(b"\0".join(path.name.encode() + path.read_bytes() for path in found)).hexdigest()[:16]


def surroundings(device: torch.device) -> dict[str, str]:
    """Where an answer holds: card and driver, or CPU and threads; versions."""
    if device.type == "cuda":
        place = {"card": torch.cuda.get_device_name(device), "driver": _driver()}
    else:
        place = {"card": torch.backends.cpu.get_cpu_capability(), "threads": str(torch.get_num_threads())}
    versions = {package: compat.installed_version(package) or "" for package in ("triton", "wholestep")}
    return {**place, "torch": torch.__version__, **versions}


@functools.cache
def _driver() -> str:
    """As Linux tells it; elsewhere the version of CUDA that the driver has."""
    told = read_bytes(Path("/proc/driver/nvidia/version"))
    return told.decode(errors="replace").splitlines()[0] if told else str(torch._C._cuda_getDriverVersion())


def _key(question: Question) -> str:
    listed = {
        "what": question.what,
        "call": repr(question.call),
        "source": question.source,
        **surroundings(question.device),
    }
    return json.dumps(listed, sort_keys=True)


def _path(key: str) -> Path:
    return cache_folder("choices") / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"


def _remember(key: str, choice: Choice) -> None:
    """A read-only folder is no error."""
    row = {"key": key, "name": choice.name, "seconds": dict(choice.seconds), "ruled_out": dict(choice.ruled_out)}
    write_json(_path(key), row)


def _remembered(key: str, question: Question, usable: Sequence[str]) -> Choice | None:
    """What an earlier process found; None where the file is broken, or speaks of something else."""
    try:
        row = json.loads(read_bytes(_path(key)) or b"{}")
        seconds = {str(name): float(taken) for name, taken in row["seconds"].items()}
        reasons = {str(name): str(reason) for name, reason in row["ruled_out"].items()}
        if row["key"] != key or row["name"] not in usable:
            return None
        return Choice(question.what, str(question.call), row["name"], REMEMBERED, seconds, reasons)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
