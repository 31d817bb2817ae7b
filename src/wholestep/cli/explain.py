"""`wholestep explain`: what a run or a checkpoint is and how it went, or what a plan says, in a page."""

from __future__ import annotations

import json as json_text
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wholestep.cli import options
from wholestep.graph.counted import counted

if TYPE_CHECKING:
    from wholestep.graph.plan import Plan
    from wholestep.train.run_folder import RunFolder

WIDTH = 100
MOST_NOTES = 3

EXAMPLES = """\b
Examples:
  wholestep explain runs/gpt-1m-shakespeare
  wholestep explain runs/gpt-1m-shakespeare/checkpoints/step-000800
  wholestep explain runs/gpt-1m-shakespeare --json
  wholestep explain plan.toml
"""


def command(
    run: Annotated[
        Path, typer.Argument(metavar="PLAN|RUN", help="A run's folder, its run.json, a checkpoint, or a plan.toml.")
    ],
    json: options.Json = False,
) -> None:
    """Say what a run did: settings, what was captured, what fell back, losses so far. Or what a plan decides, and why."""
    if run.suffix == ".toml":
        from wholestep.graph.plan_file import read_plan

        plan = read_plan(run)
        typer.echo(json_text.dumps(plan.to_json(), indent=1) if json else "\n".join(_plan_lines(run, plan)))
        return
    facts = _alone(run)
    if facts is not None:
        typer.echo(json_text.dumps(facts, indent=1) if json else "\n".join(_checkpoint_lines(run, facts)))
        return
    from wholestep.train.run_folder import open_run

    found = open_run(run)
    try:
        text = json_text.dumps(as_facts(found), indent=1) if json else "\n".join(lines_of(found))
    except (
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
    ) as error:  # only files were read: one of them is not as written
        from wholestep.errors import BadOption, one_line

        what = f"{found.path} is damaged: run.json or metrics.jsonl holds what no run writes ({one_line(error)})"
        raise BadOption(what, hint="its checkpoints may still be good") from error
    typer.echo(text)


def _plan_lines(path: Path, plan: Plan) -> list[str]:
    """A plan for people."""
    from wholestep.graph.bytes import show_bytes
    from wholestep.report.pictures.drawing import show_ms
    from wholestep.train.fit_text import plan_words

    made = dict(plan.made_for)
    main = {name: made.pop(name) for name in ("model", "batch", "seq", "precision", "device") if name in made}
    lines = [f"plan        {path}: for {_joined(main) or 'anything'}"]
    if plan.predicted_bytes is not None:
        budget = "" if plan.budget_bytes is None else f", for a budget of {show_bytes(plan.budget_bytes)} of the card"
        lines.append(f"memory      {show_bytes(plan.predicted_bytes)} allocated at the peak{budget} (predicted)")
    if plan.predicted_seconds is not None:
        lines.append(f"time        {show_ms(1e3 * plan.predicted_seconds)} per step (predicted)")
    lines += [f"kernel      {place}: {name}" for place, name in plan.kernel.items()]
    lines += [f"{'decisions' if i == 0 else '':12}{text}" for i, text in enumerate(plan_words(plan))]
    return lines + _wrapped("made for", _joined(made), 8)


def as_facts(run: RunFolder) -> dict[str, Any]:
    """run.json, with the losses so far and the checkpoints."""
    from wholestep.train.metrics import METRICS, losses_of, read_rows

    rows = read_rows(run.path / METRICS)
    return run.facts | {
        "folder": str(run.path),
        "losses": losses_of(rows),
        "held_out_losses": losses_of(rows, "held_out_loss"),
        "skipped": sum(1 for row in rows if row.get("skipped") and not row.get("by_loss_scale")),
        "skipped_by_scale": sum(1 for row in rows if row.get("by_loss_scale")),
        "last": next((row for row in reversed(rows) if "loss" in row), None),
        "checkpoints": sorted(path.name for path in run.checkpoints.glob("step-*")),
    }


