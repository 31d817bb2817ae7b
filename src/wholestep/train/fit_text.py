"""The answer to "will it fit?" for people and for programs: a Fit in, lines or plain data out.

The first line is the answer. Memory is that of the card: allocated, the allocator's slack, the CUDA context. Times carry a word
that says what they are worth.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from wholestep.graph.bytes import show_bytes
from wholestep.graph.counted import counted
from wholestep.graph.plan import Plan
from wholestep.plan.frontier import round_up
from wholestep.report.pictures.drawing import show_ms
from wholestep.report.pictures.frontier_staircase import Peer, frontier_staircase
from wholestep.report.terminal_frontier import frontier_plot
from wholestep.train.fit import Fit
from wholestep.train.remedies import remedies

GIB = 2**30
KINDS = (
    ("weights", "weights"), ("buffers", "buffers"), ("optimizer state", "optimizer state"), ("gradients", "gradients"),
    ("saved activations", "saved activations"), ("temporaries", "temporaries"), ("workspace", "workspace"),
)  # fmt: skip
MOST_LINES = 12


def fit_lines(fit: Fit, *, blocks: bool = True, plot: bool = True) -> list[str]:
    """A page: the answer, where the memory goes, the plan, the largest batch, time against memory."""
    lines = [verdict(fit)]
    lines += [f"{'help' if i == 0 else '':10}{text}" for i, text in enumerate(remedies(fit))]
    lines += ["", *_memory(fit), "", *_plan(fit), "", *_largest(fit), "", *_frontier(fit)]
    unit = "x" if fit.question.target.times == "relative" else "ms"
    limit = fit.question.budget_bytes / GIB
    if plot:
        lines += ["", *frontier_plot(plotted(fit), limit=limit, chosen=fit.chosen, unit=unit, blocks=blocks)]
    stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in fit.seconds.items() if name != "all")
    lines += ["", f"note      {_times(fit)}", *(f"note      {note}" for note in fit.notes)]
    return lines + [f"answered  in {fit.seconds['all']:.1f} s ({stages}); no GPU was used"]


def verdict(fit: Fit) -> str:
    """One line: does it fit?"""
    device, budget = fit.question.target.device, fit.question.budget_bytes
    used, point = fit.cards[fit.shown], fit.frontier[fit.shown]
    whole = device.title if fit.question.target.times == "relative" else f"{device.title}, {show_bytes(budget)}"
    where = whole if budget == device.memory_bytes else f"{show_bytes(budget)} of {device.title}"
    if not fit.fits:
        return f"{_title(fit)}: does not fit {where}; the least is {show_bytes(round_up(used))}"
    step = "the time of the fastest step" if fit.question.target.times == "relative" else "per step"
    return f"{_title(fit)}: fits {where}; takes {show_bytes(used)}, {time_of(fit, point.seconds)} {step} (predicted)"


def time_of(fit: Fit, seconds: float) -> str:
    """`412 ms`, or `1.13x` of the fastest plan where the card's speed is not known."""
    if fit.question.target.times == "relative":
        return f"{seconds / fit.frontier[0].seconds:.2f}x"
    return show_ms(1e3 * seconds) + ("" if fit.question.target.times == "calibrated" else " (not calibrated)")


def _title(fit: Fit) -> str:
    settings = fit.settings
    sizes = f"batch {settings['batch']}" if settings.get("batch") else ""
    sizes += f" x {settings['seq']}" if settings.get("seq") else ""
    parts = f" in {settings['accumulate']} parts" if settings.get("accumulate", 1) > 1 else ""
    mesh = fit.question.mesh
    ranks = f"each of {mesh.num_ranks} ranks ({mesh})" if mesh is not None and mesh.num_ranks > 1 else ""
    return ", ".join(part for part in (fit.name, sizes + parts, settings["precision"], ranks) if part)


def _times(fit: Fit) -> str:
    device = fit.question.target.device
    return {
        "calibrated": f"times are predicted; what kernels reach of the peaks was fitted to measurements on {device.title}",
        "not calibrated": f"times on {device.title} are not calibrated: they follow from its data sheet, not from measurements",
        "relative": "the speed of this card is not known: times are relative to its fastest plan",
    }[fit.question.target.times]


def _memory(fit: Fit) -> list[str]:
    point, card = fit.frontier[fit.shown], fit.cards[fit.shown]
    rows = [(words, point.breakdown.get(kind, 0)) for kind, words in KINDS]
    known = {kind for kind, _ in KINDS}
    rows.append(("other", sum(count for kind, count in point.breakdown.items() if kind not in known)))
    rows = [row for row in rows if row[1]]
    rows += [("allocated at the peak", point.peak_bytes), ("allocator and CUDA context", card - point.peak_bytes)]
    rows.append(("on the card", card))
    return [f"{'memory' if i == 0 else '':10}{words:28}{count / GIB:9.2f} GiB" for i, (words, count) in enumerate(rows)]


def _plan(fit: Fit) -> list[str]:
    told = plan_words(fit.frontier[fit.shown].plan)
    if len(told) > MOST_LINES:
        told = [*told[:MOST_LINES], f"... and {counted(len(told) - MOST_LINES, 'line')} more (--out plan.toml, --json)"]
    return [f"{'plan' if i == 0 else '':10}{text}" for i, text in enumerate(told)]


