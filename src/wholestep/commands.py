"""What the command line does, in Python: `wholestep.train`, `wholestep.plan`, `wholestep.profile`.

In: a model by name, as on the command line, or your own objects, as for `wholestep.compile`. Out: an Outcome, a Fit, a Profile;
printed they read as the command's output, in a notebook they show pictures.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from wholestep.cost.target import budget_on, find_target
from wholestep.errors import BadOption, WholestepWarning
from wholestep.graph.plan import Plan
from wholestep.graph.plan_file import plan_at
from wholestep.options import is_whole
from wholestep.plan.room import room_for
from wholestep.profile.profile import Profile, profile_job
from wholestep.train import request
from wholestep.train.config_file import set_text
from wholestep.train.display import make_display
from wholestep.train.dry_job import dry
from wholestep.train.fit import Fit, Question, captured_step, will_it_fit
from wholestep.train.job import Job, job_of, make_job
from wholestep.train.loggers import Logger, make_loggers
from wholestep.train.loop import train as train_job
from wholestep.train.plan_use import fitting
from wholestep.train.run_folder import open_run
from wholestep.train.running import Outcome
from wholestep.train.settings import OWN_STEPS
from wholestep.train.summary import write_picture

LossFn = Callable[[Any, Any], Any]


def train(
    model: Any = None,
    loss_fn: LossFn | None = None,
    optimizer: Optimizer | None = None,
    batches: Any = None,
    *,
    steps: int | None = None,
    data: str | None = None,
    batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    settings: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    config: str | Path | None = None,
    save_every: int | None = None,
    nonfinite: str | None = None,
    memory: str | None = None,
    host_memory: str | None = None,
    offload_path: Sequence[str | Path] = (),
    plan: str | Path | None = None,
    recipe: str | Path | None = None,
    backend: str | None = None,
    log: Sequence[str | Logger] = (),
    quiet: bool = False,
) -> Outcome:
    """Train a model in a folder, with checkpoints, metrics and a picture of the loss.

    Args:
        model: a name as on the command line (`"gpt-1m"`, `"hf:bert"`, a folder, `"package.module:callable"`); None is a small GPT.
            Or a Module, together with the three that follow.
        loss_fn, optimizer, batches: as for `wholestep.compile`; `batches` is a loader, or one batch.
        steps, seed: how many, in all; the seed is of weights, data and dropout.
        data, batch, seq, precision: for a model by name, as on the command line.
        settings: what `--set` takes: `{"lr": 1e-3, "layers": 2}`.
        clip_norm, accumulate: for your own objects; a model by name takes them as settings.
        out: the folder; None takes `runs/<name>-<data>`. With `resume`, the folder of the run.
        resume: continue from the newest checkpoint of `out`, or of the newest run.
        config: a file of settings, such as the `run.toml` of a run; arguments win over it.
        save_every, nonfinite, memory, host_memory, offload_path, plan, recipe, backend: as on the command line.
        log: `"csv"`, `"tensorboard"`, `"wandb"`, or objects with the methods of `wholestep.Logger`.
        quiet: print nothing.
    """
    asked: dict[str, Any] = {
        "backend": backend, "memory": memory, "host_memory": host_memory, "offload_path": offload_path, "plan": plan,
        "recipe": recipe, "nonfinite": nonfinite, "save_every": save_every,
    }  # fmt: skip
    if model is None or isinstance(model, str):
        _refuse_objects("train", loss_fn, optimizer, batches, clip_norm, accumulate)
        asked |= {
            "model": model, "sets": _sets(settings), "data": data, "batch": batch, "seq": seq, "precision": precision,
            "steps": steps, "seed": seed or None,
        }  # fmt: skip
        return _finished(_train_named(asked, config, out, resume, log, quiet))
    refused = {"data": data, "batch": batch, "seq": seq, "settings": settings, "config": config}
    job = _own_job(model, loss_fn, optimizer, batches, precision, clip_norm, accumulate, seed, steps, refused)
    return _finished(_train_own(job, asked, out, resume, log, quiet))


def _train_named(
    asked: dict[str, Any], config: str | Path | None, out: str | Path | None, resume: bool, log: Sequence[str | Logger], quiet: bool
) -> Outcome:  # fmt: skip
    """What the command line does. Paths are made absolute, since a run may be resumed from anywhere."""
    names, objects = _loggers(log)
    paths = {name: None if asked[name] is None else str(Path(asked[name]).absolute()) for name in ("plan", "recipe")}
    folders = [str(Path(path).absolute()) for path in asked["offload_path"]] or None
    display = make_display(sys.stdout, quiet=quiet)
    outcome, _ = request.run(
        asked | paths | {"offload_path": folders, "log": names or None},
        config=None if config is None else Path(config), out=None if out is None else Path(out), resume=resume,
        display=display, loggers=objects, tell=(lambda text: None) if quiet else display.say,
    )  # fmt: skip
    return outcome


def _train_own(
    job: Job, asked: dict[str, Any], out: str | Path | None, resume: bool, log: Sequence[str | Logger], quiet: bool
) -> Outcome:
    names, objects = _loggers(log)
    options = {name: asked[name] for name in ("memory", "host_memory", "recipe")}
    options |= {"offload_path": list(asked["offload_path"]) or None}
    options |= {"plan": fitting(plan_at(asked["plan"]), job.settings)}
    return train_job(
        job, out=None if out is None else Path(out), resume=resume, save_every=asked["save_every"],
        nonfinite=asked["nonfinite"] or "stop", backend=asked["backend"] or "inductor",
        display=make_display(sys.stdout, quiet=quiet), loggers=[*make_loggers(names), *objects],
        compile_options={name: value for name, value in options.items() if value is not None},
    )  # fmt: skip


def _loggers(log: Sequence[str | Logger]) -> tuple[str, list[Logger]]:
    """Names by commas, and objects of the user's own."""
    log = [log] if isinstance(log, str) else log
    return ",".join(entry for entry in log if isinstance(entry, str)), [one for one in log if not isinstance(one, str)]


