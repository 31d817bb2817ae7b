"""Asking a child process for rows: its surroundings, its time limit, and what to make of one that ends without an answer."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wholestep.bench.child import rows_in
from wholestep.disk import cache_folder

SOURCES = Path(__file__).resolve().parent.parent.parent
_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "WHOLESTEP_CACHE_DIR": "wholestep"}
running: set[subprocess.Popen[str]] = set()
"""Children at work, for whoever has to end them early."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The rows that came, and status and reason when others did not."""

    rows: list[dict[str, Any]]
    status: str = "ok"
    reason: str = ""

    def row(self) -> dict[str, Any]:
        """Of a child that was asked for one: the row, or one that says why there is none."""
        if self.rows:
            return self.rows[0]
        if self.status == "ok":
            return {"status": "failed", "reason": "the process ended without an answer"}
        return {"status": self.status, "reason": self.reason}


def ask_child(
    request: str, limit: float, *, threads: int | None = None, program: str = "wholestep.bench.child", cold: bool = True
) -> Answer:
    """Start the child, wait at most `limit` seconds, read its rows. `cold`: from empty caches, so that compiling is timed too."""
    with empty_caches() if cold else contextlib.nullcontext() as caches:
        command = [sys.executable, "-m", program, request]
        child = subprocess.Popen(
            command, env=_surroundings(caches, threads), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        running.add(child)
        try:
            out, err = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            end(child)
            out, err = child.communicate()
            return Answer(rows_in(out), "timed out", f"took more than {limit:.0f} s")
        except BaseException:  # Ctrl-C: nobody waits for the row any more
            end(child)
            child.communicate()
            raise
        finally:
            running.discard(child)
    if child.returncode:
        return Answer(rows_in(out), "failed", _ending(child.returncode, err))
    return Answer(rows_in(out))


def end(child: subprocess.Popen[str]) -> None:
    """The child and the compiler processes it started, which are all in a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


@contextlib.contextmanager
def empty_caches() -> Iterator[Path]:
    """A folder for compile caches that holds nothing, so that the first step of every row is a cold one.

    Trained tokenizers are data rather than compilation; they come from the user's cache.
    """
    folder = Path(tempfile.mkdtemp(prefix="wholestep-bench-"))
    try:
        tokens = cache_folder("tokens")
        with contextlib.suppress(OSError):
            tokens.mkdir(parents=True, exist_ok=True)
            (folder / "wholestep").mkdir()
            (folder / "wholestep" / "tokens").symlink_to(tokens.resolve(), target_is_directory=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _surroundings(caches: Path | None, threads: int | None) -> dict[str, str]:
    environment = {**os.environ}
    if caches is not None:
        environment |= {name: str(caches / folder) for name, folder in _CACHES.items()}
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SOURCES), os.environ.get("PYTHONPATH"))))
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


def _ending(code: int, err: str) -> str:
    """Why a process ended: its signal, or the last line it said."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"ended by {name}" + (", perhaps out of memory" if -code == signal.SIGKILL else "")
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    return (lines[-1] if lines else f"exit code {code}")[:300]
