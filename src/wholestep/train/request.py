"""A request to train, completed and carried out. In: the command line, a file, or an earlier run. Out: the Outcome of training.

A request is plain JSON, kept in run.json. What is given now wins over the file; on resume, it wins over what the run was started
with.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wholestep.errors import BadOption, WholestepWarning, one_line, one_of
from wholestep.graph.bytes import parse_budget
from wholestep.graph.plan_file import PRECISIONS, plan_at
from wholestep.graph.recipe_table import read_table
from wholestep.options import BACKENDS
from wholestep.passes.pipeline import pipeline_without, refuse_unknown_passes
from wholestep.train import wishes
from wholestep.train.config_file import DIGEST, read_config

if TYPE_CHECKING:
    from wholestep.train.job import Job
    from wholestep.train.loggers import Logger
    from wholestep.train.run_folder import RunFolder
    from wholestep.train.running import Outcome
    from wholestep.train.watch import Display

ASKED = (
    "model", "sets", "data", "glob", "field", "tokenizer", "batch", "seq", "precision", "steps", "seed", "init", "backend",
    "disable", "memory", "host_memory", "offload_path", "plan", "recipe", "nonfinite", "save_every", "log",
)  # fmt: skip
"""Kept in run.json and taken from there by --resume, unless it is given again."""
KINDS: dict[str, Any] = {"sets": list, "disable": list, "offload_path": list, "init": (str, bool)} | dict.fromkeys(
    ("batch", "seq", "steps", "seed", "save_every"), int
)
"""What they are in run.json; the others are texts."""
OF_THIS_CALL = ("config", "out", "resume", "dump", "quiet", "json")
"""The rest: where the run is, and what is shown or written of it besides."""
CHOICES = {"precision": PRECISIONS, "backend": BACKENDS, "nonfinite": ("stop", "skip", "allow")}
LEAST_ONE = ("batch", "seq", "steps", "save_every")
MADE_OF = ("sets", "data", "glob", "field", "tokenizer", "batch", "seq", "precision", "steps", "init")
"""Those that `make_job` takes by the same name."""


def run(
    given: Mapping[str, Any],
    *,
    config: Path | None = None,
    out: Path | None = None,
    resume: bool = False,
    dump: str | None = None,
    display: Display | None = None,
    loggers: Sequence[Logger] = (),
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[Outcome, dict[str, Any]]:
    """Train what was asked for; the outcome, and the request as it was completed.

    Args:
        given: by the names of ASKED; what is None or missing was not given.
        config: a file of such names.
        loggers: besides those that `given["log"]` names.
        tell: is told what was made.
    """
    from wholestep.train.loggers import make_loggers
    from wholestep.train.run_folder import new_run_is_possible

    folder = _run_to_resume(given, out, config) if resume else None
    if folder is None and out is not None:
        new_run_is_possible(out)  # before a model is built
    request, digest = completed(given, folder, config)
    loggers = [*make_loggers(request["log"]), *loggers]
    plan = plan_at(request["plan"])
    _look(request, given, folder, out)
    from wholestep.capture.preflight import refuse_world

    refuse_world()  # before each of them makes a folder
    passes = pipeline_without(request["disable"])
    recipe = checked_recipe(request["recipe"])
    from wholestep.train.job import num_parameters
    from wholestep.train.loop import train
    from wholestep.train.plan_use import fitting

    job = _job(request, given, folder)
    if digest is not None and digest != job.settings.get(DIGEST):
        what = f"data {job.settings.get('data')!r} is no longer what it was when {config} was written"
        raise BadOption(what, hint=f"put the old data back, or take {DIGEST} out of the file to train on what is there")
    request["model"] = request["model"] or job.name
    extra: dict[str, Any] = {} if passes is None else {"passes": passes}
    extra |= {"plan": fitting(plan, job.settings), "memory": request["memory"], "recipe": recipe}
    extra |= {name: request[name] for name in ("host_memory", "offload_path")}
    tell(f"{job.name}: {num_parameters(job.model):,} parameters; data {job.batches.describe()}")
    outcome = train(
        job, out=out if out is not None or folder is None else folder.path, resume=resume,
        nonfinite=request["nonfinite"] or "stop", save_every=request["save_every"], backend=request["backend"] or "inductor",
        dump=dump, display=display, request=request, compile_options=extra, loggers=loggers,
    )  # fmt: skip
    return outcome, request


def completed(
    given: Mapping[str, Any], folder: RunFolder | None, config: Path | None
) -> tuple[dict[str, Any], str | None]:
    """(the whole request; the digest of the data that it was made for, if a file says so and the data is not given anew)."""
    filed: dict[str, Any] = {}
    if config is not None:
        filed = read_config(config, {name: KINDS.get(name, str) for name in ASKED}, OF_THIS_CALL)
    digest = filed.pop(DIGEST, None)
    request = {name: _asked(name, given, filed if folder is None else _before(name, folder)) for name in ASKED}
    check_memory(given.get("memory"), given.get("plan"))
    for name, other in (("memory", "plan"), ("plan", "memory")):  # what is given now replaces the other one
        request[other] = None if given.get(name) is not None else request[other]
    _check(request)
    return request, digest if given.get("data") is None else None


def _check(request: Mapping[str, Any]) -> None:
    """Values that would be refused only after a model was built."""
    for name, known in CHOICES.items():
        one_of(f"--{name}", request[name], known)
    for name in LEAST_ONE:
        if request[name] is not None and request[name] < 1:
            raise BadOption(f"--{name.replace('_', '-')} {request[name]}", hint="use 1 or more")
    check_memory(request["memory"], request["plan"])
    wishes.parse(request["sets"] or ())


def _asked(name: str, given: Mapping[str, Any], before: Mapping[str, Any]) -> Any:
    """What is given now, else what was before. A `--set` replaces that of the same key only."""
    now = given.get(name)
    if name == "sets":
        return _merged(before.get(name), now)
    return before.get(name) if now is None else now


def _before(name: str, folder: RunFolder) -> dict[str, Any]:
    """What the run was started with."""
    value = (folder.facts.get("request") or {}).get(name)
    kind: Any = KINDS.get(name, str)
    if value is not None and not isinstance(value, kind):
        raise BadOption(
            f"{folder.path / 'run.json'} is damaged: {name} was {value!r}", hint="mend it, or start a new run"
        )
    return {name: value}


def _merged(before: list[str] | None, now: list[str] | None) -> list[str] | None:
    """`key=value` texts, the last of every key."""
    return list({text.partition("=")[0].strip(): text for text in (*(before or ()), *(now or ()))}.values()) or None


def _look(request: Mapping[str, Any], given: Mapping[str, Any], folder: RunFolder | None, out: Path | None) -> None:
    """What can be told to be wrong before torch is loaded."""
    from wholestep.train.look_ahead import look_ahead, look_at_run

    refuse_unknown_passes(request["disable"])
    look_at_recipe(request["recipe"])
    if folder is None or _changed(given):
        keeps_all = all(request[name] is None for name in ("memory", "plan", "recipe"))
        look_ahead(request["model"], keeps_all=keeps_all, **_asked_for(request))
    if folder is not None:
        look_at_run(folder, out if out is not None and out.parent == folder.checkpoints else None)


def _changed(given: Mapping[str, Any]) -> list[str]:
    """What makes another job of a run that is resumed."""
    return [name for name in ("model", "seed", *MADE_OF) if name != "steps" and given.get(name) is not None]


def _asked_for(request: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `make_job`, besides the model."""
    asked = {name: request[name] for name in MADE_OF}
    return asked | {"sets": tuple(request["sets"] or ()), "seed": request["seed"] or 0}


