"""The tuner, with candidates and a clock of its own: what is taken, what is ruled out and why, what is remembered and where."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wholestep.errors import BadOption
from wholestep.ops import timing, tuner
from wholestep.ops.timing import Rules, race
from wholestep.ops.tuner import Candidate, Choice, Question, Tuner, refuse_unusable

CPU = torch.device("cpu")


class Clock:
    """Stands still unless a fake candidate runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, first: float, last: float) -> float:
        return last - first


class Fakes:
    """Candidates that take the time they are told to, and a count of what ran."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.ran: list[str] = []
        self.tuner = self.new_tuner()

    def new_tuner(self) -> Tuner:
        return Tuner(lambda device: self.clock)

    def candidate(self, name: str, seconds: float | Exception, **options: Any) -> Candidate:
        def call() -> None:
            self.ran.append(name)
            if isinstance(seconds, Exception):
                raise seconds
            self.clock.now += seconds

        return Candidate(name=name, prepare=lambda stand_ins: call, **options)

    def question(self, *candidates: Candidate, **options: Any) -> Question:
        given: dict[str, Any] = {
            "call": "a call",
            "source": "code",
            "stand_ins": lambda parts: "them" if parts == 1 else None,
        }
        reference = candidates[-1].name
        return Question(what="attention", candidates=candidates, reference=reference, device=CPU, **(given | options))


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path))
    return Fakes()


def files(folder: Path) -> list[Path]:
    return sorted((folder / "choices").glob("*")) if (folder / "choices").exists() else []


# ---- what is taken -------------------------------------------------------------------------------------------


def test_the_faster_is_taken_and_each_question_is_measured_once(fakes: Fakes) -> None:
    question = fakes.question(fakes.candidate("slow", 2.0), fakes.candidate("fast", 1.0), fakes.candidate("math", 3.0))
    choice = fakes.tuner.choose(question)
    assert (choice.name, choice.source) == ("fast", tuner.MEASURED)
    assert choice.seconds == {"slow": 2.0, "fast": 1.0, "math": 3.0} and not choice.ruled_out
    ran = len(fakes.ran)
    assert ran == 3 * (timing.Rules().warmups + timing.Rules().rounds)
    assert fakes.tuner.choose(question) is choice and len(fakes.ran) == ran and fakes.tuner.measurements == 1
    assert str(choice) == "attention fast 1000.00 ms (slow 2000.00, math 3000.00)"


def test_a_wrong_one_is_ruled_out_by_name_with_its_error(fakes: Fakes) -> None:
    wrong = fakes.candidate("wrong", 0.1, wrong=lambda stand_ins: f"{stand_ins} differ from the reference by 3.0e-01")
    choice = fakes.tuner.choose(fakes.question(wrong, fakes.candidate("math", 3.0)))
    assert choice.name == "math" and choice.ruled_out == {"wrong": "them differ from the reference by 3.0e-01"}
    assert "wrong" not in fakes.ran


@pytest.mark.parametrize("when", ["checked", "timed"])
def test_one_that_raises_is_ruled_out(when: str, fakes: Fakes) -> None:
    def raises(stand_ins: Any) -> str | None:
        raise KeyError("no such kernel\nand more")

    error = ValueError("no such kernel\nand more")
    bad = fakes.candidate("bad", 0.1, wrong=raises) if when == "checked" else fakes.candidate("bad", error)
    choice = fakes.tuner.choose(fakes.question(bad, fakes.candidate("fast", 1.0), fakes.candidate("math", 3.0)))
    assert (
        choice.name == "fast" and "Error: " in choice.ruled_out["bad"] and "no such kernel" in choice.ruled_out["bad"]
    )
    assert fakes.ran.count("bad") == (when == "timed")


def test_one_that_does_not_support_the_call_is_not_tried(fakes: Fakes) -> None:
    never = fakes.candidate("never", 0.1, supports=lambda: "it has no dropout")
    choice = fakes.tuner.choose(fakes.question(never, fakes.candidate("math", 3.0)))
    assert (choice.name, choice.source, choice.ruled_out) == ("math", tuner.ONLY_ONE, {"never": "it has no dropout"})
    assert not fakes.ran and str(choice) == "attention math (the only one)"


def test_where_none_can_be_tried_the_reference_is_taken(fakes: Fakes) -> None:
    bad = [fakes.candidate(name, RuntimeError(f"{name} is broken")) for name in ("one", "math")]
    choice = fakes.tuner.choose(fakes.question(*bad))
    assert choice.name == "math" and choice.ruled_out["one"] == "RuntimeError: one is broken"


def test_float64_takes_the_reference_without_measuring(fakes: Fakes) -> None:
    question = fakes.question(fakes.candidate("fast", 1.0), fakes.candidate("math", 3.0), float64=True)
    choice = fakes.tuner.choose(question)
    assert (choice.name, choice.source) == ("math", tuner.FLOAT64) and not fakes.ran and not fakes.tuner.measurements


def test_a_rule_takes_the_first_that_supports_the_call(fakes: Fakes) -> None:
    never = fakes.candidate("never", 0.1, supports=lambda: "no")
    question = fakes.question(never, fakes.candidate("slow", 9.0), fakes.candidate("math", 3.0), measures=False)
    assert (fakes.tuner.choose(question).name, fakes.ran) == ("slow", [])


def test_nothing_is_measured_while_recording(fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "recording", lambda: True)
    question = fakes.question(
        fakes.candidate("trusted", 2.0), fakes.candidate("fast", 1.0), fakes.candidate("math", 3.0)
    )
    choice = fakes.tuner.choose(question)
    assert (choice.name, choice.source) == ("trusted", tuner.RECORDING) and not fakes.ran and not files(tmp_path)
    monkeypatch.setattr(tuner, "recording", lambda: False)
    assert fakes.tuner.choose(question) is choice  # the backward of what was recorded must take the same
    assert fakes.new_tuner().choose(question).name == "fast"
    monkeypatch.setattr(tuner, "recording", lambda: True)
    assert fakes.new_tuner().choose(question).source == tuner.REMEMBERED  # reading a file disturbs no recording


# ---- memory --------------------------------------------------------------------------------------------------


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")


@pytest.mark.parametrize(("lacking", "kept"), [("lean", False), ("math", True)])
def test_one_that_runs_out_of_memory_is_ruled_out(lacking: str, kept: bool, fakes: Fakes, tmp_path: Path) -> None:
    """What lacked memory may win in another process, so that is not remembered; the reference is never lean."""
    times: dict[str, float | Exception] = {"lean": 1.0, "fast": 2.0, "math": 3.0} | {lacking: out_of_memory()}
    choice = fakes.tuner.choose(fakes.question(*(fakes.candidate(name, taken) for name, taken in times.items())))
    assert choice.name == ("fast" if lacking == "lean" else "lean") and "out of memory" in choice.ruled_out[lacking]
    assert choice.short_of_memory is not kept and bool(files(tmp_path)) is kept


@pytest.mark.parametrize("where", ["stand-ins", "candidates"])
def test_fewer_stand_ins_where_none_can_be_tried_on_all(where: str, fakes: Fakes, tmp_path: Path) -> None:
    made: list[int] = []

    def stand_ins(parts: int) -> int | None:
        made.append(parts)
        if where == "stand-ins" and parts < 4:
            raise out_of_memory()
        return 8 // parts or None

    def wrong(rows: int) -> str | None:
        if rows > 2:
            raise out_of_memory()
        return None

    candidates = [
        fakes.candidate(name, taken, wrong=wrong) for name, taken in (("fast", 1.0), ("slow", 2.0), ("math", 3.0))
    ]
    choice = fakes.tuner.choose(fakes.question(*candidates, stand_ins=stand_ins))
    assert made == [1, 2, 4] and choice.name == "fast" and choice.seconds
    assert choice.short_of_memory and not files(tmp_path)


def test_when_there_is_nothing_left_to_cut_the_reference_is_taken(fakes: Fakes) -> None:
    bad = [fakes.candidate(name, out_of_memory()) for name in ("one", "two", "math")]
    choice = fakes.tuner.choose(fakes.question(*bad, stand_ins=lambda parts: 4 // parts or None))
    assert choice.name == "math" and choice.short_of_memory and "out of memory" in choice.ruled_out["one"]


# ---- what is remembered --------------------------------------------------------------------------------------


def test_answers_are_remembered_on_disk(fakes: Fakes, tmp_path: Path) -> None:
    question = fakes.question(fakes.candidate("slow", 2.0), fakes.candidate("fast", 1.0), fakes.candidate("math", 3.0))
    first = fakes.tuner.choose(question)
    (file,) = files(tmp_path)
    again = fakes.question(fakes.candidate("slow", 0.1), fakes.candidate("fast", 1.0), fakes.candidate("math", 3.0))
    ran, other = len(fakes.ran), fakes.new_tuner()
    choice = other.choose(again)
    assert (choice.name, choice.source, choice.seconds) == ("fast", tuner.REMEMBERED, first.seconds)
    assert len(fakes.ran) == ran and other.measurements == 0 and files(tmp_path) == [file]


@pytest.mark.parametrize("change", ["source", "call", "card", "driver", "torch", "triton", "wholestep"])
def test_answers_do_not_hold_elsewhere(change: str, fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(**options: Any) -> Question:
        return fakes.question(fakes.candidate("one", 2.0), fakes.candidate("math", 3.0), **options)

    names = ("card", "driver", "torch", "triton", "wholestep")
    monkeypatch.setattr(tuner, "surroundings", lambda device: dict.fromkeys(names, "this"))
    fakes.tuner.choose(asked())
    assert fakes.new_tuner().choose(asked()).source == tuner.REMEMBERED
    options: dict[str, Any] = {change: "another"} if change in ("source", "call") else {}
    monkeypatch.setattr(
        tuner, "surroundings", lambda device: dict.fromkeys(names, "this") | ({} if options else {change: "x"})
    )
    assert fakes.new_tuner().choose(asked(**options)).source == tuner.MEASURED


def test_surroundings_name_versions_and_the_machine() -> None:
    found = tuner.surroundings(CPU)
    assert found["torch"] == torch.__version__ and found["card"] and found["threads"] == str(torch.get_num_threads())
    assert {"triton", "wholestep"} <= set(found)


def test_a_changed_source_is_another_hash(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    hashes = []
    for text in ("a = 1", "a = 2", "a = 1"):
        file.write_text(text)
        tuner._source_of.cache_clear()
        hashes.append(tuner._source_of((str(file),)))
    assert hashes[0] == hashes[2] != hashes[1]
    tuner._source_of.cache_clear()
    (tmp_path / "__init__.py").write_text("")
    of_folder = tuner._source_of((str(tmp_path / "__init__.py"),))
    file.write_text("a = 3")
    tuner._source_of.cache_clear()
    assert tuner._source_of((str(tmp_path / "__init__.py"),)) != of_folder


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{broken", b"[]", b"3", b"\xff\xfe", b"[" * 100_000,
        lambda row: {**row, "key": "another question"}, lambda row: {**row, "name": "gone"}, lambda row: {**row, "seconds": 3},
        lambda row: {**row, "seconds": {"one": "quick"}}, lambda row: {k: v for k, v in row.items() if k != "ruled_out"},
    ],
)  # fmt: skip
def test_broken_and_foreign_files_are_ignored(content: Any, fakes: Fakes, tmp_path: Path) -> None:
    question = fakes.question(fakes.candidate("one", 2.0), fakes.candidate("math", 3.0))
    fakes.tuner.choose(question)
    (file,) = files(tmp_path)
    good = file.read_bytes()
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content(json.loads(good))).encode())
    assert fakes.new_tuner().choose(question).source == tuner.MEASURED
    assert json.loads(file.read_bytes()) == json.loads(good)


def test_a_folder_that_cannot_be_written_is_no_error(fakes: Fakes, tmp_path: Path) -> None:
    (tmp_path / "choices").write_text("a file, where a folder should be")
    assert fakes.tuner.choose(fakes.question(fakes.candidate("one", 2.0), fakes.candidate("math", 3.0))).name == "one"


def test_threads_with_one_question_measure_it_once(fakes: Fakes) -> None:
    begun, ran = threading.Barrier(4), fakes.ran
    question = fakes.question(fakes.candidate("one", 2.0), fakes.candidate("math", 3.0))
    found: list[Choice] = []

    def ask() -> None:
        begun.wait()
        found.append(fakes.tuner.choose(question))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len({id(choice) for choice in found}) == 1
    assert fakes.tuner.measurements == 1 and ran.count("one") == 8


PROCESS = """
import sys, torch
from wholestep.ops.tuner import Candidate, Question, Tuner
for number in range(20):
    ways = [Candidate(name=name, prepare=lambda given: (lambda: None)) for name in ("one", "math")]
    asked = Question(what="attention", call=number, candidates=ways, reference="math", source="code",
                     stand_ins=lambda parts: () if parts == 1 else None, device=torch.device("cpu"))
    print(Tuner().choose(asked).name in ("one", "math"))
