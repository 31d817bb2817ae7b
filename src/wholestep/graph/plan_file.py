"""Plans as files: TOML that a person can read, with the reason beside every decision.

In and out: a Plan. Written by hand, since Python reads TOML but does not write it; every string is JSON's form of it, which is
also a TOML string. Reading is strict: a field that is not known, or a file that is no plan, is one clear line. The last line says
that the file is whole, and holds a checksum of what decides about the numbers: a file that was cut off, or lost a line to a flipped
bit, must not train something else in silence.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wholestep.errors import BadOption, WholestepError
from wholestep.graph.bytes import show_bytes
from wholestep.graph.plan import FORMAT, Plan

PRECISIONS = ("fp32", "bf16", "fp16")
HEAD = """\
# A plan of Wholestep for one training step. Use it with: wholestep train MODEL --plan FILE
# It is refused where anything under [made_for] has changed. Lines may be edited: what is listed under `recompute` is not
# kept for the backward pass but computed again there; taking a line out keeps that value, and costs its memory.
"""


def plan_text(plan: Plan) -> str:
    """The file."""
    lines = [HEAD, f"format = {FORMAT}"]
    if plan.early_update is not None:
        lines += [
            f"early_update = {_value(plan.early_update)}  # parameters are updated as soon as their gradients are final"
        ]
    if plan.chunked_loss is not None:
        lines += [f"chunked_loss = {_value(plan.chunked_loss)}  # logits are made in chunks, never whole"]
    for name, words in (("budget_bytes", "of the card"), ("predicted_bytes", "allocated, at the peak of the step")):
        count = getattr(plan, name)
        if count is not None:
            lines.append(f"{name} = {count}  # {show_bytes(count)} {words}")
    if plan.predicted_seconds is not None:
        lines.append(f"predicted_seconds = {plan.predicted_seconds!r}  # of one step on the device under [made_for]")
    lines += ["", "recompute = ["]
    for name in plan.recompute:
        why = _one_line(plan.reasons.get(name, ""))
        lines.append(f"  {_value(name)}," + (f"  # {why}" if why else ""))
    lines.append("]")
    for table in ("precision", "reasons", "made_for"):
        entries: Mapping[str, Any] = getattr(plan, table)
        if table == "precision" and not entries:
            continue
        lines += ["", f"[{table}]"]
        lines += [f"{_value(str(key))} = {_value(value)}" for key, value in entries.items() if value is not None]
    lines += ["", f"[end.{_check(plan)}]"]
    lines += ["# The file is whole. The number is of chunked_loss and precision: write [end] when you edit them."]
    return "\n".join(lines) + "\n"


def write_plan(plan: Plan, path: Path) -> None:
    try:
        path.write_text(plan_text(plan), encoding="utf-8")
    except OSError as error:
        raise BadOption(f"{path}: {error.strerror or error}", hint="name a file that can be written") from error


def read_plan(path: Path) -> Plan:
    """The plan in a file."""
    try:
        import tomllib
    except ImportError as error:  # Python 3.10
        raise WholestepError("a plan needs Python 3.11 or newer, which reads TOML") from error
    if not path.is_file():
        raise BadOption(f"there is no plan {path}", hint="write one with: wholestep plan MODEL --out FILE")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        hint = "write one with: wholestep plan MODEL --out FILE"
        raise BadOption(f"{path} is no plan: {_one_line(str(error))}", hint=hint) from error
    end = table.pop("end", None)
    try:
        plan = _checked(Plan.from_json(table))
        return plan if table["format"] == 1 and end is None else _whole(plan, end)
    except BadOption as error:
        raise BadOption(f"{path}: {error.what}", hint=error.hint) from None


def _checked(plan: Plan) -> Plan:
    """Types, since anyone may have edited the file."""
    wanted: dict[str, tuple[type, ...]] = {
        "early_update": (bool, type(None)), "precision": (dict,), "chunked_loss": (bool, type(None)),
        "budget_bytes": (int, type(None)),
        "predicted_bytes": (int, type(None)), "predicted_seconds": (float, int, type(None)), "reasons": (dict,),
        "made_for": (dict,),
    }  # fmt: skip
    for name, kinds in wanted.items():
        if not isinstance(getattr(plan, name), kinds) or (bool not in kinds and isinstance(getattr(plan, name), bool)):
            raise BadOption(f"{name} = {getattr(plan, name)!r}", hint=f"it must be {kinds[0].__name__}")
    if isinstance(plan.budget_bytes, int) and plan.budget_bytes <= 0:
        raise BadOption(f"budget_bytes = {plan.budget_bytes}", hint="it must be positive")
    for table in ("precision", "reasons"):
        odd = next((key for key, value in getattr(plan, table).items() if not isinstance(value, str)), None)
        if odd is not None:
            raise BadOption(f"{table}.{odd} = {getattr(plan, table)[odd]!r}", hint="write it in quotes")
    for path, precision in plan.precision.items():
        if precision not in PRECISIONS:
            raise BadOption(f"precision.{path} = {precision!r}", hint=f"use one of {', '.join(PRECISIONS)}")
    if not all(isinstance(name, str) for name in plan.recompute):
        raise BadOption(
            "recompute holds something that is not a name", hint='write names in quotes, such as "layers.*.mlp/gelu"'
        )
    return plan


def _whole(plan: Plan, end: Any) -> Plan:
    """The plan, unless its file was cut off or decisions about numbers were lost."""
    if not isinstance(end, dict) or len(end) > 1 or any(value != {} for value in end.values()):
        hint = "write it again; one written by hand ends in a line [end]"
        raise BadOption("the plan is not whole, or its lines are out of order", hint=hint)
    if end and _check(plan) not in end:
        hint = "write it again, or end it in a line [end] if you changed them"
        raise BadOption("chunked_loss or precision are not what the plan was written with", hint=hint)
    return plan


def _check(plan: Plan) -> str:
    """A checksum of the decisions that change numbers; what is recomputed, and when parameters are updated, does not."""
    return f"{zlib.crc32(json.dumps([plan.chunked_loss, list(plan.precision.items())]).encode()):08x}"


def _value(value: Any) -> str:
    """A TOML value; JSON writes strings, numbers and booleans the same way."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_value(str(k))} = {_value(v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(entry) for entry in value if entry is not None) + "]"
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    # DEL is a control character to TOML and none to JSON
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _one_line(text: str) -> str:
    return " ".join(text.split())
