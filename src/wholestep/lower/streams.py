"""Streams of a step: where calls run beside the main stream, and what they wait for.

In: names. A statement of the driver may say on which stream it runs, which events it waits for and which one it leaves behind;
the generated function speaks to a `Streams`. Out: on a GPU streams and events of torch's, joined with the main stream when the step
ends (a recording of the step is then whole, and the next step finds everything done); elsewhere `InOrder`, which runs everything
as it is written and checks what a GPU would not: that every event that is waited for was left behind before.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

import torch


class Streams(Protocol):
    """What a generated function asks for; the main stream has the name ""."""

    def on(self, stream: str) -> contextlib.AbstractContextManager[None]:
        """Calls go to this stream while it is open."""

    def wait(self, stream: str, event: str) -> None:
        """What follows on this stream starts after the event."""

    def leave(self, stream: str, event: str) -> None:
        """The event is what was given to this stream so far."""

    def join(self) -> None:
        """The step is over: the main stream waits for all others."""

    def abandon(self) -> None:
        """The step failed: memory that copies still use is let go behind them, and the next step begins anew."""


class InOrder:
    """One stream, in the order of the text; an event that nobody left behind is an error."""

    def __init__(self) -> None:
        self.left: set[str] = set()
        self.log: list[tuple[str, str, str]] = []
        """(what, stream, event) of the last step."""
        self._over = True

    def on(self, stream: str) -> contextlib.AbstractContextManager[None]:
        self._note("on", stream, "")
        return contextlib.nullcontext()

    def wait(self, stream: str, event: str) -> None:
        self._note("wait", stream, event)
        if event not in self.left:
            raise RuntimeError(f"stream {stream or 'main'!r} waits for {event!r}, which nothing has left behind yet")

    def leave(self, stream: str, event: str) -> None:
        self._note("leave", stream, event)
        if event in self.left:
            raise RuntimeError(f"{event!r} is left behind twice in one step")
        self.left.add(event)

    def join(self) -> None:
        self._over = True

    def abandon(self) -> None:
        self._over = True

    def _note(self, what: str, stream: str, event: str) -> None:
        if self._over:  # the first word of a new step
            self.left, self.log, self._over = set(), [], False
        self.log.append((what, stream, event))


class OnCuda:
    """torch's streams and events on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events: dict[str, torch.cuda.Event] = {}
        self.main: torch.cuda.Stream | None = None
        """That of the step at work; it may be another at every step: recordings have one of their own."""
        self.used: set[str] = set()
        self.sides: dict[str, torch.cuda.Stream] = {}

    def on(self, stream: str) -> contextlib.AbstractContextManager[None]:
        return torch.cuda.stream(self._stream(stream))

    def wait(self, stream: str, event: str) -> None:
        self._stream(stream).wait_event(self.events[event])

    def leave(self, stream: str, event: str) -> None:
        self.events.setdefault(event, torch.cuda.Event()).record(self._stream(stream))

    def join(self) -> None:
        for name in self.used:
            self._main().wait_stream(self._side(name))
        self.main, self.used = None, set()

    def abandon(self) -> None:
        """What failed is told; that a recording cannot be joined any more is not."""
        with contextlib.suppress(RuntimeError):
            self.join()
        self.main, self.used = None, set()

    def _main(self) -> torch.cuda.Stream:
        if self.main is None:
            self.main = torch.cuda.current_stream(self.device)
        return self.main

    def _stream(self, name: str) -> torch.cuda.Stream:
        main = self._main()
        if not name:
            return main
        if name not in self.used:
            self.used.add(name)
            self._side(name).wait_stream(main)  # it starts where the step is, and is part of its recording
        return self._side(name)

    def _side(self, name: str) -> torch.cuda.Stream:
        if name not in self.sides:
            self.sides[name] = torch.cuda.Stream(self.device)
        return self.sides[name]


def streams_for(device: torch.device) -> Streams:
    return OnCuda(device) if device.type == "cuda" else InOrder()
