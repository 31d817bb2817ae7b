"""Copies between card and host in a profile: bytes, rates, waits, arena; streams of a GPU as stand-ins."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from wholestep.errors import BadOption
from wholestep.graph.plan import Plan
from wholestep.lower.streams import InOrder
from wholestep.lower.transfers import Transfers
from wholestep.profile.measure import copies as measuring
from wholestep.profile.measure import timing
from wholestep.profile.measure.copies import TimedStreams, WatchedTransfers, copies_of
from wholestep.profile.profile import Profile, profile_job
from wholestep.report.page import copy_lines, render_page
from wholestep.train.job import Job
from wholestep.train.loader import OneBatch

PLAN = Plan(host=("blocks.*.1/gelu",), state={"blocks.*": "host"})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LEAST_WARM_UP", 2)
    monkeypatch.setattr(timing, "MOST_WARM_UP", 3)


def profiled(plan: Plan, **options: Any) -> Profile:
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh())  # noqa: E731
    model = nn.Sequential()
    model.blocks = nn.Sequential(*(block() for _ in range(4)))
    model.head = nn.Linear(32, 4)
    job = Job(
        name="net", settings={"model": "net", "precision": "fp32", "seed": 0}, model=model,
        loss_fn=lambda m, b: m(b).square().mean(), optimizer=torch.optim.AdamW(model.parameters()), scheduler=None,
        batches=OneBatch(torch.randn(16, 32), torch.device("cpu")),
        compile_options={"precision": "fp32", "clip_norm": None, "accumulate": 1},
    )  # fmt: skip
    return profile_job(job, backend="interpret", steps=3, memory=False, verified=False, plan=plan, **options)


def test_a_profile_says_what_moves() -> None:
    profile = profiled(PLAN)
    copies = profile.copies
    assert copies is not None and copies["stand_in"] and copies["link"] is None
    state = 2 * sum(4 * (2 * (32 * 32 + 32) + 2 * 32) for _ in range(4))  # two moments of every block's parameters
    values = copies["moved_bytes"]["out"] - state
    assert values > 0 and values % (16 * 32 * 4) == 0
    assert copies["moved_bytes"]["in"] == copies["moved_bytes"]["out"]
    assert copies["state_bytes"] == state and copies["arena_used_bytes"] == values <= copies["arena_bytes"]
    assert copies["rates"]["out"] > 0 and copies["rates"]["in"] > 0 and copies["wait_ms"] == 0
    assert "copies    to the host: " in str(profile) and "arena: " in str(profile)
    page = render_page(json.loads(json.dumps(profile.to_json())))
    assert "optimizer state on the host" in page and "Nothing leaves the card" not in page
    rows = {row.name for row in profile.rows}
    assert {"copy_out", "copy_in", "in_done"} <= rows  # every call is still the one that is timed


def test_a_profile_of_what_stays_says_so() -> None:
    profile = profiled(Plan())
    assert profile.copies is None and "copies" not in str(profile)
    facts = profile.to_json()
    assert 'id="copies"' not in (page := render_page(facts)) and '"#copies"' not in page, "there is no card"
    on_gpu = facts | {"shares": facts["shares"] | {"gpu_busy": 0.9}}
    assert "Nothing leaves the card." in (page := render_page(on_gpu)) and '"#copies"' in page


def test_files_are_counted(tmp_path: Path) -> None:
    try:
        profile = profiled(Plan(file=("blocks.*.1/gelu",)), offload_path=[tmp_path])
    except BadOption as error:
        pytest.skip(str(error))  # a folder without direct I/O
    copies = profile.copies
    assert copies is not None and copies["file_bytes"] > 0 and copies["arena_bytes"] == 0
    assert copies["rates"] == {"out": None, "in": None} and copies["moved_bytes"]["out"] > 0
    assert "in files" in str(profile)


def test_only_our_own_step_is_planned() -> None:
    with pytest.raises(BadOption, match="plan for system='eager'"):
        profiled(PLAN, system="eager")


class Clock:
    """A GPU's: every event that is recorded is a millisecond later; a wait takes ten."""

    def __init__(self) -> None:
        self.now = 0.0


def test_events_of_a_gpu_are_laid_around_copies_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing
            self.at = -1.0

        def record(self) -> None:
            clock.now += 1.0
            self.at = clock.now

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    class Streams(InOrder):
        def on(self, stream: str) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        def wait(self, stream: str, event: str) -> None:
            super().wait(stream, event)
            clock.now += 10.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    device = torch.device("cuda")
    monkeypatch.setattr(measuring, "_link", lambda device: {"out": 50e9, "in": 40e9, "both": 30e9})
    timed = TimedStreams(Streams(), device)
    timed.leave("", "made")
    timed.wait("out", "made")
    with timed.on("out"):
        pass
    timed.leave("out", "left")
    timed.wait("", "left")
    timed.join()
    transfers = Transfers(device)
    transfers.moved_bytes["out"] = 45_000_000
    found = copies_of([WatchedTransfers(transfers, [timed], 1, 0.0)], 1, 0.1)
    assert found is not None
    assert found["rates"] == {"out": pytest.approx(45e9), "in": None}
    assert found["wait_ms"] == pytest.approx(12.0) and found["wait_share"] == pytest.approx(0.12)
    assert any("90% of the link's 50 GB/s" in words for _, words in copy_lines(found)), copy_lines(found)