def _finished(outcome: Outcome) -> Outcome:
    write_picture(open_run(outcome.folder))
    if outcome.trouble is not None:
        warnings.warn(outcome.trouble, WholestepWarning, stacklevel=3)
    return outcome


def plan(
    model: Any,
    loss_fn: LossFn | None = None,
    optimizer: Optimizer | None = None,
    example_batch: Any = None,
    *,
    device: str = "h200",
    memory: str | int | None = None,
    host_memory: str | int | None = None,
    offload_path: Sequence[str | Path] = (),
    batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    settings: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    recipe: str | Path | None = None,
    check_batch: bool | None = None,
) -> Fit:
    """Will it fit? Memory and time of a training step on a card, without that card; `fit.plan` goes to `wholestep.compile`.

    Args:
        model: a name as on the command line, of which no weights are made; or a Module, together with the three that follow.
        loss_fn, optimizer, example_batch: as for `wholestep.compile`.
        device: `"h200"`, `"rtx4090"`, ..., an amount such as `"24GiB"`, or `"this"`.
        memory: a budget such as `"40GiB"`; the whole card when None.
        host_memory, offload_path: where values and optimizer state may wait outside of the card.
        batch, seq, precision, settings: for a model by name.
        clip_norm, accumulate: for your own objects; a model by name takes them as settings.
        recipe: the file of one.
        check_batch: capture again at the largest batch that was found; None does so where that is quick.
    """
    if not isinstance(device, str):
        raise BadOption(f"device={device!r}", hint="give a name such as 'h200', an amount such as '24GiB', or 'this'")
    target = find_target(device)
    budget = budget_on(target, memory, f"memory={memory!r}")
    named = isinstance(model, str)
    question = Question(
        model=model if named else type(model).__name__, sets=tuple(_sets(settings) or ()), batch=batch, seq=seq,
        precision=precision, target=target, budget_bytes=budget, recipe=None if recipe is None else str(recipe),
        room=room_for(host_memory, offload_path),
    )  # fmt: skip
    if named:
        _refuse_objects("plan", loss_fn, optimizer, example_batch, clip_norm, accumulate)
        return will_it_fit(question, check_batch=check_batch)
    refused = {"batch": batch, "seq": seq, "settings": settings}
    job = _own_job(model, loss_fn, optimizer, example_batch, precision, clip_norm, accumulate, 0, None, refused)
    return will_it_fit(question, step=captured_step(question, job=dry(job)), check_batch=check_batch)


