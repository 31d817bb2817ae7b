"""`step.explain()`: at most a dozen lines on what a Step is and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wholestep.capture.ladder import COMPILED, EAGER
from wholestep.graph.bytes import show_bytes
from wholestep.graph.counted import counted
from wholestep.graph.keys import operator_name
from wholestep.graph.notes import Note
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import Role, TrainingGraph, module_of, phase_of
from wholestep.ops.record import is_unordered, record_of
from wholestep.ops.tuner import Choice
from wholestep.passes.precision_audit import summary

if TYPE_CHECKING:
    from wholestep.runtime.step import Step

MOST_NOTES = 5


MOST_KERNELS = 6


def told(plan: Plan) -> str:
    """The decisions of a plan in one line: the values that the backward pass recomputes, largest reasons first."""
    moved = {*plan.host, *plan.file, *plan.state}
    reasons = [key for key in plan.reasons if key not in moved]
    names = [key.replace("/", " ") for key in reasons] or [key.replace("/", " ") for key in plan.recompute]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"recomputed in the backward pass: {', '.join(names[:4])}{more}"


def told_moves(plan: Plan, facts: Mapping[str, Any]) -> list[str]:
    """What leaves the card, why, and how much of it: one line per kind."""
    lines = []
    for tier, names in (
        ("host", plan.host),
        ("file", plan.file),
        ("state", [n for n, p in plan.state.items() if p == "host"]),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            why = next((plan.reasons[name] for name in names if name in plan.reasons), "as the plan says")
            lines.append(f"{tier}: {', '.join(name.replace('/', ' ') for name in names[:3])}{more} ({why})")
    moved = facts.get("moved_bytes")
    if moved:
        arena = show_bytes(facts.get("host_bytes", 0) + facts.get("file_bytes", 0))
        lines.append(
            f"per step {show_bytes(moved['out'])} out, {show_bytes(moved['in'])} in; {arena} set aside for values"
        )
    return lines


def unordered(graph: TrainingGraph, device: str, *, compiled: bool) -> str | None:
    """The operators whose last bits may differ when an equal step is run again on this device, and where they are."""
    places: dict[str, list[str]] = {}
    for node in graph.operations():
        if is_unordered(node, device, compiled=compiled):
            places.setdefault(operator_name(node), []).append(module_of(node) or "the model itself")
    named = [
        f"{name} in {where[0]}" + (f" and {len(where) - 1} more places" if len(where) > 1 else "")
        for name, where in places.items()
    ]
    return f"not to the last bit, these add in any order: {'; '.join(named)}" if named else None


def told_in_notes(notes: Sequence[Note]) -> list[str]:
    """One line on all passes, one per check, and the first few of what else there is to know."""
    by_pass = [note.data for note in notes if note.kind == "pass"]
    changed = "; ".join(f"{one['pass']}: {one['before']} -> {one['after']}" for one in by_pass if "after" in one)
    said = [f"{one['pass']}: {one['said']}" for one in by_pass if "said" in one]
    passes = "; ".join(([f"{changed} nodes"] if changed else []) + said)
    lines = [f"passes     {passes}"] if passes else []
    lines += [f"check      {note.data['done']}: {note.data['said']}" for note in notes if note.kind == "check"]
    return lines + [f"note       {note}" for note in notes if note.kind not in ("pass", "check")][:MOST_NOTES]


def chosen(choices: Iterable[Choice]) -> str:
    """What was measured and taken in one line, each distinct choice once."""
    listed = list(dict.fromkeys(map(str, choices)))
    more = f" and {len(listed) - MOST_KERNELS} more" if len(listed) > MOST_KERNELS else ""
    return "; ".join(listed[:MOST_KERNELS]) + more


def _ranks(graph: TrainingGraph) -> str:
    """Who runs the step, what is divided, what is sent."""
    calls = Counter(operator_name(n) for n in graph.operations() if record_of(n).on_link is not None)
    sent = ", ".join(f"{count} {name}" for name, count in calls.items())
    return f"{graph.ranks.mesh} side by side, {len(graph.ranks.cuts)} parameters cut; {sent or 'nothing is sent'}"


def explain(step: Step) -> str:
    """One fact per line: rung, graph, inputs, lowering, falls, notes."""
    lines = [f"rung       {step.rung}"]
    graph = step.graph
    if graph is not None:
        phases = Counter(phase_of(node) for node in graph.operations())
        by_phase = ", ".join(f"{phases[p]} {p}" for p in ("forward", "backward", "update") if phases[p])
        roles = Counter(entry.role for entry in graph.inputs)
        listed = ", ".join(f"{roles[r]} {r.value}" for r in Role if roles[r])
        done = "captured and planned" if step.plan is not None and step.plan.budget_bytes else "captured"
        lines.append(
            f"graph      {sum(phases.values())} operations ({by_phase}), {done} in {step.seconds['capture']:.1f} s"
        )
        lines.append(f"inputs     {listed}")
        if graph.ranks.several:
            lines.append(f"ranks      {_ranks(graph)}")
        if step.options.recipe is not None:
            recipe = step.options.recipe
            lines.append(f"recipe     {counted(len(recipe), 'line')} of {recipe.source}")
        if step.plan is not None and step.plan.recompute:
            lines.append(f"plan       {told(step.plan)}")
        if step.plan is not None and step.plan.moves:
            lines += [f"offload    {line}" for line in told_moves(step.plan, step.regions)]
        precisions = summary(graph)
        if precisions is not None:
            lines.append(f"precision  {precisions}")
        facts = step.regions
        if facts.get("backend") == "inductor":
            lines.append(
                f"lowering   inductor: {facts.get('regions', '?')} regions, {facts.get('unique_regions', '?')} compiled, "
                f"{step.seconds['lower']:.1f} s"
            )
        else:
            lines.append(f"lowering   {facts.get('backend', 'interpret')}, {step.seconds['lower']:.1f} s")
        if step.choices:
            lines.append(f"kernels    {chosen(step.choices.values())}")
        lines += [f"lowering   {note}" for note in facts.get("notes", [])[:2]]
        loose = unordered(graph, step.subject.device.type, compiled=facts.get("backend") == "inductor")
        if loose is not None:
            lines.append(f"repeats    {loose}")
    if step.rung.endswith((COMPILED, EAGER)):
        lines.append("repeats    not to the last bit for certain: what is not captured whole runs as PyTorch runs it")
    lines += [f"fell       {fall}" for fall in step.falls]
    lines += told_in_notes(step.notes)
    counts = ((step.captures, "capture"), (step.compilations, "compilation"), (step.count, "step"))
    lines.append(f"so far     {', '.join(counted(number, thing) for number, thing in counts)}")
    return "\n".join(lines)
