"""MODEL on the command line, for those who want only what a named function returns; `train.job` knows all forms."""

from __future__ import annotations

from wholestep.train.resolve import resolve

__all__ = ["resolve"]
