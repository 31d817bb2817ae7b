"""What a person sees while a step is captured and compiled: one live line on a terminal; with verbose=True plain lines elsewhere
too, and a summary at the end."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator


class Progress:
    """Stages and regions as they happen; silent when stderr is not a terminal, unless asked."""

    def __init__(self, verbose: bool | None = None) -> None:
        self.terminal = sys.stderr.isatty()
        self.shown = self.terminal if verbose is None else verbose
        self.summarised = verbose is True

    @contextlib.contextmanager
    def stage(self, text: str) -> Iterator[None]:
        began = time.perf_counter()
        self._live(f"{text} ...")
        yield
        self._line(f"{text}: {time.perf_counter() - began:.1f} s")

    def region(self, text: str, done: int, total: int) -> None:
        self._live(f"{text} ...")

    def finish(self, summary: str) -> None:
        if self.summarised:
            print("\n".join(summary.splitlines()[:12]), file=sys.stderr, flush=True)

    def _live(self, text: str) -> None:
        if not self.shown:
            return
        if self.terminal:
            print(f"\r\033[2Kwholestep: {text[:100]}", end="", file=sys.stderr, flush=True)
        else:
            print(f"wholestep: {text}", file=sys.stderr, flush=True)

    def _line(self, text: str) -> None:
        if self.shown and self.terminal:
            print(f"\r\033[2Kwholestep: {text}", file=sys.stderr, flush=True)
