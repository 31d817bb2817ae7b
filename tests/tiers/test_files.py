"""Files beyond the host: what is written is read back, and a disk that fails is one clear error, never a wrong value."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wholestep.errors import BadOption, TierFailed
from wholestep.lower.file_trips import SLABS, FileTrips
from wholestep.tiers.arena import ALIGNMENT, Arena, pinned_like
from wholestep.tiers.files import FileStore, aligned, open_direct, padded

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Here, or wherever else there is direct I/O: a temporary folder may lie in memory."""
    try:
        os.close(open_direct(tmp_path)[1])
    except BadOption as error:
        pytest.skip(str(error))
    return tmp_path


def round_trip(store: FileStore, values: list[torch.Tensor]) -> list[torch.Tensor]:
    trips = FileTrips(store, CPU)
    made = [trips.trip(value) for value in values]
    tickets = [trip.sent(value, trip.send(value)) for trip, value in zip(made, values, strict=True)]
    back = [trip.fetch(ticket, CPU) for trip, ticket in zip(made, tickets, strict=True)]
    return [trip.fetched(y) for trip, y in zip(made, back, strict=True)]


VALUES = [
    torch.randn(3, 5), torch.randn(1000, 37).t(), torch.randn(()), torch.randn(0, 4), torch.randn(64, 64).bfloat16(),
    torch.arange(100_000), torch.randn(2, 3, 4).permute(2, 0, 1), torch.randn(3_000_000),
]  # fmt: skip


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("folders", [1, 3])
def test_values_come_back_as_they_were(folder: Path, folders: int, checksums: bool) -> None:
    places = [folder / str(number) for number in range(folders)]
    for place in places:
        place.mkdir()
    store = FileStore(places, checksums=checksums)
    for _ in range(2):
        for value, back in zip(VALUES, round_trip(store, VALUES), strict=True):
            assert torch.equal(value, back) and value.stride() == back.stride()
    assert all(end > 0 for end in store.ends), "all folders take part"
    assert not any(any(place.iterdir()) for place in places), "files are unlinked when they are opened"
    store.close()


def failing(monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., Any]) -> None:
    monkeypatch.setattr(f"wholestep.tiers.files.{name}", fault)


def raises(number: int) -> Callable[..., int]:
    def fault(*args: Any) -> int:
        raise OSError(number, os.strerror(number))

    return fault


@pytest.mark.parametrize(
    ("name", "fault", "told"),
    [
        ("os.pwrite", raises(errno.ENOSPC), rf"No space left on device \(errno {errno.ENOSPC}\).*more room"),
        ("os.pwrite", raises(errno.EIO), rf"Input/output error \(errno {errno.EIO}\)"),
        ("_pread", raises(errno.EIO), rf"Input/output error \(errno {errno.EIO}\)"),
        ("_pread", lambda handle, memory, offset: 0, rf"read 0 of \d+ bytes at 0, and no more \(errno {errno.EIO}\)"),
        ("_pread", lambda handle, memory, offset: 100, rf"read 100 of \d+ bytes.*\(errno {errno.EIO}\)"),
        ("os.pwrite", lambda handle, memory, offset: 0, rf"wrote 0 of \d+ bytes.*\(errno {errno.EIO}\)"),
    ],
    ids=["ENOSPC", "EIO when writing", "EIO when reading", "nothing read", "short read", "nothing written"],
)
def test_a_disk_that_fails_is_an_error_with_path_and_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., Any], told: str
) -> None:
    store = FileStore([folder])
    failing(monkeypatch, name, fault)
    with pytest.raises(TierFailed, match=rf"{folder}/\.wholestep-.*{told}"):
        round_trip(store, [torch.randn(5000)])
    monkeypatch.undo()
    assert not list(folder.iterdir())


def test_a_part_of_a_request_is_asked_for_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    failing(monkeypatch, "_pread", lambda handle, memory, offset: real(handle, [memory[: 2 * ALIGNMENT]], offset))
    value = torch.randn(50_000)
    assert torch.equal(round_trip(FileStore([folder]), [value])[0], value)


def test_a_value_of_another_type_than_its_trace_comes_back_unrounded(folder: Path) -> None:
    """On a CPU; then again one of the traced type."""
    trip = FileTrips(FileStore([folder]), CPU).trip(torch.empty(3, 5, dtype=torch.float16))
    for value in (torch.randn(3, 5), torch.randn(3, 5).half(), torch.randn(3, 5)):
        back = trip.fetched(trip.fetch(trip.sent(value, trip.send(value)), CPU))
        assert back.dtype == value.dtype and torch.equal(back, value)