"""


@pytest.mark.slow
def test_two_processes_may_write_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path))
    both = [subprocess.Popen([sys.executable, "-c", PROCESS], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120)[0].split() for process in both]
    assert said == [["True"] * 20] * 2 and all(process.returncode == 0 for process in both)
    assert len(files(tmp_path)) == 20 and all(json.loads(file.read_text())["name"] for file in files(tmp_path))


# ---- the race ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "rounds", "winner"),
    [
        ({"first": [9.0, 1.0, 1.0], "other": [2.0, 2.0, 2.0]}, 2, "first"),  # the best counts, not one bad run
        ({"first": [2.0] * 6, "other": [1.95] * 6}, 2, "first"),  # within what is tolerated
        ({"first": [2.0] * 4, "other": [1.0] * 4}, 4, "other"),  # only a lasting loss counts
        ({"first": [3.0, 3.0, 1.0, 3.0], "other": [1.5] * 4}, 3, "first"),
    ],
)
def test_the_first_is_dropped_only_for_a_lasting_loss(times: dict[str, list[float]], rounds: int, winner: str) -> None:
    rules, clock = Rules(warmups=0, rounds=2, most_rounds=4, summary=min, tolerated=1.05), Clock()
    left = {name: list(taken) for name, taken in times.items()}

    def prepared(name: str) -> Callable[[], Callable[[], None]]:
        def call() -> None:
            clock.now += left[name].pop(0)

        return lambda: call

    seconds, failures = race({name: prepared(name) for name in times}, clock, rules)
    assert rules.winner(seconds) == winner and not failures
    assert {len(taken) - len(left[name]) for name, taken in times.items()} == {rounds}


def test_making_a_call_ready_is_not_timed() -> None:
    clock = Clock()

    def prepare() -> Callable[[], None]:
        clock.now += 100.0
        return lambda: setattr(clock, "now", clock.now + 1.0)

    assert race({"one": prepare}, clock, Rules()) == ({"one": 1.0}, {})


def test_the_clock_of_the_cpu_runs() -> None:
    clock = timing.clock_of(CPU)
    first = clock.mark()
    torch.randn(64, 64) @ torch.randn(64, 64)
    assert clock.seconds(first, clock.mark()) > 0


def test_the_random_numbers_of_the_user_do_not_move(fakes: Fakes) -> None:
    before = torch.get_rng_state()
    noisy = Candidate(name="noisy", prepare=lambda stand_ins: lambda: torch.rand(3))
    fakes.tuner.choose(fakes.question(noisy, fakes.candidate("math", 1.0)))
    assert torch.equal(before, torch.get_rng_state())


# ---- what a plan names ---------------------------------------------------------------------------------------


def test_names_that_there_are_not_or_that_do_not_fit() -> None:
    reasons = {"flash": "it runs on cuda, the call is on cpu", "math": None}
    refuse_unusable("math", "attention", "in h.*/attention", reasons)
    with pytest.raises(
        BadOption, match=r"'flsh' for attention in h\.\*/attention, which does not exist.*did you mean flash\?"
    ):
        refuse_unusable("flsh", "attention", "in h.*/attention", reasons)
    with pytest.raises(
        BadOption, match=r"'flash' for attention .*it runs on cuda, the call is on cpu.*use one of math"
    ):
        refuse_unusable("flash", "attention", "in h.*/attention", reasons)