def plan_words(plan: Plan) -> list[str]:
    """What is recomputed rather than kept, by module, and why."""
    told = []
    if plan.early_update:
        told.append("parameters are updated as soon as their gradients are final")
    if plan.chunked_loss:
        told.append("the loss is computed in chunks, so that the logits are never whole")
    if not plan.recompute:
        told.append("nothing is recomputed: all that the backward pass needs is kept")
    told += _moved_words(plan)
    groups: dict[str, list[str]] = defaultdict(list)
    for name in plan.recompute:
        module, _, value = name.rpartition("/")
        groups[module].append(value)
    for module, values in groups.items():
        told.append(f"recompute {module or 'outside of modules'}: {', '.join(values)}")
        whys = dict.fromkeys(plan.reasons.get(f"{module}/{value}" if module else value, "") for value in values)
        told += [f"    {why}" for why in whys if why]
    return told


def _moved_words(plan: Plan) -> list[str]:
    """What waits outside of the card, and why."""
    told = []
    for tier, names in (("host memory", plan.host), ("files", plan.file)):
        for name in names:
            told.append(f"to {tier}: {name}")
            told += [f"    {plan.reasons[name]}"] if name in plan.reasons else []
    state = [name for name, place in plan.state.items() if place == "host"]
    if state:
        more = f" and {len(state) - 4} more" if len(state) > 4 else ""
        told.append(f"optimizer state on the host: {', '.join(state[:4])}{more}")
        told += [f"    {plan.reasons[state[0]]}"] if state[0] in plan.reasons else []
    return told


def _largest(fit: Fit) -> list[str]:
    if fit.largest is None:
        return ["largest   batch: not known for a function of your own"]
    if fit.largest.batch == 0:
        return [f"largest   not even one row fits ({fit.largest.how})"]
    doubt = "" if fit.largest.certain else "at least "
    return [f"largest   batch that fits: {doubt}{fit.largest.batch:,} ({fit.largest.how})"]


def _frontier(fit: Fit) -> list[str]:
    head = f"{'frontier':10}  {'on the card':>11}  {'step':>18}  what changes"
    lines = [head]
    for number, (point, card) in enumerate(zip(fit.frontier, fit.cards)):
        mark = ">" if number == fit.chosen else " "
        shown = time_of(fit, point.seconds).replace(" (not calibrated)", "")
        words = point.change or "everything is kept"
        lines.append(f"{'':10}{mark} {card / GIB:7.2f} GiB  {shown:>18}  {words}")
    return lines


def plotted(fit: Fit) -> Sequence[tuple[float, float]]:
    """(GiB on the card, ms or multiples of the fastest) of every point."""
    unit = fit.frontier[0].seconds if fit.question.target.times == "relative" else 1e-3
    return [(card / GIB, point.seconds / unit) for point, card in zip(fit.frontier, fit.cards)]


def fit_picture(fit: Fit, peers: Sequence[Peer] = ()) -> str:
    """The staircase of a Fit; peers only where times are comparable."""
    times = fit.question.target.times
    knees = [(x, y, point.change) for (x, y), point in zip(plotted(fit), fit.frontier)]
    name, _, answer = verdict(fit).partition(": ")
    subtitle = answer + (" (not calibrated)" if times == "not calibrated" and "not calibrated" not in answer else "")
    return frontier_staircase(
        knees, title=name, subtitle=subtitle, unit="x" if times == "relative" else "ms",
        budget=fit.question.budget_bytes / GIB, chosen=fit.chosen, peers=() if times == "relative" else peers,
    )  # fmt: skip


def fit_html(fit: Fit) -> str:
    """For a notebook: the lines down to the frontier, and the staircase of time against memory."""
    lines = fit_lines(fit, plot=False)
    return f"<pre>{html.escape(chr(10).join(lines))}</pre>\n{fit_picture(fit)}"


def fit_json(fit: Fit) -> dict[str, Any]:
    """Everything, for programs."""
    target = fit.question.target
    points = [
        {
            "peak_bytes": point.peak_bytes, "card_bytes": card, "seconds": point.seconds, "breakdown": dict(point.breakdown),
            "change": point.change, "recompute": list(point.plan.recompute), "host_bytes": point.host_bytes,
            "moved_bytes": {way: point.moved_bytes.get(way, 0) for way in ("out", "in")}, "wait_seconds": point.waits,
        }
        for point, card in zip(fit.frontier, fit.cards)
    ]  # fmt: skip
    largest = fit.largest
    return {
        "model": fit.name, "settings": dict(fit.settings), "num_parameters": fit.num_parameters,
        "num_operations": fit.num_operations, "device": target.device.name, "device_bytes": target.device.memory_bytes,
        "budget_bytes": fit.question.budget_bytes, "times": target.times, "fits": fit.fits, "chosen": fit.chosen,
        "smallest_bytes": min(fit.cards), "plan": fit.plan.to_json(), "frontier": points, "remedies": remedies(fit),
        "largest_batch": None if largest is None else
        {"batch": largest.batch, "how": largest.how, "certain": largest.certain},
        "notes": list(fit.notes), "seconds": dict(fit.seconds),
    }  # fmt: skip