def test_a_disk_that_hangs_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore([folder], wait_seconds=0.05)
    failing(monkeypatch, "os.pwrite", lambda handle, memory, offset: time.sleep(0.3) or len(memory))
    with pytest.raises(TierFailed, match=rf"more than 0.05 s.*errno {errno.ETIMEDOUT}"):
        round_trip(store, [torch.randn(5000)])
    store.close()


def test_after_an_error_no_request_uses_the_memory_any_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two requests fails while the second is still at work on the same slab."""
    store = FileStore([folder])
    monkeypatch.setattr("wholestep.tiers.files.REQUEST_BYTES", 4096)
    memory, over = aligned(8192), []

    def broken(handle: int, part: memoryview, offset: int) -> int:
        if offset == 0:
            raise OSError(5, "Input/output error")
        time.sleep(0.2)
        over.append(offset)
        return len(part)

    monkeypatch.setattr(os, "pwrite", broken)
    slot = store.reserve(8192)
    with pytest.raises(TierFailed, match="errno 5"):
        store.wait(store.write(slot, memory), slot)
    assert over == [4096]


def test_a_store_that_hung_is_not_asked_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs may still read a slab: it is not used anew, and nobody waits for one in vain."""
    store = FileStore([folder], wait_seconds=0.05)
    trips = FileTrips(store, torch.device("cpu"))
    trip = trips.trip(torch.zeros(1024))
    release = threading.Event()
    monkeypatch.setattr(os, "pwrite", lambda handle, part, offset: release.wait(20) and len(part))
    trip.send(torch.ones(1024))
    with pytest.raises(TierFailed, match="took more than"):
        trip.written.result()
    assert trips.free is not None and trips.free.qsize() == SLABS - 1
    with pytest.raises(TierFailed, match="took more than"):
        trip.send(torch.ones(1024))
    release.set()


def test_a_slow_disk_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    failing(monkeypatch, "os.pwrite", lambda *args: time.sleep(0.02) or real(*args))
    values = [torch.randn(5000) for _ in range(9)]
    assert all(map(torch.equal, round_trip(FileStore([folder]), values), values))


def test_bytes_that_changed_on_the_disk_are_noticed(folder: Path) -> None:
    store = FileStore([folder], checksums=True)
    slot, memory = store.reserve(5000), aligned(padded(5000))
    store.wait(store.write(slot, memory), slot)
    other = aligned(padded(5000))
    other.fill_(7)
    store.wait([store.pool.submit(os.pwrite, store.handles[0], bytes_of(other), slot[1])], slot)  # type: ignore[list-item]
    store.wait(store.read(slot, memory), slot)
    with pytest.raises(TierFailed, match="is not what was written"):
        store.check(slot, memory)


def bytes_of(memory: torch.Tensor) -> memoryview:
    from wholestep.tiers.files import memory_of

    return memory_of(memory)


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="is no folder"):
        FileStore([tmp_path / "nowhere"])
    if os.geteuid():
        tmp_path.chmod(0o500)
        with pytest.raises(BadOption, match=rf"errno {errno.EACCES}"):
            FileStore([tmp_path])
        tmp_path.chmod(0o700)
    memory = Path("/proc")
    with pytest.raises(BadOption, match="offload_path='/proc'"):
        FileStore([memory])


def test_a_process_that_is_killed_leaves_nothing(folder: Path) -> None:
    code = (
        "import sys, time, torch\nfrom wholestep.tiers.files import FileStore, aligned\n"
        f"s = FileStore([{str(folder)!r}])\nslot = s.reserve(1 << 20)\ns.wait(s.write(slot, aligned(1 << 20)), slot)\n"
        "print('written', flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not list(folder.iterdir())


def test_slots_of_an_arena_do_not_meet() -> None:
    arena = Arena(pinned=False)
    values = [torch.randn(5, 3).t(), torch.randn(0), torch.randn(4097), torch.ones(3, dtype=torch.bool)]
    slots = [arena.reserve(value.nbytes) for value in values]
    for slot, value in zip(slots, values, strict=True):
        arena.tensor(slot, value).copy_(value)
    for slot, value in zip(slots, values, strict=True):
        assert torch.equal(arena.tensor(slot, value), value) and arena.tensor(slot, value).stride() == value.stride()
        assert arena.tensor(slot, value).data_ptr() % ALIGNMENT == 0 or not value.numel()
    with pytest.raises(RuntimeError, match="before the first"):
        arena.reserve(1)
    alone = pinned_like(values[0])
    assert alone.stride() == values[0].stride()
    for held in (alone, arena.tensor(slots[0], values[0])):  # torch asks of a storage's first byte whether it is pinned
        assert held.untyped_storage().data_ptr() % ALIGNMENT == 0
