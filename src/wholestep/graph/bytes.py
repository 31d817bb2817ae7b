"""Amounts of memory: from what people write to bytes, and back."""

from __future__ import annotations

import re

from wholestep.errors import BadOption

_UNITS = {"b": 1} | {
    letter + kind: base**power
    for power, letter in enumerate("kmgt", start=1)
    for kind, base in (("ib", 1024), ("b", 1000))
}
LEAST_BUDGET = 1 << 16
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")


def parse_bytes(amount: str | int) -> int:
    """`"12GiB"`, `"1.5 GB"` (decimal), `"800MiB"` or a whole number of bytes, as bytes."""
    if isinstance(amount, int) and not isinstance(amount, bool) and amount > 0:
        return amount
    found = _AMOUNT.fullmatch(amount) if isinstance(amount, str) else None
    unit = found[2].lower() if found else ""
    if found is None or (unit not in _UNITS and not (unit == "" and found[1].isdigit())):
        raise BadOption(f"{amount!r} is not an amount of memory", hint="write it as 12GiB, 800MiB, 12GB or in bytes")
    count = int(float(found[1]) * _UNITS.get(unit, 1)) if unit else int(found[1])
    if count < 1:
        raise BadOption(f"{amount!r} is less than one byte", hint="write it as 12GiB, 800MiB, 12GB or in bytes")
    return count


def parse_budget(amount: str) -> int:
    """The same for a memory budget as it is typed: one of a few bytes is a unit that was forgotten."""
    count = parse_bytes(amount)
    if count < LEAST_BUDGET:
        meant = f"did you mean {amount.strip()}GiB?" if amount.strip().isdigit() else "write it as 12GiB or 800MiB"
        raise BadOption(f"--memory {amount}: no step fits into {show_bytes(count)}", hint=meant)
    return count


def show_bytes(count: float) -> str:
    """For people: `"12.3 GiB"`, `"800 MiB"`, `"17 B"`."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            value = count / size
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.1f} {unit}"
    return f"{count:.0f} B"
