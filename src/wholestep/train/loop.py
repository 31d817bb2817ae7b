"""`train`: a Job and a folder in, a trained model and an account of it out.

The folder comes first, so that a disk that refuses is told before anything is compiled; then compiling; then the run itself
(running.py). Going on from a checkpoint gives the bits of a run that was never stopped: model, optimizer, schedule, random
numbers and the position in the data are all in it.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from wholestep import api
from wholestep.errors import BadCheckpoint, BadOption
from wholestep.graph.bytes import show_bytes
from wholestep.graph.counted import counted
from wholestep.graph.plan_file import numbers_check
from wholestep.runtime.step import Step
from wholestep.schedule import recipe_file, recipe_of
from wholestep.train.checkpoint_files import Stored, open_stored
from wholestep.train.config_file import CONFIG, config_text, resolved
from wholestep.train.job import Job
from wholestep.train.loggers import Logger, Loggers
from wholestep.train.run_folder import (
    DECISIONS,
    RunFolder,
    first_change,
    new_run,
    open_run,
    refuse_changed,
    surroundings,
    write_file,
)
from wholestep.train.running import Outcome, Run
from wholestep.train.saved import DATA_FILES
from wholestep.train.watch import Display, Interrupts, Silent


def train(
    job: Job,
    *,
    out: Path | None = None,
    steps: int | None = None,
    resume: bool = False,
    save_every: int | None = None,
    keep: int | None = 3,
    nonfinite: Literal["stop", "skip", "allow"] = "stop",
    backend: str = "inductor",
    dump: str | None = None,
    display: Display | None = None,
    compile_options: Mapping[str, Any] | None = None,
    request: Mapping[str, Any] | None = None,
    loggers: Sequence[Logger] = (),
) -> Outcome:
    """Train `job` in a folder, and say how it went.

    Args:
        job: what to train.
        out: the folder; None takes `runs/<name>-<data>`, numbered when that is taken. With `resume` it holds the run, or is
            one of its checkpoints.
        steps: in all; None takes the job's own.
        resume: go on from the newest checkpoint in `out`, or from the one that `out` is; those after it are set aside.
        save_every: steps between checkpoints; None saves about ten times, and every ten minutes.
        keep: how many checkpoints stay; None keeps all.
        nonfinite: "stop" ends the run soon after a loss or gradient that is not finite; "skip" leaves such steps out.
            In both cases the update of such a step is not made, so what is saved is sound. For that all gradients wait until the
            last is known. "allow" updates each layer behind its backward; it ends the run when the loss is not finite, with
            the last checkpoint before that.
        backend, dump: as for `wholestep.compile`.
        display: is told what happens; None shows nothing.
        compile_options: more of them, over those of the job.
        request: what was asked for, kept in run.json for a later `--resume`, and as resolved in run.toml.
        loggers: hear of every step besides.
    """
    total = _checked(job, steps, save_every, nonfinite)
    shown = display or Silent()
    with Interrupts() as interrupts:
        options = {**job.compile_options, "backend": backend, **(compile_options or {})}
        job = _with_decisions(job, options)
        folder, stored = _folder(job, out, resume, total, request, options)
        folder.take()
        run, logs = None, Loggers(loggers)
        try:
            step, seconds = _compile(job, options, dump, shown, nonfinite)
            run = Run(job, folder, step, total, save_every, keep, nonfinite, shown, interrupts, seconds, logs)
            run.begin(stored, _write_config(folder, request, {**job.settings, "steps": total}, step.subject.device))
            status = run.loop()
            return run.finish(status)
        finally:
            logs.close()
            shown.close()
            if not resume and (run is None or (run.taken == 0 and run.saved is None)):
                folder.discard()
            folder.release()


def _checked(job: Job, steps: int | None, save_every: int | None, nonfinite: str) -> int:
    total = job.settings.get("steps") if steps is None else steps
    for name, value in (("steps", total), ("save_every", save_every)):
        if (value is not None or name == "steps") and (not isinstance(value, int) or value < 1):
            raise BadOption(f"{name}={value!r}", hint="use a whole number, 1 or more")
    if nonfinite not in ("stop", "skip", "allow"):
        raise BadOption(f"nonfinite={nonfinite!r}", hint="use 'stop', 'skip' or 'allow'")
    assert total is not None
    return total


def _with_decisions(job: Job, options: Mapping[str, Any]) -> Job:
    """With checksums of what a plan and a recipe decide about the numbers: a run goes on with the same, or not at all."""
    plan, recipe = options.get("plan"), options.get("recipe")
    found = {
        "plan_digest": numbers_check(plan) if plan is not None and plan.decides_numbers else None,
        "recipe_digest": recipe_file.numbers_check(recipe_of(recipe)) if recipe is not None else None,
    }
    settings = {name: value for name, value in job.settings.items() if name not in DECISIONS}
    return dataclasses.replace(job, settings=settings | {name: value for name, value in found.items() if value})


def _folder(
    job: Job, out: Path | None, resume: bool, steps: int, request: Any, options: Mapping[str, Any]
) -> tuple[RunFolder, Stored | None]:
    """The run's folder and, on resume, the checkpoint to go on from, found to be of these settings."""
    settings = {**job.settings, "steps": steps}
    if not resume:
        root = _bytes_of(job)
        folder = new_run(out, _default_name(job), {
            "name": job.name, "request": dict(request or {}), "settings": settings, "steps": steps,
            "backend": options["backend"], "data": job.batches.describe(), "parameters": root[0],
        })  # fmt: skip
        try:
            _refuse_full_disk(folder, root[1])
            if job.data_files:  # so that a file that changes can be named
                write_file(folder.path / DATA_FILES, json.dumps({"files": dict(job.data_files)}, indent=0) + "\n")
        except BaseException:
            folder.discard()
            raise
        return folder, None
    if out is None:
        raise BadOption("resume=True needs the folder of the run", hint="give out=")
    folder = open_run(out)
    refuse_changed(folder.facts.get("settings"), settings, folder.path)
    if folder.facts.get("backend") not in (None, options["backend"]):
        refuse_changed({"backend": folder.facts["backend"]}, {"backend": options["backend"]}, folder.path)
    stored = _checkpoint(folder, out, settings)
    folder.update(settings=settings, steps=steps, **({} if request is None else {"request": dict(request)}))
    return folder, stored  # the update has also tried the disk, before anything is compiled