def _job(request: dict[str, Any], given: Mapping[str, Any], folder: RunFolder | None) -> Job:
    """What was asked, as a Job; a run that is resumed as it was is made from its own settings, whatever the defaults are now."""
    from wholestep.train.job import make_job, make_job_again
    from wholestep.train.saved import Kept, has_weights

    if folder is not None and not _changed(given) and folder.facts.get("settings"):
        try:
            return make_job_again(folder.facts["settings"], steps=given.get("steps"), kept=Kept.by(folder.path))
        except (KeyError, TypeError, AttributeError) as error:
            if (
                folder.facts["settings"].get("family") is None
            ):  # the user's own function: its errors are told as they are
                raise
            what = f"{folder.path / 'run.json'} is damaged: its settings make no job ({one_line(error)})"
            raise BadOption(what, hint="mend it, or start a new run") from error
    job = make_job(request["model"], **_asked_for(request))
    if folder is None and request["model"] and not request["init"] and has_weights(request["model"]):
        text = f"the weights are drawn afresh; --init {request['model']} starts from those that are there"
        warnings.warn(text, WholestepWarning, stacklevel=2)
    return job


def _run_to_resume(given: Mapping[str, Any], out: Path | None, config: Path | None) -> RunFolder:
    from wholestep.train.run_folder import newest_run, open_run

    if config is not None:
        hint = "a run has its own settings; leave --resume out to train as the file says"
        raise BadOption(f"--resume together with --config {config}", hint=hint)
    if out is None:
        return newest_run(given.get("model"), given.get("data"))
    if not out.exists():
        raise BadOption(
            f"{out} does not exist, there is nothing to resume", hint="leave --resume out to start a run there"
        )
    return open_run(out)


def look_at_recipe(path: str | Path | None, *, search: bool = False) -> None:
    """The recipe's file, as far as it can be told to be none before torch is loaded."""
    if path is not None:
        read_table(Path(path), search=search)


def checked_recipe(path: str | Path | None) -> str | None:
    """The recipe's file, found to be one before a model is built; what it says is held against the model later."""
    if path is None:
        return None
    from wholestep.schedule.recipe_file import read_recipe

    read_recipe(Path(path))
    return str(path)


def check_memory(memory: str | None, plan: str | Path | None = None) -> None:
    """A budget is read before a model is built for it; a plan has been made for one already."""
    if memory is None:
        return
    if plan is not None:
        both = f"--memory {memory} together with --plan {plan}"
        raise BadOption(both, hint="a budget makes its own plan: give one of them")
    if memory != "auto":
        parse_budget(memory)
        return
    import torch

    if not torch.cuda.is_available():
        hint = "name an amount, such as --memory 8GiB, or leave it out"
        raise BadOption("--memory auto: there is no GPU here", hint=hint)
