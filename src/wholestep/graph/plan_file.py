"""Plans as files: TOML that a person can read, with the reason beside every decision.

In and out: a Plan. Written by hand, since Python reads TOML but does not write it; every string is JSON's form of it, which is
also a TOML string. Reading is strict: a field that is not known, or a file that is no plan, is one clear line. The last line says
that the file is whole, and holds a checksum of what decides about the numbers: a file that was cut off, or lost a line to a flipped
bit, must not train something else in silence.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from wholestep.errors import BadOption, WholestepError
from wholestep.graph.bytes import show_bytes
from wholestep.graph.file_end import checksum, is_end
from wholestep.graph.plan import FORMAT, Plan

PRECISIONS = ("fp32", "bf16", "fp16")
STATE_PLACES = ("card", "host")
ALWAYS = ("recompute", "reasons", "made_for")
"""Written even where there is nothing in them."""
HEAD = """\
# A plan of Wholestep for one training step. Use it with: wholestep train MODEL --plan FILE
# It is refused where anything under [made_for] has changed. Lines may be edited: what is listed under `recompute` is not
# kept for the backward pass but computed again there; taking a line out keeps that value, and costs its memory. What is listed
# under `host` or `file` waits there for the backward pass.
"""


def plan_text(plan: Plan) -> str:
    """The file."""
    lines = [HEAD, f"format = {FORMAT}"]
    tables: list[str] = []
    for field in dataclasses.fields(plan):
        value, says = getattr(plan, field.name), field.metadata.get("says", "")
        if isinstance(value, Mapping):
            if value or field.name in ALWAYS:
                tables += ["", f"[{field.name}]"]
                tables += [f"{toml_value(str(k))} = {toml_value(v)}" for k, v in value.items() if v is not None]
        elif isinstance(value, tuple):
            if value or field.name in ALWAYS:
                lines += ["", f"{field.name} = [", *(f"  {_listed(name, plan)}" for name in value), "]"]
        elif value is not None:
            shown = f"{show_bytes(value)} " if field.name.endswith("_bytes") else ""
            lines.append(f"{field.name} = {toml_value(value)}  # {shown}{says}")
    lines += tables
    lines += ["", f"[end.{numbers_check(plan)}]"]
    lines += ["# The file is whole. The number is of chunked_loss and precision: write [end] when you edit them."]
    return "\n".join(lines) + "\n"


def _listed(name: str, plan: Plan) -> str:
    """A value in a list, with the reason beside it."""
    why = _one_line(plan.reasons.get(name, ""))
    return f"{toml_value(name)}," + (f"  # {why}" if why else "")


def write_plan(plan: Plan, path: Path) -> None:
    try:
        path.write_text(plan_text(plan), encoding="utf-8")
    except OSError as error:
        raise BadOption(f"{path}: {error.strerror or error}", hint="name a file that can be written") from error


def plan_at(path: str | Path | None) -> Plan | None:
    """The plan in a file, read before a model is built; None where no file is named."""
    return None if path is None else read_plan(Path(path))


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
    hints = get_type_hints(Plan)
    for field in dataclasses.fields(plan):
        value, kinds = getattr(plan, field.name), _kinds(hints[field.name])
        if not isinstance(value, kinds) or (bool not in kinds and isinstance(value, bool)):
            raise BadOption(f"{field.name} = {value!r}", hint=f"it must be {kinds[0].__name__}")
    if isinstance(plan.budget_bytes, int) and plan.budget_bytes <= 0:
        raise BadOption(f"budget_bytes = {plan.budget_bytes}", hint="it must be positive")
    from wholestep.graph.mesh import AXES  # loads torch, which many a file is read without

    for axis, size in plan.mesh.items():
        if axis not in AXES or not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise BadOption(f"mesh.{axis} = {size!r}", hint=f"axes are {', '.join(AXES)}, each a whole number of ranks")
    for table in ("state", "precision", "layout", "kernel", "replace", "shard", "stages", "reasons"):
        odd = next((key for key, value in getattr(plan, table).items() if not isinstance(value, str)), None)
        if odd is not None:
            raise BadOption(f"{table}.{odd} = {getattr(plan, table)[odd]!r}", hint="write it in quotes")
    for path, place in plan.state.items():
        if place not in STATE_PLACES:
            raise BadOption(f"state.{path} = {place!r}", hint=f"use one of {', '.join(STATE_PLACES)}")
    for path, precision in plan.precision.items():
        if precision not in PRECISIONS:
            raise BadOption(f"precision.{path} = {precision!r}", hint=f"use one of {', '.join(PRECISIONS)}")
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, tuple) and not all(isinstance(name, str) for name in value):
            hint = 'write names in quotes, such as "layers.*.mlp/gelu"'
            raise BadOption(f"{field.name} holds something that is not a name", hint=hint)
    return plan


def _kinds(hint: Any) -> tuple[type, ...]:
    """What a field may hold, the type to name first; whole numbers are fractions too."""
    parts = [getattr(part, "__origin__", part) for part in (get_args(hint) if isinstance(hint, UnionType) else (hint,))]
    kinds = tuple(dict if part is Mapping else part for part in parts)
    return (*kinds, int) if float in kinds else kinds


def _whole(plan: Plan, end: Any) -> Plan:
    """The plan, unless its file was cut off or decisions about numbers were lost."""
    if not is_end(end):
        hint = "write it again; one written by hand ends in a line [end]"
        raise BadOption("the plan is not whole, or its lines are out of order", hint=hint)
    if end and numbers_check(plan) not in end:
        hint = "write it again, or end it in a line [end] if you changed them"
        names = [field.name for field in dataclasses.fields(plan) if field.metadata.get("numbers")]
        raise BadOption(f"{' or '.join(names)} are not what the plan was written with", hint=hint)
    return plan


def numbers_check(plan: Plan) -> str:
    """A checksum of the decisions that change numbers; what is recomputed, and when parameters are updated, does not."""
    values = [getattr(plan, field.name) for field in dataclasses.fields(plan) if field.metadata.get("numbers")]
    listed = [list(value.items()) if isinstance(value, Mapping) else value for value in values]
    return checksum(listed)


def toml_value(value: Any) -> str:
    """A TOML value; JSON writes strings, numbers and booleans the same way."""
    if isinstance(value, Mapping):
        return (
            "{ "
            + ", ".join(f"{toml_value(str(k))} = {toml_value(v)}" for k, v in value.items() if v is not None)
            + " }"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(entry) for entry in value if entry is not None) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # nan, inf, -inf
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    # DEL is a control character to TOML and none to JSON
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _one_line(text: str) -> str:
    return " ".join(text.split())