def profile(
    model: Any,
    loss_fn: LossFn | None = None,
    optimizer: Optimizer | None = None,
    batches: Any = None,
    *,
    data: str | None = None,
    batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    settings: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    seed: int = 0,
    memory: str | int | None = None,
    host_memory: str | int | None = None,
    offload_path: Sequence[str | Path] = (),
    plan: Plan | None = None,
    steps: int = 20,
    system: str = "wholestep",
    backend: str = "inductor",
    follow_memory: bool = True,
    verified: bool = True,
) -> Profile:
    """Measure one training step: time by call and module, memory, and what to do. The model trains while it is measured.

    Args:
        model: a name as on the command line, or a Module, together with the three that follow.
        loss_fn, optimizer, batches: as for `wholestep.compile`; `batches` is a loader, or one batch.
        data, batch, seq, precision, settings, seed: for a model by name.
        clip_norm, accumulate: for your own objects; a model by name takes them as settings.
        memory, host_memory, offload_path, plan: as for `wholestep.compile`.
        steps: how many are timed after warm-up.
        system: whose step: `"wholestep"`, `"eager"`, `"compile"`.
        follow_memory: whether the memory of a step is followed.
        verified: whether a step is compared with eager PyTorch.
    """
    if not is_whole(steps) or steps < 1:
        raise BadOption(f"steps={steps!r}", hint="use a whole number, 1 or more")
    if isinstance(model, str):
        _refuse_objects("profile", loss_fn, optimizer, batches, clip_norm, accumulate)
        job = make_job(
            model, sets=_sets(settings) or (), data=data, batch=batch, seq=seq, precision=precision, seed=seed
        )
    else:
        refused = {"data": data, "batch": batch, "seq": seq, "settings": settings}
        job = _own_job(model, loss_fn, optimizer, batches, precision, clip_norm, accumulate, seed, None, refused)
    return profile_job(
        job, system=system, backend=backend, steps=steps, memory=follow_memory, budget=memory, verified=verified,
        host_memory=host_memory, offload_path=offload_path, plan=plan,
    )  # fmt: skip


def _sets(settings: Mapping[str, Any] | None) -> list[str] | None:
    if settings is not None and not isinstance(settings, Mapping):
        raise BadOption(f"settings={settings!r}", hint="give names and values: settings={'lr': 1e-3}")
    return [set_text(key, "none" if value is None else value) for key, value in (settings or {}).items()] or None


def _refuse_objects(call: str, loss_fn: Any, optimizer: Any, batches: Any, clip_norm: Any, accumulate: int) -> None:
    """What belongs to a model of one's own is not silently dropped beside a name."""
    objects = {"loss_fn": loss_fn, "optimizer": optimizer, "a batch": batches}
    for name, value in objects.items():
        if value is not None:
            raise BadOption(f"wholestep.{call}: {name} beside a model by name, which has its own", hint="leave it out")
    for name, given in (("clip_norm", clip_norm is not None), ("accumulate", accumulate != 1)):
        if given:
            raise BadOption(f"wholestep.{call}: {name} beside a model by name", hint=f"use settings={{'{name}': ...}}")


def _own_job(
    model: Any, loss_fn: Any, optimizer: Any, batches: Any, precision: str | None, clip_norm: float | None, accumulate: int,
    seed: int, steps: int | None, refused: Mapping[str, Any],
) -> Job:  # fmt: skip
    """A Job of the user's own objects."""
    for name, value in refused.items():
        if value is not None:
            raise BadOption(f"{name}={value!r} is of a model by name", hint="your own objects say it already")
    if batches is None or not isinstance(optimizer, Optimizer):
        lacking = "a batch" if batches is None else "an optimizer of torch.optim"
        raise BadOption(
            f"a model of your own without {lacking}", hint="give loss_fn, optimizer, and a batch or a loader"
        )
    settings: dict[str, Any] = {
        "model": type(model).__name__, "family": None, "config": {}, "data": None,
        "steps": OWN_STEPS if steps is None else steps, "seed": seed, "precision": precision or "fp32",
        "clip_norm": clip_norm, "accumulate": accumulate, "init": False,
    }  # fmt: skip
    place = optimizer.param_groups[0]["params"][0].device
    return job_of(settings, model, loss_fn, optimizer, batches, place)
