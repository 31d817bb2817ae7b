"""Files beyond the host's memory: slots in, bytes written and read by requests in flight.

A store has one file in every folder it is given, striped by slot. Files are opened for direct I/O, past the page cache (which would
fill the host's memory with what was to leave it), and unlinked at once: whatever ends the process, nothing is left behind. Every
request either did all of its bytes or raises `TierFailed` with the path and the error's number in whoever waits for it: no value
is ever made up. With `checksums` a value is compared with what was written.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import tempfile
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch

from wholestep.errors import BadOption, TierFailed
from wholestep.tiers.arena import ALIGNMENT

REQUEST_BYTES = 8 << 20
"""Of one request: 8 MiB reached the disk's rate with any number of threads."""
THREADS = 8
"""Requests in flight."""
WAIT_SECONDS = 120.0
"""Beyond which a disk is said to hang; 8 MiB take 4 ms at 2 GB/s."""


class FileStore:
    """Slots in files of one or several folders."""

    def __init__(
        self, folders: Sequence[str | Path], *, checksums: bool = False, wait_seconds: float = WAIT_SECONDS
    ) -> None:
        self.paths: list[str] = []
        self.handles: list[int] = []
        self.ends = [0] * len(folders)
        self.sums: dict[tuple[int, int], int] | None = {} if checksums else None
        self.wait_seconds = wait_seconds
        self.hung = ""
        """What is wrong, once a request took too long: it may still read or write the memory it was given."""
        for folder in folders:
            path, handle = open_direct(folder)
            self.paths.append(path)
            self.handles.append(handle)
        self.pool = concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="wholestep-files")
        self._closed = weakref.finalize(self, _close, self.pool, self.handles)

    def reserve(self, num_bytes: int) -> tuple[int, int]:
        """A slot: (file, offset). The emptiest file takes it."""
        file = min(range(len(self.ends)), key=self.ends.__getitem__)
        offset = self.ends[file]
        self.ends[file] += padded(num_bytes)
        return file, offset

    @property
    def bytes(self) -> int:
        return sum(self.ends)

    def write(self, slot: tuple[int, int], memory: torch.Tensor) -> list[concurrent.futures.Future[None]]:
        """Begin to write page-aligned bytes."""
        self.refuse_hung()
        if self.sums is not None:
            self.sums[slot] = zlib.crc32(memory.numpy())
        return [
            self.pool.submit(self._all_of, os.pwrite, slot[0], part, offset) for part, offset in _parts(slot, memory)
        ]

    def read(self, slot: tuple[int, int], memory: torch.Tensor) -> list[concurrent.futures.Future[None]]:
        """Begin to read as many bytes as the memory has."""
        self.refuse_hung()
        return [self.pool.submit(self._all_of, _pread, slot[0], part, offset) for part, offset in _parts(slot, memory)]

    def wait(self, requests: Sequence[concurrent.futures.Future[None]], slot: tuple[int, int]) -> None:
        """Until all are done, whatever becomes of any: then nobody uses their memory. Raises what the first of them raised."""
        for request in requests:
            if not concurrent.futures.wait([request], timeout=self.wait_seconds).done:
                late = f"the disk took more than {self.wait_seconds:g} s for a request (errno {errno.ETIMEDOUT})"
                self.hung = f"{self.paths[slot[0]]}: {late}"
                self.refuse_hung()
        for request in requests:
            request.result()

    def refuse_hung(self) -> None:
        """After that nothing is asked of it any more."""
        if self.hung:
            raise TierFailed(self.hung, hint="name another folder with offload_path=")

    def check(self, slot: tuple[int, int], memory: torch.Tensor) -> None:
        """What was read is what was written, where checksums are kept."""
        if self.sums is not None and zlib.crc32(memory.numpy()) != self.sums[slot]:
            path = self.paths[slot[0]]
            raise TierFailed(f"{path}: what was read at {slot[1]} is not what was written (errno {errno.EILSEQ})")

    def close(self) -> None:
        self._closed()

    def _all_of(self, call: object, file: int, memory: memoryview, offset: int) -> None:
        """One request to its end; a part of it is asked for again, nothing is an error."""
        done = 0
        while done < len(memory):
            try:
                count = call(self.handles[file], memory[done:], offset + done)  # type: ignore[operator]
            except OSError as error:
                raise self._failed(file, error.errno or 0, error.strerror or str(error)) from error
            if count <= 0 or (count % ALIGNMENT and done + count < len(memory)):
                word = "wrote" if call is os.pwrite else "read"
                short = f"{word} {done + count} of {len(memory)} bytes at {offset}"
                raise self._failed(file, errno.EIO, f"{short}, and no more")
            done += count

    def _failed(self, file: int, number: int, text: str) -> TierFailed:
        hint = "name a folder with more room" if number == errno.ENOSPC else "name another folder with offload_path="
        return TierFailed(f"{self.paths[file]}: {text} (errno {number})", hint=hint)


def open_direct(folder: str | Path) -> tuple[str, int]:
    """A file of that folder for direct I/O, unlinked; one clear line where that cannot be had."""
    hint = "name a folder of a local disk that can be written"
    if not os.path.isdir(folder):
        raise BadOption(f"offload_path={str(folder)!r} is no folder", hint=hint)
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        raise BadOption("files for offload need direct I/O, which this system does not have", hint="use host memory")
    try:
        handle, path = tempfile.mkstemp(prefix=".wholestep-", dir=folder)
    except OSError as error:
        raise BadOption(f"offload_path={str(folder)!r}: {error.strerror} (errno {error.errno})", hint=hint) from error
    try:
        direct = os.open(path, os.O_RDWR | flag)
        try:
            probe = aligned(ALIGNMENT)
            os.pwrite(direct, memory_of(probe), 0)
        except OSError:
            os.close(direct)
            raise
    except OSError as error:
        text = f"has no direct I/O: {error.strerror} (errno {error.errno})"
        raise BadOption(f"offload_path={str(folder)!r} {text}", hint=hint) from error
    finally:
        os.close(handle)
        os.unlink(path)
    return path, direct


def padded(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT


def aligned(num_bytes: int) -> torch.Tensor:
    """Plain memory that begins at a page."""
    whole = torch.zeros(num_bytes + ALIGNMENT, dtype=torch.uint8)
    start = -whole.data_ptr() % ALIGNMENT
    return whole[start : start + num_bytes]


def memory_of(memory: torch.Tensor) -> memoryview:
    """The bytes of a tensor, to read from and to write to; the tensor lives as long as they do."""
    return memoryview(memory.numpy())


def _pread(handle: int, memory: memoryview, offset: int) -> int:
    return os.preadv(handle, [memory], offset)


def _parts(slot: tuple[int, int], memory: torch.Tensor) -> list[tuple[memoryview, int]]:
    whole = memory_of(memory)
    return [(whole[i : i + REQUEST_BYTES], slot[1] + i) for i in range(0, len(whole), REQUEST_BYTES)]


def _close(pool: concurrent.futures.ThreadPoolExecutor, handles: list[int]) -> None:
    pool.shutdown(wait=True, cancel_futures=True)
    for handle in handles:
        with contextlib.suppress(OSError):
            os.close(handle)
