"""What is left of a machine's memory, and steps that need more of it: told before they run."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import wholestep
from wholestep.api import _first_check
from wholestep.errors import NotEnoughMemory
from wholestep.graph.bytes import show_bytes
from wholestep.graph.plan import Plan
from wholestep.plan import host
from wholestep.profile.memory.cpu import measure_step

MEMINFO = "MemTotal:       16000000 kB\nMemAvailable:    8000000 kB\nSwapFree:         500000 kB\n"
KERNEL = 1024 * 8_500_000


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


V1, V2 = "4:cpu,memory:/a/b\n1:cpu:/x\n", "0::/a/b\n"
BOUNDLESS = "9223372036854771712\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "left"),
    [
        ("", {}, KERNEL),
        (V2, {}, KERNEL),
        (V2, {"a/b/memory.max": "max\n", "a/b/memory.current": "5\n"}, KERNEL),
        (V2, {"a/b/memory.max": "1000\n", "a/b/memory.current": "400\n"}, 600),
        (V2, {"a/memory.max": "1000\n", "a/memory.current": "400\n", "a/b/memory.max": "max\n"}, 600),
        (V2, {"memory.max": "1000\n", "memory.current": "1400\n"}, 0),
        (
            V2,
            {
                "a/b/memory.max": "1000\n", "a/b/memory.current": "400\n", "a/b/memory.swap.max": "90\n",
                "a/b/memory.swap.current": "20\n", "a/b/memory.stat": "anon 5\ninactive_file 30\nactive_file 7\n",
            },
            600 + 37 + 70,
        ),
        (V1, {"memory/a/b/memory.limit_in_bytes": BOUNDLESS, "memory/a/b/memory.usage_in_bytes": "77\n"}, KERNEL),
        (V1, {"memory/a/b/memory.limit_in_bytes": "900\n", "memory/a/b/memory.usage_in_bytes": "77\n"}, 823),
        (V1, {"memory/memory.limit_in_bytes": "900\n", "memory/memory.usage_in_bytes": "77\n"}, 823),
    ],
)  # fmt: skip
def test_what_is_left(cgroup: str, files: dict[str, str], left: int, tmp_path: Path) -> None:
    proc = written(tmp_path / "proc", {"meminfo": MEMINFO, "self/cgroup": cgroup})
    assert host.available_bytes(proc, written(tmp_path / "groups", files)) == left


@pytest.mark.parametrize("files", [{}, {"meminfo": "MemTotal: 5 kB\n"}, {"meminfo": "MemAvailable: lots\n"}])
def test_a_system_that_does_not_say(files: dict[str, str], tmp_path: Path) -> None:
    assert host.available_bytes(written(tmp_path / "proc", files), tmp_path) is None


class Wide(nn.Module):
    """Its hidden values are many times its weights and its batch."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, width), nn.Linear(width, 2), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(torch.tanh(self.a(x)).sin()))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def made(rows: int = 256, width: int = 512, **options: Any) -> wholestep.Step:
    model = Wide(width)
    optimizer = torch.optim.AdamW(model.parameters())
    return wholestep.compile(
        model, loss, optimizer, torch.zeros(rows, 2), **({"backend": "interpret", "verbose": False} | options)
    )


@pytest.mark.parametrize("backend", ["interpret", "inductor"])
def test_a_step_larger_than_this_very_machine_is_refused_before_it_takes_anything(backend: str) -> None:
    left = host.available_bytes()
    if left is None:
        pytest.skip("this system does not say")
    rows = 2**20
    began = time.monotonic()
    with pytest.raises(NotEnoughMemory, match=r"the step needs about .* left\. use a smaller batch, or a budget below"):
        made(rows, 4 * left // (4 * rows), backend=backend)
    assert time.monotonic() - began < 120, "nothing was filled"


def test_the_message_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    step = made()
    assert step.graph is not None
    state = sum(2 * p.numel() * 4 for p in step.subject.parameters.values())
    needed = host.transient_bytes(step.graph, "interpret") + state
    monkeypatch.setattr(host, "available_bytes", lambda: 300_000)
    with pytest.raises(NotEnoughMemory) as caught:
        made()
    assert str(caught.value) == (
        f"the step needs about {show_bytes(needed)} ({needed:,} bytes) beside its weights and batch, and this machine has "
        "293 KiB (300,000 bytes) left. use a smaller batch, or a budget below that (memory=, --memory), which recomputes values in "
        "the backward pass."
    )


def test_what_fits_closely_is_not_refused_and_what_does_not_say_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    step = made()
    assert step.graph is not None
    needed = host.transient_bytes(step.graph, "interpret") + host._inputs(step.graph, host.Role.STATE)
    for left in (int(needed * 0.96), needed, None):
        monkeypatch.setattr(host, "available_bytes", lambda left=left: left)
        assert made().graph is not None
    monkeypatch.setattr(host, "available_bytes", lambda: int(needed * 0.94))
    with pytest.raises(NotEnoughMemory):
        made()


def test_the_check_against_eager_is_left_out_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    step = made(cache=False)
    assert step.graph is not None
    needed = host.transient_bytes(step.graph, "interpret") + host._inputs(step.graph, host.Role.STATE)
    monkeypatch.setattr(host, "available_bytes", lambda: needed)
    step(torch.zeros(256, 2))
    assert "check: left out: the first step was not checked against eager: that would not fit into memory" in step.notes


KINDS = {
    "wide": (Wide, lambda: torch.randn(256, 2)),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, 1)
        ),
        lambda: torch.randn(16, 1, 16, 16),
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1)),
        lambda: torch.randn(128, 8),
    ),
}


@pytest.mark.parametrize("backend", ["interpret", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_takes_less_than_what_is_asked_for(kind: str, backend: str) -> None:
    make, sample = KINDS[kind]
    model, batch = make(), sample()
    optimizer = torch.optim.AdamW(model.parameters())
    step = wholestep.compile(model, loss, optimizer, batch, backend=backend, check="off", verbose=False)
    assert step.graph is not None
    asked = host.SURELY[backend] * host.transient_bytes(step.graph, backend) + host._inputs(step.graph, *host.Role)
    taken = measure_step(
        step, model=model, optimizer=optimizer, batch=batch, system="wholestep", device=torch.device("cpu")
    )
    assert asked <= taken.peak_bytes


@pytest.mark.parametrize("budget", [None, object()])
def test_state_on_the_host_leaves_the_check_out_whatever_the_budget(
    budget: object | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager's optimizer has no state there, on a few rows neither."""

    def compared(*args: object, **options: object) -> None:
        raise AssertionError("compared with eager")

    monkeypatch.setattr("wholestep.api.check_first_step", compared)
    monkeypatch.setattr("wholestep.api.check_within", lambda *args, **options: compared)
    notes: list[object] = []
    compiler = SimpleNamespace(options=SimpleNamespace(clip_scope="global"), budget=budget)
    capture = SimpleNamespace(plan=Plan(state={"*": "host"}), graph=None)
    variant = SimpleNamespace(subject=SimpleNamespace(device=torch.device("cuda")), capture=capture)
    run = SimpleNamespace(step=SimpleNamespace(_note=notes.append))
    assert _first_check(compiler)(run, variant, ()) is None  # type: ignore[arg-type]
    assert "state on the host" in str(notes[0])
