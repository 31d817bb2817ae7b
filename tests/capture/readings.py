"""One call of a loss through the front end, looked at and not run: its Reading, for tests that trace it or hash it."""

from __future__ import annotations

import contextlib
from typing import Any

from tests.runtime.twins import Side

from wholestep.capture.front import Front, LossGraph
from wholestep.capture.reading import Reading, read
from wholestep.capture.subject import Subject, make_subject


class _Read(Exception):
    """Ends the call where the graph would run."""


def reading_of(subject: Subject, batch: Any) -> Reading:
    found: list[Reading] = []

    def run(graph: LossGraph, args: tuple) -> tuple:
        found.append(read(subject, graph, args, batch))
        raise _Read

    with contextlib.suppress(_Read):
        Front(subject)(batch, run)
    return found[0]


def subject_of(side: Side, **options: Any) -> Subject:
    return make_subject(side.model, side.loss_fn, side.optimizer, **options)
