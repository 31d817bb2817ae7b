"""Numbers in sentences: `1 capture`, `2 captures`; three digits that are never an exponent."""

from __future__ import annotations


def counted(number: int, thing: str, things: str | None = None) -> str:
    """`1 step`, `1,200 steps`, `2 batches` (`things` where the plural takes more than an s)."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def rate(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def digits(value: float, count: int = 3) -> str:
    """So many digits that count, and no exponent for large numbers: 99.96 is `100`, 1234 is `1230`."""
    text = f"{value:.{count}g}"
    return f"{float(text):.0f}" if "e+" in text else text