def lines_of(run: RunFolder) -> list[str]:
    """A page for people."""
    from wholestep.graph.bytes import show_bytes
    from wholestep.graph.counted import rate
    from wholestep.report.terminal_picture import blocks_fit, sparkline
    from wholestep.train.display import duration
    from wholestep.train.summary import by_loss_scaling, title_of

    facts = as_facts(run)
    losses, held, last = facts["losses"], facts["held_out_losses"], facts["last"] or {}
    compiled, device = facts.get("compile") or {}, facts.get("device") or {}
    lines = [f"run         {run.path}: {title_of(run)}, {facts.get('status')}"]
    lines.append(f"steps       {losses[-1][0] if losses else 0:,} of {facts.get('steps', 0):,}")
    lines += _wrapped("data", str(facts.get("data", "")), 2)
    lines += _wrapped("settings", _settings(facts.get("settings")), 6)
    machine = device.get("name", device.get("type", "?"))
    lines.append(f"machine     {machine}, {_joined(facts.get('versions'))}; backend {facts.get('backend')}")
    if compiled:
        lines.append(
            f"captured    {compiled.get('rung')}, {compiled.get('operations', 0):,} operations, "
            f"{counted(compiled.get('captures') or 0, 'capture')}; compiled in {duration(compiled.get('seconds', 0.0))}"
        )
        lines += [line for fall in compiled.get("falls", [])[:MOST_NOTES] for line in _wrapped("fell", fall, 2)]
        lines += [line for note in compiled.get("notes", [])[:MOST_NOTES] for line in _wrapped("note", note, 1)]
    if losses:
        best = f", held out {held[-1][1]:.4f} (lowest {min(v for _, v in held):.4f})" if held else ""
        lines.append(f"loss        {losses[0][1]:.4f} -> {losses[-1][1]:.4f} at step {losses[-1][0]:,}{best}")
        lines.append(f"{'':12}{sparkline(losses, blocks=blocks_fit(sys.stdout))}")
    speed = next(((name, value) for name, value in last.items() if name.endswith("_per_second") and value), None)
    if speed is not None:
        unit = speed[0].removesuffix("_per_second")
        memory = show_bytes(last.get("memory_bytes", 0))
        lines.append(f"speed       {rate(speed[1])} {unit}/s, {memory}, {duration(last['seconds'])} of training")
    if facts["skipped"]:
        lines.append(f"skipped     {facts['skipped']} steps, whose gradients were not finite")
    if facts["skipped_by_scale"]:
        lines.append(f"fp16        {by_loss_scaling(facts['skipped_by_scale'])}")
    if (facts.get("result") or {}).get("trouble"):
        lines += _wrapped("trouble", facts["result"]["trouble"], 3)
    kept = facts["checkpoints"]
    lines.append(f"checkpoints {', '.join(kept[-3:]) if kept else 'none yet'}")
    if facts.get("status") != "finished":
        lines.append(f"go on       wholestep train --resume --out {run.path}")
    return lines


def _settings(settings: Any) -> str:
    from wholestep.train.run_folder import flat

    return _joined(flat(settings or {}))


def _joined(table: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in (table or {}).items() if value is not None)


def _wrapped(label: str, text: str, most: int) -> list[str]:
    """`text` beside its label in at most `most` lines."""
    found = textwrap.wrap(text, WIDTH - 12, max_lines=most, placeholder=" ...")
    return [f"{label if i == 0 else '':12}{line}" for i, line in enumerate(found)]


def _alone(path: Path) -> dict[str, Any] | None:
    """checkpoint.json of a checkpoint that belongs to no run of this command (`wholestep.save` in a user's own loop)."""
    from wholestep.train.run_folder import FACTS

    stored = path / "checkpoint.json"
    if not stored.is_file() or (path.parent.parent / FACTS).is_file():
        return None
    from wholestep.disk import read_json
    from wholestep.errors import BadOption

    try:
        facts = read_json(stored)
        return {name: facts[name] for name in ("format", "version", "number", "files", "torch", "data", "config")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadOption(
            f"{stored} is no complete checkpoint: {error}", hint="give one that wholestep.save wrote"
        ) from error


def _checkpoint_lines(path: Path, facts: dict[str, Any]) -> list[str]:
    from wholestep.graph.bytes import show_bytes

    files = ", ".join(f"{name} {show_bytes(size)}" for name, size in facts["files"].items())
    lines = [f"checkpoint  {path}: after {counted(facts['number'], 'step')}, written by torch {facts['torch']}"]
    lines += _wrapped("files", files, 2)
    lines += _wrapped("data", str(facts["data"]), 2)
    return lines + _wrapped("config", str(facts["config"]), 6)
