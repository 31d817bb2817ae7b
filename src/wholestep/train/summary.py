"""The end of `wholestep train`: what it did, the loss as a picture, where the files are, what to try next."""

from __future__ import annotations

import dataclasses
import html
import json
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from wholestep.graph.bytes import show_bytes
from wholestep.graph.counted import counted, rate
from wholestep.report.loss_picture import loss_picture
from wholestep.report.terminal_picture import blocks_fit, chart, sparkline
from wholestep.train.display import duration
from wholestep.train.metrics import METRICS, losses_of, read_rows
from wholestep.train.run_folder import EXPLAIN, PICTURE, SAMPLE, RunFolder, open_run, write_file
from wholestep.train.running import Outcome

SAMPLE_LINES = 8


def write_picture(run: RunFolder) -> Path:
    """loss.svg of a run, from its metrics."""
    rows = read_rows(run.path / METRICS)
    losses, held = losses_of(rows), losses_of(rows, "held_out_loss")
    parts = [f"{run.facts.get('parameters', 0):,} parameters", counted(losses[-1][0], "step") if losses else "no steps"]
    parts += [f"held-out loss {held[-1][1]:.4f}"] if held else []
    path = run.path / PICTURE
    write_file(path, loss_picture(rows, title=title_of(run), subtitle=", ".join(parts)))
    return path


def title_of(run: RunFolder) -> str:
    """`gpt-1m on shakespeare`."""
    data = (run.facts.get("settings") or {}).get("data")
    name = str(run.facts.get("name", "a run"))
    return f"{name} on {data}" if isinstance(data, str) and data else name


def tell(outcome: Outcome, request: Mapping[str, Any], stream: IO[str]) -> None:
    """The last lines of a run, for people."""
    write_picture(open_run(outcome.folder))
    lines = outcome_lines(outcome, blocks=blocks_fit(stream), wide=stream.isatty())
    for label, command in zip(("next", "", ""), next_commands(outcome, request), strict=False):
        lines.append(f"{label:10}{command}")
    print("\n".join(lines), file=stream, flush=True)


def outcome_lines(outcome: Outcome, *, blocks: bool = True, wide: bool = False) -> list[str]:
    """How the run went; `wide` draws the loss over several lines."""
    points = [(float(step), loss) for step, loss in losses_of(read_rows(outcome.folder / METRICS))]
    lines = [headline(outcome), *_losses(outcome)]
    if wide:
        lines += ["", *chart(points, blocks=blocks), ""]
    elif points:
        lines.append(f"{'':10}{sparkline(points, blocks=blocks)}")
    return [*lines, *_sample(outcome), f"files     {outcome.folder}: {', '.join(_files(outcome))}"]


def outcome_html(outcome: Outcome) -> str:
    """The same for a notebook: the lines, and the picture of the loss."""
    lines = html.escape("\n".join([headline(outcome), *_losses(outcome), *_sample(outcome)]))
    rows = read_rows(outcome.folder / METRICS)
    return f"<pre>{lines}</pre>\n{loss_picture(rows, title=title_of(open_run(outcome.folder)))}"


def tell_briefly(outcome: Outcome, stream: IO[str]) -> None:
    """One line, for --quiet."""
    write_picture(open_run(outcome.folder))
    print(headline(outcome) + "; " + "; ".join(line[10:] for line in _losses(outcome)[:1]), file=stream, flush=True)


def as_json(outcome: Outcome, request: Mapping[str, Any]) -> str:
    """For programs."""
    write_picture(open_run(outcome.folder))
    facts = {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(outcome).items()}
    return json.dumps({**facts, "next": next_commands(outcome, request)}, indent=1)


def next_commands(outcome: Outcome, request: Mapping[str, Any]) -> list[str]:
    """Commands that work from here."""
    folder = shlex.quote(str(outcome.folder))
    more = "" if outcome.status == "interrupted" else f" --steps {2 * outcome.steps}"
    return [f"wholestep train --resume --out {folder}{more}", f"wholestep eval {folder}", verify_command(request)]


def verify_command(request: Mapping[str, Any]) -> str:
    """`wholestep verify` of what was trained."""
    words = ["wholestep", "verify", str(request.get("model"))]
    for option in ("data", "glob", "field", "tokenizer", "batch", "seq", "precision", "memory", "plan"):
        if request.get(option) is not None:
            words += [f"--{option}", str(request[option])]
    for text in request.get("sets") or ():
        words += ["--set", text]
    return shlex.join([*words, "--steps", "2"])


def headline(outcome: Outcome) -> str:
    """`trained   gpt-1m on shakespeare: 1,200 steps in 1:34 (...)`."""
    run = open_run(outcome.folder)
    speed = "" if outcome.units_per_second is None else f"{rate(outcome.units_per_second)} {outcome.unit}/s, "
    verb = "trained" if outcome.status == "finished" else "stopped"
    return (
        f"{verb}   {title_of(run)}: {counted(outcome.steps, 'step')} in {duration(outcome.seconds)} ({speed}"
        f"{show_bytes(outcome.memory_bytes)}), compiled in {duration(outcome.compile_seconds)}"
    )


def _losses(outcome: Outcome) -> list[str]:
    if outcome.first_loss is None or outcome.final_loss is None:
        return ["loss      none was finite"]
    held = "" if outcome.held_out is None else f", held out {outcome.held_out:.4f}"
    lines = [f"loss      {outcome.first_loss:.4f} -> {outcome.final_loss:.4f}{held}"]
    if outcome.skipped:
        lines.append(f"skipped   {outcome.skipped} of {outcome.steps} steps, whose gradients were not finite")
    if outcome.skipped_by_scale:
        lines.append(f"fp16      {by_loss_scaling(outcome.skipped_by_scale)}")
    return lines


def by_loss_scaling(count: int) -> str:
    """`3 steps skipped by loss scaling`."""
    return f"{counted(count, 'step')} skipped by loss scaling"


def _sample(outcome: Outcome) -> list[str]:
    if not outcome.sample:
        return []
    found: list[str] = []
    for line in outcome.sample.strip("\n").splitlines():
        found += textwrap.wrap(line, 70) or [""]
    shown: Sequence[str] = found[:SAMPLE_LINES]
    more = [f"{'':10}... ({SAMPLE})"] if len(found) > SAMPLE_LINES else []
    return [f"{'sample' if i == 0 else '':10}{line}".rstrip() for i, line in enumerate(shown)] + more


def _files(outcome: Outcome) -> list[str]:
    files = [PICTURE, METRICS, EXPLAIN] + ([SAMPLE] if outcome.sample is not None else [])
    return files + ([f"{outcome.checkpoint.parent.name}/{outcome.checkpoint.name}"] if outcome.checkpoint else [])
