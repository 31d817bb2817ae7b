"""All cases, and which of them cannot be one captured graph in any design."""

from __future__ import annotations

from collections.abc import Sequence

from tests.trust import (
    burned_in,
    code_changed,
    data,
    hooks,
    interrupted,
    left_behind,
    loops,
    optimizers,
    outside,
    python_values,
    randomness,
    refusals,
    stale_cache,
    structure,
)
from tests.trust.case import CASES, Case

__all__ = ["CASES", "FILES", "LOUD", "chosen"]

FILES = (
    burned_in, code_changed, outside, structure, left_behind, optimizers, hooks, randomness, data, python_values, loops,
    interrupted, stale_cache, refusals,
)  # fmt: skip

LOUD: dict[str, str] = {}
"""Name -> words of the reason that must be told."""


def chosen(names: Sequence[str]) -> list[Case]:
    """The cases of these names and classes; all of them for no name."""
    known = {*CASES, *(case.kind for case in CASES.values())}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no case or class is named {', '.join(unknown)}")
    return [case for case in CASES.values() if not names or case.name in names or case.kind in names]
