"""Which rule follows which operator: one row per operator, by its name as `schedule/operators.py` gives it.

A rule is called where an argument is cut or partial. It writes what one rank does and returns values with their layouts; what it
cannot follow it refuses. An operator that works element by element, by torch's own tag, needs no row of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from wholestep.schedule.sharding.program import Program
    from wholestep.schedule.sharding.values import Called

Rule: TypeAlias = "Callable[[Program, Called], Any]"
RULES: dict[str, Rule] = {}
ELEMENTWISE = "(element by element)"
"""The row of all operators that torch tags as pointwise."""
_NOT_BROADCAST = ("frexp", "max", "min", "bucketize", "prelu")


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = function
        return function

    return register


def rule_for(name: str) -> Rule | None:
    """The rule of an operator, in place or not."""
    if name in RULES:
        return RULES[name]
    plain = name.removesuffix("_")
    if plain in RULES:
        return RULES[plain]
    return RULES[ELEMENTWISE] if _is_pointwise(plain) else None


@functools.lru_cache(maxsize=1024)
def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None) if name not in _NOT_BROADCAST else None
    if packet is None or not hasattr(packet, "overloads"):
        return False
    tags = [getattr(packet, overload).tags for overload in packet.overloads()]
    random = torch.Tag.nondeterministic_seeded
    return any(torch.Tag.pointwise in found for found in tags) and not any(random in found for found in tags)
