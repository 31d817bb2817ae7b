"""What torch logs about a capture that it gives up, or cannot count: told by us, in one line, instead."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

_INNER = ("utils", "symbolic_convert", "metrics_context", "convert_frame", "variables.builtin")
_OTHERS = ("torch._dynamo", "torch._guards", "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
TALKATIVE = [logging.getLogger(name) for name in (*(f"torch._dynamo.{name}" for name in _INNER), *_OTHERS)]
"""A batch of a wrong size has them write hundreds of lines about an error that the user's own code then tells in one."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing of that is written while the context is open."""
    kept = [logger.disabled for logger in TALKATIVE]
    for logger in TALKATIVE:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*lru_cache.*")
            warnings.filterwarnings(
                "ignore", module=r"torch\._dynamo\b"
            )  # what it cannot follow, and where to tell torch so
            yield
    finally:
        for logger, disabled in zip(TALKATIVE, kept, strict=True):
            logger.disabled = disabled
