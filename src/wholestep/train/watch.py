"""What stands beside the training loop: signals that ask it to stop, and the display that is told what happens.

Ctrl-C and SIGTERM let the current step end, so that the state can be saved; a second Ctrl-C, or a signal while nothing can be
saved yet (compiling), stops at once.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

from wholestep.runtime.step import Step


class Interrupted(KeyboardInterrupt):
    """Stopped at once by a signal, without saving."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Interrupts:
    """While entered, SIGINT and SIGTERM are noted in `received` or raise `Interrupted`."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: int | None = None
        self.can_save = False
        """Set by the loop: from now on a signal waits for the end of the step."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            self._before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.can_save or (self.received is not None and number == signal.SIGINT):
            raise Interrupted(number)
        self.received = self.received or number


class Display(Protocol):
    """What a person, or nobody, is shown. Every call returns at once."""

    verbose: bool | None
    """For `wholestep.compile`: progress on stderr; None shows it on a terminal."""

    def note(self, text: str) -> None:
        """One line that matters whatever else is shown."""

    def compiling(self, backend: str) -> None: ...

    def compiled(self, step: Step, seconds: float) -> None: ...

    def started(self, *, at: int, steps: int, unit: str) -> None: ...

    def row(self, row: dict[str, Any]) -> None:
        """A line of metrics.jsonl."""

    def saved(self, path: Path) -> None: ...

    def close(self) -> None:
        """The loop has ended, in whatever way."""


class Silent:
    """Shows nothing."""

    verbose: bool | None = False

    def note(self, text: str) -> None: ...

    def compiling(self, backend: str) -> None: ...

    def compiled(self, step: Step, seconds: float) -> None: ...

    def started(self, *, at: int, steps: int, unit: str) -> None: ...

    def row(self, row: dict[str, Any]) -> None: ...

    def saved(self, path: Path) -> None: ...

    def close(self) -> None: ...
