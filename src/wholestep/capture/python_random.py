"""Python's and numpy's random numbers while a step is traced: noticed, refused, and put back.

A number drawn by `random` or `numpy.random` would be fixed in the graph for ever. The generators get other seeds at each run
of the forward, so that a choice they make shows as a difference; a draw that is seen is refused by name.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from wholestep.capture.modes import user_source
from wholestep.errors import CaptureRefused


def reseed(salt: int) -> None:
    """Other seeds at each run, so that a choice made by a random number shows as a difference."""
    random.seed(salt)
    np.random.seed(salt)


_KEEPS_NO_STATE = {"seed", "getstate", "setstate", "get_state", "set_state", "default_rng", "test"}


class python_randomness_watched:
    """Refuses a forward that draws from Python's or numpy's generators; puts their states back.

    Functions are watched by name, which gives the source line; `from random import random` is seen by the state it leaves.
    """

    def __enter__(self) -> None:
        self.states = random.getstate(), np.random.get_state()
        self.kept: list[tuple[Any, str, Any]] = []
        for owner, label in ((random, "random"), (np.random, "numpy.random")):
            for name in owner.__all__:
                function = getattr(owner, name, None)
                if callable(function) and not isinstance(function, type) and name not in _KEEPS_NO_STATE:
                    self.kept.append((owner, name, function))
                    setattr(owner, name, self._watched(function, f"{label}.{name}"))

    def _watched(self, function: Callable, label: str) -> Callable:
        def watched(*args: Any, **kwargs: Any) -> Any:
            raise CaptureRefused(f"the forward draws from {label}: the value would be fixed", where=user_source())

        return watched

    def __exit__(self, *exc: object) -> None:
        for owner, name, function in self.kept:
            setattr(owner, name, function)
        random.setstate(self.states[0])
        np.random.set_state(self.states[1])


def refuse_drawn(salt: int) -> None:
    """The generators as `reseed(salt)` left them, or a refusal."""
    states = random.getstate(), np.random.get_state()
    reseed(salt)
    fresh = random.getstate(), np.random.get_state()
    drawn = [] if states[0] == fresh[0] else ["random"]
    if repr(states[1]) != repr(fresh[1]):  # the repr holds the position in the stream
        drawn.append("numpy.random")
    if drawn:
        raise CaptureRefused(f"the forward draws from {drawn[0]}: the value would be fixed")
