"""Times by module -> the rows of a tree, equal layers folded: `{path: {phase: ms}}` in, rows in the order of the tree out.

Layers are siblings with numbers for names; they become one row, with the number of them and the sum of their times, as do
their children. A row holds the time of everything inside its module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wholestep.graph.layers import layer_pattern

LEAST_SHARE = 0.001
"""Of the step: smaller modules are left out of the tree; the JSON has them."""


def module_rows(modules: Mapping[str, Mapping[str, float]], step_ms: float) -> list[dict[str, Any]]:
    """Rows with path, name, depth, count, phases, ms, own_ms and share."""
    root: dict[str, Any] = {"path": "", "name": "(whole step)", "layers": set(), "own": {}, "children": {}}
    for path, phases in modules.items():
        place, layer = root, ""
        for part in path.split(".") if path else ():
            layer = f"{layer}.{part}".lstrip(".")
            name = layer_pattern(part)
            place = place["children"].setdefault(
                name, {"path": f"{place['path']}.{name}".lstrip("."), "name": name, "layers": set(), "own": {}, "children": {}}
            )  # fmt: skip
            place["layers"].add(layer)
        for phase, ms in phases.items():
            place["own"][phase] = place["own"].get(phase, 0.0) + ms
    rows: list[dict[str, Any]] = []
    _listed(root, 0, rows)
    return [
        row | {"share": row["ms"] / step_ms if step_ms else 0.0} for row in rows if row["ms"] >= LEAST_SHARE * step_ms
    ]


def _listed(place: dict[str, Any], depth: int, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Adds the row of a place, then those inside it; the times of everything inside."""
    row: dict[str, Any] = {
        "path": place["path"],
        "name": place["name"],
        "depth": depth,
        "count": max(len(place["layers"]), 1),
    }
    rows.append(row)
    phases = dict(place["own"])
    start = len(rows)
    blocks: list[tuple[float, list[dict[str, Any]]]] = []
    for child in place["children"].values():
        for phase, ms in _listed(child, depth + 1, rows).items():
            phases[phase] = phases.get(phase, 0.0) + ms
        blocks.append((rows[start]["ms"], rows[start:]))
        del rows[start:]
    for _, block in sorted(blocks, key=lambda entry: -entry[0]):
        rows.extend(block)
    row |= {"phases": phases, "ms": sum(phases.values()), "own_ms": sum(place["own"].values())}
    return phases
