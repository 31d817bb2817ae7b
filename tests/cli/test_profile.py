"""`wholestep profile` as a command: what it prints and writes, one line on bad input, and memory that runs out."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from tests.cli.calls import Call, program

from wholestep.cost.measure import this_device
from wholestep.errors import is_out_of_memory
from wholestep.profile import profile as profiling
from wholestep.profile.measure import timing
from wholestep.train import job as job_module

MODEL = "own_training:setup"
DEEP = """
import torch
from torch import nn

def setup():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(4)))
    return model, lambda m, b: m(b).square().mean(), torch.optim.AdamW(model.parameters()), torch.randn(256, 32)
"""


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, monkeypatch)
    monkeypatch.setattr(timing, "LEAST_WARM_UP", 2)
    monkeypatch.setattr(timing, "MOST_WARM_UP", 3)
    monkeypatch.setattr(profiling, "measure_device", lambda kind, fresh: this_device(kind))  # takes seconds


def test_a_page_its_numbers_and_a_short_summary(call: Call, tmp_path: Path) -> None:
    done = call("profile", MODEL, "--backend", "interpret", "--steps", "2", "--out", "r.html")
    assert done.code == 0, done.err
    lines = done.out.strip().splitlines()
    assert len(lines) <= 30 and "per step" in lines[0] and "r.html" in lines[-2] and "r.json" in lines[-1]
    assert any(line.startswith("memory") for line in lines) and "verified  equal to eager" in done.out
    facts = json.loads((tmp_path / "r.json").read_text())
    assert facts["name"] == MODEL and len(facts["step_ms"]["all"]) == 2
    assert "<svg" in (tmp_path / "r.html").read_text()


def test_the_first_action_gives_what_it_promises(call: Call, tmp_path: Path) -> None:
    """Its command is run as it stands on the page; the promise holds within 10 %."""
    (tmp_path / "deep_training.py").write_text(DEEP)
    more = ("--steps", "2", "--no-verify")
    done = call("profile", "deep_training:setup", "--backend", "interpret", *more, "--out", "before.html")
    assert done.code == 0, done.err
    first = json.loads((tmp_path / "before.json").read_text())["actions"][0]
    html = (tmp_path / "before.html").read_text()
    command = html.partition("<code>")[2].partition("</code>")[0]
    assert command == first["command"] and first["predicted"]["unit"] == "bytes" and first["gain"] > 0.05
    done = call(*shlex.split(command)[1:], *more, "--out", "after.html")
    assert done.code == 0, done.err
    after = json.loads((tmp_path / "after.json").read_text())["memory"]["peak_bytes"]
    assert after == pytest.approx(first["predicted"]["then"], rel=0.1)


def test_json_and_the_default_name(call: Call, tmp_path: Path) -> None:
    done = call("profile", MODEL, "--backend", "interpret", "--steps", "2", "--json", "--no-memory", "--no-verify")
    assert done.code == 0 and json.loads(done.out)["memory"] is None and json.loads(done.out)["verified"] is None
    assert (tmp_path / "profile-own_training-setup.html").exists() and (
        tmp_path / "profile-own_training-setup.json"
    ).exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("gpt-2m", "did you mean gpt-1m?"),
        (f"{MODEL} --system eagre", "did you mean eager?"),
        (f"{MODEL} --backend quick", "--backend"),
        (f"{MODEL} --steps 0", "--steps"),
        (f"{MODEL} --precision fp8", "bf16"),
        (f"{MODEL} --out r.json", ".html"),
        (f"{MODEL} --out nowhere/r.html", "no folder nowhere"),
        (f"{MODEL} --disable nothing", "there is no pass"),
        ("", "MODEL"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(call: Call, arguments: str, said: str, tmp_path: Path) -> None:
    done = call("profile", *arguments.split())
    assert done.code == 2 and said in done.err and len(done.err.strip().splitlines()) == 1, done.err
    assert not list(tmp_path.glob("*.html"))


def test_open_says_so_where_there_is_no_browser(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or False)
    done = call("profile", MODEL, "--backend", "interpret", "--steps", "2", "--no-memory", "--no-verify", "--open")
    assert done.code == 0 and opened[0].startswith("file://") and "no browser" in done.err


@pytest.mark.parametrize("command", ["profile", "train"])
def test_memory_that_runs_out_is_explained(call: Call, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from wholestep.runtime.variant import Variant

    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(Variant, "micro", full)
    done = call(command, MODEL, "--backend", "interpret", "--steps", "2")
    assert done.code == 1 and "Traceback" not in done.err
    assert "the step needs" in done.err and "largest at the peak:" in done.err and "what would help:" in done.err
    assert "Tried to allocate 9 GiB" in done.err


def test_memory_that_runs_out_before_anything_is_captured(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: not enough memory: you tried to allocate"
        )

    monkeypatch.setattr(job_module, "make_job", full)
    done = call("profile", MODEL)
    assert (
        done.code == 1
        and "out of memory. Use a smaller --batch" in done.err
        and len(done.err.strip().splitlines()) == 1
    )


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(ValueError("out of memory"))
    try:
        try:
            raise torch.OutOfMemoryError("full")
        except torch.OutOfMemoryError as inner:
            raise ValueError("compiling failed") from inner
    except ValueError as error:
        assert is_out_of_memory(error), "the cause counts"
