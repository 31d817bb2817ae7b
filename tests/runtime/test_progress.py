"""What is printed while a step is captured and compiled."""

from __future__ import annotations

import io
import sys

import pytest

from wholestep.runtime.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "verbose", "progress", "summary"),
    [
        (Terminal, None, True, False),
        (Terminal, True, True, True),
        (Terminal, False, False, False),
        (io.StringIO, None, False, False),
        (io.StringIO, True, True, True),
    ],
)
def test_progress_is_for_people_and_the_summary_for_those_who_ask(
    stream: type[io.StringIO], verbose: bool | None, progress: bool, summary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", shown := stream())
    telling = Progress(verbose)
    with telling.stage("capturing the step"):
        pass
    telling.finish("rung       whole step")
    assert ("capturing the step" in shown.getvalue()) is progress
    assert ("rung" in shown.getvalue()) is summary
