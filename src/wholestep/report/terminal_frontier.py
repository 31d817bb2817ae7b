"""Time against memory in a terminal: a staircase of block characters, the budget as a vertical.

In: (GiB, time) of the knees, from the most memory to the least. Out: lines. Left of the smallest plan nothing runs; between two
knees the plan of the left one is used.
"""

from __future__ import annotations

from collections.abc import Sequence

WIDTH, HEIGHT = 64, 9


def frontier_plot(
    points: Sequence[tuple[float, float]], *, limit: float, chosen: int | None, unit: str = "ms",
    blocks: bool = True,
) -> list[str]:  # fmt: skip
    """The picture; empty when there is only one plan, of which a picture would show nothing."""
    if len(points) < 2:
        return []
    low = min(x for x, _ in points)
    high = max(x for x, _ in points)
    room = (high - low) * 0.08 or 0.01  # plans may be as large as each other
    left, right = low - room, high + room
    fastest, slowest = min(y for _, y in points), max(y for _, y in points)
    tread, riser, knee, mark, wall = ("─", "│", "●", "◆", "┊") if blocks else ("-", "|", "o", "*", ":")

    def column(x: float) -> int:
        return min(max(round((x - left) / (right - left) * (WIDTH - 1)), 0), WIDTH - 1)

    def row(y: float) -> int:
        return round((slowest - y) / ((slowest - fastest) or 1.0) * (HEIGHT - 1))

    cells = [[" "] * WIDTH for _ in range(HEIGHT)]
    if left <= limit <= right:
        for line in cells:
            line[column(limit)] = wall
    edge = WIDTH
    for number, (x, y) in enumerate(points):
        for c in range(column(x), edge):
            cells[row(y)][c] = tread
        if number + 1 < len(points):
            for r in range(row(points[number + 1][1]) + 1, row(y)):
                cells[r][column(x)] = riser
        edge = column(x)
    for number, (x, y) in enumerate(points):
        cells[row(y)][column(x)] = mark if number == chosen else knee
    labels = {0: f"{slowest:.4g} {unit}", HEIGHT - 1: f"{fastest:.4g} {unit}"}
    margin = max(map(len, labels.values()))
    corner, floor, side = ("└", "─", "┤") if blocks else ("+", "-", "|")
    lines = [f"{labels.get(r, ''):>{margin + 10}} {side}{''.join(line)}".rstrip() for r, line in enumerate(cells)]
    lines.append(" " * (margin + 11) + corner + floor * WIDTH)
    first, last = f"{low:.1f} GiB", f"{high:.1f} GiB on the card"
    lines.append(" " * (margin + 12) + first + f"{last:>{max(WIDTH - len(first), len(last) + 1)}}")
    return lines
