"""The page of a profile: the JSON of a Profile in, one HTML file as text out.

Self-contained: style, script and pictures are inside, nothing is fetched. Everything it shows is in the JSON twin that is
written beside it; the page only formats. Text is escaped by the template engine, that of pictures by `pictures/drawing.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wholestep.graph.bytes import show_bytes
from wholestep.graph.counted import counted, digits
from wholestep.report.module_tree import module_rows
from wholestep.report.pictures.drawing import NARROW, WIDTH, show_ms
from wholestep.report.pictures.memory_area import memory_area
from wholestep.report.pictures.module_icicle import module_icicle
from wholestep.report.pictures.predicted_bars import predicted_bars
from wholestep.report.pictures.roofline_chart import roofline_chart
from wholestep.report.pictures.verify_strip import verify_strip
from wholestep.report.pictures.waterfall import waterfall

TEMPLATES = Path(__file__).parent / "templates"
MOST_ROWS = 400
"""Of the table: more are in the JSON."""


def render_page(profile: Mapping[str, Any]) -> str:
    """The HTML of `Profile.to_json()`."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "ms": show_ms,
        "bytes": show_bytes,
        "count": show_count,
        "percent": show_percent,
        "sort": sort_key,
        "gain": lambda action: show_gain(action, profile["step_ms"]["median"]),
    }
    template = environment.get_template("page.html.j2")
    return template.render(
        p=profile, wide=pictures_of(profile), narrow=pictures_of(profile, NARROW),
        modules=module_rows(profile["modules"], profile["step_ms"]["median"]),
        rows=profile["rows"][:MOST_ROWS], left_out=max(len(profile["rows"]) - MOST_ROWS, 0), cards=cards_of(profile),
        copies=copy_lines(profile["copies"]), on_gpu=profile["shares"]["gpu_busy"] is not None,
        settings=_settings(profile["settings"]), version=str(profile["format"]),
    )  # fmt: skip


def write_report(profile: Mapping[str, Any], path: Path) -> Path:
    """Write the page and, under the same name, the JSON; the path of the JSON."""
    twin = path.with_suffix(".json")
    path.write_text(render_page(profile), encoding="utf-8")
    twin.write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")
    return twin


def pictures_of(profile: Mapping[str, Any], width: float = WIDTH) -> dict[str, str]:
    """Name -> SVG, in the order of the page."""
    memory, verified = profile["memory"], profile["verified"]
    used = (profile["utilisation"] or {}).get("format", "fp32")
    return {
        "memory": memory_area(
            memory, eager=profile["eager_memory"], budget=profile["budget_bytes"], capacity=profile["device"]["memory_bytes"],
            width=width,
        ),
        "icicle": module_icicle(None if memory is None else memory["icicle"], width=width),
        "waterfall": waterfall(profile["waterfall"], profile["step_ms"]["median"], width=width),
        "roofline": roofline_chart(profile["rows"], profile["device"], number_format=used, width=width),
        "strip": verify_strip(None if verified is None else verified["rows"], width=width),
        "predicted": predicted_bars(profile["predictions"], width=width),
    }  # fmt: skip


def cards_of(profile: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(what, number, a remark) for the head of the page."""
    times, shares, used, memory = profile["step_ms"], profile["shares"], profile["utilisation"], profile["memory"]
    spread = f"{show_ms(times['lowest'])} to {show_ms(times['highest'])}, {counted(len(times['all']), 'step')}"
    cards = [("step", show_ms(times["median"]), spread)]
    if profile["system"] == "wholestep":
        cards.append(("compiling", show_ms(times["compile"]), f"then the first step, {show_ms(times['first'])}"))
    cards.append(
        ("throughput", show_count(times["units_per_second"]), f"{profile['unit']}/s, {profile['units']} per step")
    )
    if used is not None:
        cards.append(("MFU", show_percent(used["mfu"]), f"HFU {show_percent(used['hfu'])}, {used['format']} peak"))
    if memory is not None:
        eager = profile["eager_memory"]
        beside = "" if eager is None else f"eager {show_bytes(eager['peak_bytes'])}"
        cards.append(("peak memory", show_bytes(memory["peak_bytes"]), beside))
    if shares["gpu_busy"] is not None:
        cards.append(("GPU busy", show_percent(shares["gpu_busy"]), "time with a kernel running"))
    cards.append(("between calls", show_percent(shares["between_calls"]), "host time no call accounts for"))
    cards.append(("waiting for data", show_percent(shares["data_wait"]), f"{show_ms(times['data_median'])} per batch"))
    return cards


def copy_lines(copies: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """(what, in words) of a step's copies between card and host, for the page and the terminal."""
    if copies is None:
        return []
    link, found = copies["link"], []
    for way, words in (("out", "to the host"), ("in", "back")):
        rate, whole = copies["rates"][way], None if link is None else link[way]
        text = f"{show_bytes(copies['moved_bytes'][way])} a step"
        if rate is not None:
            text += f", {show_count(rate)}B/s while copies run"
            text += "" if whole is None else f", {rate / whole:.0%} of the link's {show_count(whole)}B/s"
        found.append((words, text))
    if link is not None:
        found.append(("both ways", f"the link moves {show_count(link['both'])}B/s each way when both are busy"))
    waits = f"{show_ms(copies['wait_ms'])} a step, {show_percent(copies['wait_share'])} of it"
    found.append(("waits", f"{waits}{'; on a CPU copies are made at once' if copies['stand_in'] else ''}"))
    arena = f"{show_bytes(copies['arena_bytes'])}, of which values take {show_bytes(copies['arena_used_bytes'])}"
    found.append(("arena", arena if copies["arena_bytes"] else "none: no value waits in the host's memory"))
    for name, what in (("state_bytes", "optimizer state on the host"), ("file_bytes", "in files")):
        found += [(what, show_bytes(copies[name]))] if copies[name] else []
    return found


def show_count(value: float | None) -> str:
    """`1.23 G`; `-` for None."""
    if value is None:
        return "-"
    for letter, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{digits(value / size)} {letter}"
    return digits(value)


def show_percent(share: float | None) -> str:
    """`12 %`, `1.2 %` where that is little; `-` for None."""
    if share is None:
        return "-"
    return f"{share:.0%}" if abs(share) >= 0.0995 else f"{share:.1%}"


def show_gain(action: Mapping[str, Any], step_ms: float) -> str:
    """`predicted: -22% of the peak`, or `at most 152 ms, 24% of the step` where it is a bound."""
    share = show_percent(action["gain"])
    if action["about"] == "equality":
        return "before anything else"
    if action["predicted"] is not None:
        return f"predicted: -{share} of the peak"
    if action["about"] == "memory":
        return f"at most {share} of the peak"
    return f"at most {show_ms(action['gain'] * step_ms)}, {share} of the step"


def sort_key(value: Any) -> str:
    """What the script sorts a cell by."""
    return "" if value is None else f"{value:.9g}" if isinstance(value, int | float) else str(value)


def _settings(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (key, json.dumps(value) if isinstance(value, dict | list) else str(value)) for key, value in settings.items()
    ]
