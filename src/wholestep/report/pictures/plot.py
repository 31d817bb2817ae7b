"""What a picture with memory on x and a numbered list at its side is made of: frame, axes, entries of the list."""

from __future__ import annotations

import dataclasses

from wholestep.report.pictures import drawing
from wholestep.report.pictures.drawing import dot, line, rectangle, text, ticks

HEIGHT, TOP, ROW = 470, 78, 33
FLOOR = HEIGHT - 62
MOST_LABELS = 14


def style(light: str, dark: str) -> str:
    """The colours that all such pictures have, and those of one picture."""
    return f"""<style>
  .page {{ fill: #ffffff }} .ink {{ fill: #1f2328 }} .faint {{ fill: #59636e }} .grid {{ stroke: #e3e7eb }}
  .axis {{ stroke: #818b98 }} .title {{ font-size: 17px; font-weight: 600 }} .on-dot {{ fill: #fff }}
  {light}
  @media (prefers-color-scheme: dark) {{
    .page {{ fill: #14181d }} .ink {{ fill: #e6e9ed }} .faint {{ fill: #9aa4af }} .grid {{ stroke: #2b323a }}
    .axis {{ stroke: #6b7682 }} .on-dot {{ fill: #14181d }}
    {dark}
  }}
  text {{ font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Arial, sans-serif; font-size: 12px }}
  .on-dot {{ font-size: 10px; font-weight: 600 }} .small {{ font-size: 11px }}
</style>"""


@dataclasses.dataclass(frozen=True, slots=True)
class Plot:
    """Where the plot lies, and which values it shows."""

    left: float
    side: float
    """Width of the list."""
    xs: tuple[float, float]
    ys: tuple[float, float]

    @property
    def end(self) -> float:
        return drawing.WIDTH - self.side

    @property
    def across(self) -> drawing.Scale:
        return drawing.scale(*self.xs, self.left, self.end)

    @property
    def up(self) -> drawing.Scale:
        return drawing.scale(*self.ys, FLOOR, TOP)

    def height(self, entries: int) -> float:
        """With so many entries in the list."""
        return max(HEIGHT, TOP + ROW * entries + 60)

    def frame(self, height: float, title: str, subtitle: str, *, below: str, above: str) -> list[str]:
        """The page, its titles, and the axes with their names."""
        across, up = self.across, self.up
        body = [rectangle(0, 0, drawing.WIDTH, height, "page")]
        body += [text(self.left, 30, title, "ink title"), text(self.left, 52, subtitle, "faint")]
        for value in ticks(*self.xs, 7):
            if self.xs[0] <= value <= self.xs[1]:
                body.append(line(across(value), FLOOR, across(value), FLOOR + 5, "axis"))
                body.append(text(across(value), FLOOR + 19, f"{value:g}", "faint", "middle"))
        for value in ticks(*self.ys, 6):
            if self.ys[0] <= value <= self.ys[1]:
                body.append(line(self.left, up(value), self.end, up(value), "grid"))
                body.append(text(self.left - 8, up(value) + 4, f"{value:,.10g}", "faint", "end"))
        body.append(line(self.left, FLOOR, self.end, FLOOR, "axis"))
        body.append(text((self.left + self.end) / 2, FLOOR + 42, below, "ink", "middle"))
        return [*body, text(16, TOP - 10, above, "ink")]

    def numbered(self, x: float, y: float, number: int, kind: str, hover: str) -> list[str]:
        """A mark with its number in it."""
        across, up = self.across(x), self.up(y)
        return [
            dot(across, up, 8, kind, hover=hover),
            text(across, up + 3.5, str(number), "on-dot", "middle", hover=hover),
        ]

    def entry(self, row: int, number: int, kind: str, figures: str, words: str, hover: str) -> list[str]:
        """What the list says of that number."""
        at, side = TOP + 10 + ROW * row, self.end + 22
        fitted = drawing.fitted(words, self.side - 48, character=5.9)
        return [
            dot(side, at - 4, 8, kind), text(side, at - 0.5, str(number), "on-dot", "middle"),
            text(side + 15, at, figures, "ink"), text(side + 15, at + 14, fitted, "small faint", hover=hover),
        ]  # fmt: skip

    def plain_entry(self, row: int, radius: float, kind: str, words: str) -> list[str]:
        """An entry without a number."""
        at, side = TOP + 10 + ROW * row, self.end + 22
        return [dot(side, at - 4, radius, kind), text(side + 15, at, words, "faint")]
