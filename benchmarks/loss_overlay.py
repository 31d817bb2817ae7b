"""Two rows of memory_budget.py drawn over each other: the losses of a step within a budget and of eager PyTorch.

python benchmarks/loss_overlay.py llama:wholestep:22GiB! llama:eager --svg docs/images/llama_22gib.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src")]
from wholestep.report.loss_picture import ticks  # noqa: E402
from wholestep.report.pictures import drawing  # noqa: E402
from wholestep.report.pictures.drawing import dot, line, rectangle, text  # noqa: E402

HEIGHT, TOP, LEFT, END, FLOOR = 420, 78, 70, 720, 360
STYLE = """<style>
  .page { fill: #ffffff } .ink { fill: #1f2328 } .faint { fill: #59636e } .grid { stroke: #e3e7eb }
  .under { fill: none; stroke: #c2410c; stroke-width: 5; opacity: 0.45 } .over { fill: #0b5cad } .under-words { fill: #c2410c }
  .over-words { fill: #0b5cad } .title { font-size: 17px; font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #14181d } .ink { fill: #e6e9ed } .faint { fill: #9aa4af } .grid { stroke: #2b323a } .under { stroke: #ffb077 }
    .over { fill: #8cc4ff } .under-words { fill: #ffb077 } .over-words { fill: #8cc4ff }
  }
  text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Arial, sans-serif; font-size: 12px }
</style>"""


def picture(ours: dict[str, Any], eager: dict[str, Any]) -> str:
    """Eager's losses as a broad line, ours as dots on it."""
    pairs = list(zip(ours["losses"], eager["losses"], strict=True))
    low, high = min(min(p) for p in pairs), max(max(p) for p in pairs)
    across = drawing.scale(0, len(pairs) - 1, LEFT, END)
    up = drawing.scale(low - 0.05 * (high - low), high + 0.05 * (high - low), FLOOR, TOP)
    apart = max(abs(a - b) for a, b in pairs)
    title = f"Losses of {ours['row']} and {eager['row']}"
    said = f"{len(pairs)} steps, largest difference {apart:.4f} ({apart / high:.2%} of the first loss)"
    body = [STYLE, rectangle(0, 0, drawing.WIDTH, HEIGHT, "page")]
    body += [text(LEFT, 30, title, "ink title"), text(LEFT, 52, said, "faint")]
    for value in ticks(low, high, 6):
        body += [
            line(LEFT, up(value), END, up(value), "grid"),
            text(LEFT - 8, up(value) + 4, f"{value:g}", "faint", "end"),
        ]
    body += [text(across(n), FLOOR + 20, str(n), "faint", "middle") for n in range(0, len(pairs), 4)]
    body.append(text((LEFT + END) / 2, FLOOR + 42, "step", "ink", "middle"))
    points = " ".join(f"{across(n):.1f},{up(b):.1f}" for n, (_, b) in enumerate(pairs))
    body.append(f'<polyline class="under" points="{points}"/>')
    body += [
        dot(across(n), up(a), 3.5, "over", hover=f"step {n}: {a:.4f}, eager {b:.4f}") for n, (a, b) in enumerate(pairs)
    ]
    for place, (row, kind, what) in enumerate(
        ((eager, "under-words", "line: eager"), (ours, "over-words", "dots: ours"))
    ):
        told = f"{what}, {row['peak_allocated_gib']:.1f} GiB allocated, {row['step_ms']:.0f} ms"
        body.append(text(END + 20, TOP + 20 + 22 * place, told, kind))
    return drawing.svg(HEIGHT, title, said, body, kind="losses") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs=2, metavar="ROW", help="ours, then eager's")
    parser.add_argument("--file", type=Path, default=HERE / "results" / "memory_budget.json")
    parser.add_argument("--svg", type=Path, required=True)
    given = parser.parse_args()
    rows = {row["row"]: row for row in json.loads(given.file.read_text("utf-8"))["rows"]}
    lacking = [name for name in given.rows if "losses" not in rows.get(name, {})]
    if lacking:
        sys.exit(f"loss_overlay: {given.file} has no finished row {', '.join(lacking)}; it has {', '.join(rows)}")
    given.svg.write_text(picture(rows[given.rows[0]], rows[given.rows[1]]), encoding="utf-8")
    print(f"{given.svg} written")


if __name__ == "__main__":
    main()