def _write_config(
    folder: RunFolder, request: Mapping[str, Any] | None, settings: Mapping[str, Any], device: Any
) -> Mapping[str, Any]:
    """run.toml, from which `--config` trains the same again; a run of objects has no names to write down. What it holds."""
    if not request:
        return settings
    table, facts = resolved(request, settings), surroundings(device)
    place = f"{facts['device'].get('name', facts['device']['type'])}, {counted(facts['device']['threads'], 'thread')}"
    where = f"Written with torch {facts['versions']['torch']} on {place}: equal bits need the same."
    write_file(folder.path / CONFIG, config_text(table, file=folder.path / CONFIG, where=where))
    return table


def _checkpoint(folder: RunFolder, out: Path, settings: Mapping[str, Any]) -> Stored | None:
    """The one to go on from: `out`, if it is one, or the newest; found whole, and to be of this run."""
    chosen = out.parent == folder.checkpoints
    if not chosen and not any(folder.checkpoints.glob("step-*")):
        return None
    stored = open_stored(out if chosen else folder.checkpoints, taken_by="wholestep train --resume --out {}")
    trained = stored.part("config")
    change = first_change({**trained, "steps": settings["steps"]}, settings) if isinstance(trained, dict) else None
    if change is not None:
        name, before, after, more = change
        what = (
            f"{stored.path} is of another run: it was trained with {name}={before}, this run has {name}={after}{more}"
        )
        raise BadCheckpoint(what, hint="put the run's own checkpoint back, or remove this one")
    return stored


def _default_name(job: Job) -> str:
    data = job.settings.get("data")
    label = data if isinstance(data, str) else data.get("name") if isinstance(data, dict) else None
    name = Path(job.name).name if "/" in job.name else job.name
    return f"{name}-{Path(label).stem if '/' in label else label}" if label else name


def _bytes_of(job: Job) -> tuple[int, int]:
    """Parameters, and roughly the bytes of one checkpoint: weights and two states of the optimizer."""
    parameters = {id(p): p for group in job.optimizer.param_groups for p in group["params"]}.values()
    return sum(p.numel() for p in parameters), 3 * sum(p.numel() * p.element_size() for p in parameters)


def _refuse_full_disk(folder: RunFolder, needed: int) -> None:
    free = shutil.disk_usage(folder.path).free
    if free < needed:
        what = f"{folder.path} has {show_bytes(free)} of disk left, one checkpoint takes about {show_bytes(needed)}"
        raise BadOption(what, hint="name another disk with --out, or make room")


def _compile(
    job: Job, options: dict[str, Any], dump: str | None, display: Display, nonfinite: str
) -> tuple[Step, float]:
    display.compiling(str(options["backend"]))
    began = time.perf_counter()
    # With "stop" too: what is saved then is the state before the step that went wrong.
    mode = "allow" if nonfinite == "allow" else "skip"
    options = {"nonfinite": mode, "verbose": display.verbose, "seed": job.settings.get("seed", 0), **options}
    step = api.compile(job.model, job.loss_fn, job.optimizer, job.batches.batch(0), dump=dump, **options)
    seconds = time.perf_counter() - began
    display.compiled(step, seconds)
    return step, seconds


__all__ = ["Outcome", "train"]
