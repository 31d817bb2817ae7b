"""A Profile for people: a few lines for the terminal, a frame with the whole page for notebooks."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from wholestep.graph.bytes import show_bytes
from wholestep.graph.counted import counted
from wholestep.report.page import copy_lines, render_page, show_count, show_gain, show_percent
from wholestep.report.pictures.drawing import show_ms

if TYPE_CHECKING:
    from wholestep.profile.profile import Profile

SHOWN_ACTIONS = 3
SHOWN_ROWS = 5


def summary_lines(profile: Profile) -> list[str]:
    """At most 30 lines about the step."""
    times, shares = profile.step_ms, profile.shares
    how = profile.system if profile.system == profile.backend else f"{profile.system}, {profile.backend}"
    lines = [
        f"{profile.name}: {show_ms(times['median'])} per step ({show_ms(times['lowest'])} to {show_ms(times['highest'])}, "
        f"{counted(len(times['all']), 'step')}), {show_count(times['units_per_second'])} {profile.unit}/s, {how}"
    ]
    if profile.busy is not None:
        lines.append(f"note      {profile.busy}")
    if profile.system == "wholestep":
        lines.append(f"start     compiled in {show_ms(times['compile'])}, first step {show_ms(times['first'])}")
    phases = ", ".join(f"{name} {show_ms(ms)}" for name, ms in profile.phases.items() if ms > 0)
    lines.append(f"time      {phases}")
    if profile.floor_ms is not None:
        least = f"{show_ms(profile.floor_ms)} at least by the roofline of {profile.device['title']}"
        lines.append(f"least     {least}: {profile.floor_ms / times['median']:.0%} of the step")
    busy = "" if shares["gpu_busy"] is None else f"GPU busy {show_percent(shares['gpu_busy'])}, "
    between = show_percent(shares["between_calls"])
    lines.append(f"host      {busy}between calls {between}, waiting for data {show_percent(shares['data_wait'])}")
    lines += [f"          {line}" for line in (profile.utilisation or {}).get("lines", ())]
    if profile.memory is not None:
        eager = "" if profile.eager_memory is None else f"; eager {show_bytes(profile.eager_memory.peak_bytes)}"
        split = sorted(((n, c) for c, n in profile.memory.at_peak.items() if n), reverse=True)[:4]
        told = ", ".join(f"{name} {show_bytes(count)}" for count, name in split)
        lines.append(f"memory    peak {show_bytes(profile.memory.peak_bytes)} ({told}){eager}")
    copies = copy_lines(profile.copies)
    lines += [f"{'' if index else 'copies':10}{what}: {words}" for index, (what, words) in enumerate(copies)]
    if profile.verified is not None:
        verdict = "equal to eager" if profile.verified["ok"] else "DIFFERS from eager"
        lines.append(f"verified  {verdict}, {counted(len(profile.verified['rows']), 'value')}")
    lines += _rows(profile)
    lines += _actions(profile)
    return lines + [f"note      {note}" for note in profile.notes[:2]]


def _actions(profile: Profile) -> list[str]:
    """What to do, each with the line to copy below it."""
    found: list[str] = []
    for action in profile.actions[:SHOWN_ACTIONS]:
        label = "" if found else "do"
        found.append(f"{label:10}{action['title']} ({show_gain(action, profile.step_ms['median'])})")
        copied = action["command"] or action["python"]
        found += [f"{'':12}{copied}"] if copied else []
    return found


def _rows(profile: Profile) -> list[str]:
    """The rows that lose most; by time alone where nothing else is known."""
    found: list[str] = []
    for row in profile.rows[:SHOWN_ROWS]:
        what = " ".join(word for word in (row.name, row.phase, row.module) if word)
        bound = "" if row.bound in (None, "nothing") else f", {row.bound}-bound"
        lost = "" if row.lost_ms is None else f": {row.lost_ms:.3g} ms lost{bound}"
        label = "" if found else "calls"
        found.append(f"{label:10}{row.ms:8.3g} ms {row.share:4.0%} x{row.calls:<4} {what}{lost}")
    return found


def framed_page(profile: Profile) -> str:
    """The page in a frame of its own, so that its style and script do not meet those of a notebook."""
    page = html.escape(render_page(profile.to_json()), quote=True)
    return f'<iframe srcdoc="{page}" width="100%" height="700" style="border: 1px solid #ccc"></iframe>'
