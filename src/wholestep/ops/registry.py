"""The table of FLOP formulas, by operator name.

`@flops_of("aten::mm", kind="matmul")` puts a function Call -> count beside the operator's name. A name with an overload
(`aten::max.other`) goes before the bare name. A formula may return a pair: FLOPs executed, and FLOPs of the mathematics, where
the operator itself computes something again (the backward of attention makes the scores a second time).

The names are strings, so operators that are defined in later folders (`ws::attention`) or are absent from this build of torch
can have a formula.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

from wholestep.ops.call import Call

Kind = Literal["matmul", "attention", "convolution", "elementwise", "reduction", "movement", "optimizer", "other"]
KINDS: tuple[str, ...] = get_args(Kind)
TENSOR_KINDS: tuple[Kind, ...] = ("matmul", "attention", "convolution")
"""What runs on matrix units; MFU and HFU count these."""
Formula: TypeAlias = Callable[[Call], Any]
"""Call -> an Amount, or (executed, mathematical)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """What one row of the table holds."""

    kind: Kind
    formula: Formula


RULES: dict[str, Rule] = {}


def flops_of(*names: str, kind: Kind) -> Callable[[Formula], Formula]:
    """Register the formula of these operators."""

    def register(formula: Formula) -> Formula:
        for name in names:
            assert name not in RULES, f"{name} has two formulas"
            RULES[name] = Rule(kind, formula)
        return formula

    return register


def rule_of(call: Call) -> Rule | None:
    return RULES.get(f"{call.name}.{call.overload}") or RULES.get(call.name)
