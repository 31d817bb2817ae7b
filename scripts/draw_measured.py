"""docs/images/measured.svg: milliseconds per training step on one H200, as bars, from the rows under benchmarks/results/.

python scripts/draw_measured.py
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "images" / "measured.svg"
MODELS = {"bert": "BERT-large 32x512", "gpt2": "GPT-2-medium 16x1024", "llama": "Llama-1.2B 8x2048"}
SYSTEMS = {"eager": "eager PyTorch", "compile": "torch.compile", "wholestep": "Wholestep"}
COLOURS = {"eager": "#b6bcc6", "compile": "#7f8aa0", "wholestep": "#e4572e"}
LEFT, WIDE, BAR, GAP = 190, 470, 17, 24


def rows() -> dict[tuple[str, str], tuple[float, float]]:
    """(model, system) -> milliseconds and GiB, from the table of workloads."""
    found = {}
    for row in json.loads((RESULTS / "bench_h200.json").read_text("utf-8"))["rows"]:
        model = {"bert-large": "bert", "gpt2-medium": "gpt2", "llama-1b": "llama"}.get(row["workload"])
        if model is not None:
            found[model, row["contender"]] = row["step_ms"]["median"], row["memory"]["peak_bytes"] / 2**30
    return found


def draw() -> str:
    found = rows()
    longest = max(ms for ms, _ in found.values())
    parts, y = [], 46
    for model, title in MODELS.items():
        systems = [s for s in SYSTEMS if (model, s) in found]
        middle = y + len(systems) * BAR / 2 + 4
        parts.append(f'<text x="{LEFT - 12}" y="{middle:.0f}" text-anchor="end" class="name">{title}</text>')
        for system in systems:
            ms, memory = found[model, system]
            width = WIDE * ms / longest
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 3}" rx="2" fill="{COLOURS[system]}"/>'
            )
            kind = "own" if system == "wholestep" else "peer"
            label = f"{SYSTEMS[system]}  {ms:.0f} ms, {memory:.0f} GiB"
            parts.append(f'<text x="{LEFT + width + 6:.1f}" y="{y + BAR - 5}" class="{kind}">{label}</text>')
            y += BAR
        y += GAP
    style = (
        "text{font:12px system-ui,sans-serif;fill:#333}.name{font-size:13px;font-weight:600}.own{font-weight:700}"
        ".title{font-size:14px;font-weight:600}@media(prefers-color-scheme:dark){text{fill:#ddd}}"
    )
    title = "Milliseconds per training step on one H200 (shorter is better), and peak memory"
    size = f'width="{LEFT + WIDE + 190}" height="{y - GAP + 12}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {LEFT + WIDE + 190} {y - GAP + 12}" role="img">'
    )
    return "\n".join([
        head, f"<title>{title}</title><style>{style}</style>", f'<text x="16" y="24" class="title">{title}</text>',
        *parts, "</svg>", "",
    ])  # fmt: skip


if __name__ == "__main__":
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(draw(), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))
