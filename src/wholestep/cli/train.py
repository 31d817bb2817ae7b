"""`wholestep train`: from what was asked to a Job, through the training loop, to the last lines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wholestep.cli import options
from wholestep.errors import BadOption

if TYPE_CHECKING:
    from wholestep.train.job import Job
    from wholestep.train.run_folder import RunFolder
    from wholestep.train.running import Outcome

ASKED = (
    "model", "sets", "data", "batch", "seq", "precision", "steps", "seed", "init", "backend", "disable", "memory", "plan",
    "host_memory", "offload_path", "recipe", "nonfinite", "save_every",
)  # fmt: skip
"""Kept in run.json and taken from there by --resume, unless it is given again."""
KINDS: dict[str, type] = {"sets": list, "disable": list, "offload_path": list, "init": bool} | dict.fromkeys(
    ("batch", "seq", "steps", "seed", "save_every"), int
)
"""What they are in run.json; the others are texts."""
OF_THIS_CALL = ("out", "resume", "dump", "quiet", "json")
"""The rest: where the run is, and what is shown or written of it besides."""
MADE_OF = ("sets", "data", "batch", "seq", "precision", "steps", "init")
"""Those that `make_job` takes by the same name."""


def command(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=options.MODEL_HELP)] = None,
    sets: options.Sets = None,
    data: options.Data = None,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="How many steps to train, in all.")] = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    precision: options.Precision = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder of the run; runs/MODEL-DATA when not given, never overwritten."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest checkpoint of --out, or of the newest run. "
            "--out may also be one checkpoint. What is not given again is as it was.",
        ),
    ] = False,
    init: Annotated[bool, typer.Option("--init", help="Start from the weights that lie in the folder MODEL.")] = False,
    nonfinite: Annotated[
        str | None,
        typer.Option(
            metavar="stop|skip", help="What to do about a loss or gradient that is not finite; stop when not given."
        ),
    ] = None,
    save_every: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Steps between checkpoints; about ten over a run when not given."),
    ] = None,
    memory: options.Memory = None,
    host_memory: options.HostMemory = None,
    offload_path: options.OffloadPath = None,
    plan: options.PlanFile = None,
    recipe: options.RecipeFile = None,
    backend: options.Backend = None,
    disable: options.Disable = None,
    dump: options.Dump = None,
    seed: options.Seed = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="One line at the end, and what went wrong.")] = False,
    json: options.Json = False,
) -> None:
    """Train a model. Without arguments: a small one, on texts that come with Wholestep.

    The run gets a folder with metrics, checkpoints, a picture of the loss and a sample. Ctrl-C saves, and --resume goes
    on as if nothing had happened, on a CPU bit for bit. Exit code 1 when training had to stop.

    \b
    Examples:
      wholestep train
      wholestep train gpt-1m --data stdlib --steps 500 --set lr=0.002
      wholestep train hf:bert --set num_hidden_layers=2 --batch 4 --steps 20
      wholestep train my_package.training:setup --out runs/mine
      wholestep train llama-1b --memory 26GiB
      wholestep train llama-1b --memory 16GiB --host-memory 64GiB
      wholestep train llama-1b --plan plan.toml
      wholestep train gpt-1m --recipe recipe.toml
      wholestep train --resume --steps 2000
    """
    options.checked_recipe(recipe)
    options.checked(precision=precision, backend=backend)
    options.checked_memory(memory, plan)
    options.one_of("--nonfinite", nonfinite, ("stop", "skip"))
    options.pipeline(disable)
    given = {
        "model": model, "sets": sets or None, "data": data, "batch": batch, "seq": seq, "precision": precision, "steps": steps,
        "seed": seed, "init": init or None, "backend": backend, "disable": disable or None,
        "memory": memory, "plan": None if plan is None else str(plan.absolute()), "nonfinite": nonfinite, "save_every": save_every,
        "recipe": None if recipe is None else str(recipe.absolute()), "host_memory": host_memory,
        "offload_path": [str(path.absolute()) for path in offload_path] if offload_path else None,
    }  # fmt: skip
    outcome, request = run(given, out=out, resume=resume, dump=dump, quiet=quiet, to_stderr=json)
    report(outcome, request, quiet=quiet, json=json)
    raise typer.Exit(outcome.exit_code)


def run(
    given: dict[str, Any], *, out: Path | None, resume: bool, dump: str | None, quiet: bool, to_stderr: bool
) -> tuple[Outcome, dict[str, Any]]:
    """Train what was asked for; the outcome, and the request as it was completed."""
    from wholestep.capture.preflight import refuse_world
    from wholestep.train.run_folder import new_run_is_possible

    refuse_world()  # before each of them makes a folder
    folder = _run_to_resume(given, out) if resume else None
    if folder is None and out is not None:
        new_run_is_possible(out)  # before a model is built
    request = {name: _asked(name, given, folder) for name in ASKED}
    for name, other in (("memory", "plan"), ("plan", "memory")):  # what is given now replaces the other one of the run
        request[other] = None if given.get(name) is not None else request[other]
    where = options.checked_dump(dump)
    passes = options.pipeline(request["disable"])
    plan = options.read_plan(request["plan"])
    options.checked_recipe(request["recipe"])
    from wholestep.cli.display import make_display
    from wholestep.train.loop import train

    display = make_display(sys.stderr if to_stderr else sys.stdout, quiet=quiet)
    job = _job(request, given, folder)
    request["model"] = request["model"] or job.name
    extra: dict[str, Any] = {} if passes is None else {"passes": passes}
    extra |= {
        "plan": options.fitting_plan(plan, job.settings),
        "memory": request["memory"],
        "recipe": request["recipe"],
        "host_memory": request["host_memory"],
        "offload_path": request["offload_path"],
    }
    if not quiet:
        display.say(f"{job.name}: {_parameters(job.model):,} parameters; data {job.batches.describe()}")
    outcome = train(
        job, out=out if out is not None or folder is None else folder.path, resume=resume,
        nonfinite=request["nonfinite"] or "stop", save_every=request["save_every"], backend=request["backend"] or "inductor",
        dump=where, display=display, request=request, compile_options=extra,
    )  # fmt: skip
    return outcome, request


def _job(request: dict[str, Any], given: dict[str, Any], folder: RunFolder | None) -> Job:
    """What was asked, as a Job; a run that is resumed as it was is made from its own settings, whatever the defaults are now."""
    from wholestep.train.job import make_job, make_job_again

    changed = [name for name in ("model", "seed", *MADE_OF) if name != "steps" and given.get(name) is not None]
    if folder is not None and not changed and folder.facts.get("settings"):
        try:
            return make_job_again(folder.facts["settings"], steps=given["steps"])
        except (KeyError, TypeError, AttributeError) as error:
            if (
                folder.facts["settings"].get("family") is None
            ):  # the user's own function: its errors are told as they are
                raise
            what = f"{folder.path / 'run.json'} is damaged: its settings make no job ({type(error).__name__}: {error})"
            raise BadOption(what, hint="mend it, or start a new run") from error
    arguments = {name: request[name] for name in MADE_OF}
    arguments |= {"sets": tuple(request["sets"] or ()), "init": bool(request["init"]), "seed": request["seed"] or 0}
    return make_job(request["model"], **arguments)


def _asked(name: str, given: dict[str, Any], folder: RunFolder | None) -> Any:
    """What is given now; else, on resume, what the run was started with. A `--set` replaces that of the same key only."""
    before: Any = None if folder is None else (folder.facts.get("request") or {}).get(name)
    kind: Any = KINDS.get(name, str)
    if before is not None and not isinstance(before, kind):
        assert folder is not None
        raise BadOption(
            f"{folder.path / 'run.json'} is damaged: {name} was {before!r}", hint="mend it, or start a new run"
        )
    now = given.get(name)
    return _merged(before, now) if name == "sets" else before if now is None else now


def _merged(before: list[str] | None, now: list[str] | None) -> list[str] | None:
    """`key=value` texts, the last of every key."""
    return list({text.partition("=")[0].strip(): text for text in (*(before or ()), *(now or ()))}.values()) or None


def _run_to_resume(given: dict[str, Any], out: Path | None) -> RunFolder:
    from wholestep.train.run_folder import newest_run, open_run

    if out is None:
        return newest_run(given["model"], given["data"])
    if not out.exists():
        raise BadOption(
            f"{out} does not exist, there is nothing to resume", hint="leave --resume out to start a run there"
        )
    return open_run(out)


def _parameters(model: Any) -> int:
    modules = model.values() if isinstance(model, dict) else model if isinstance(model, (tuple, list)) else [model]
    return sum(p.numel() for p in {id(p): p for module in modules for p in module.parameters()}.values())


def report(outcome: Outcome, request: dict[str, Any], *, quiet: bool, json: bool) -> None:
    """The last lines; what went wrong goes to stderr."""
    from wholestep.cli import summary

    if json:
        typer.echo(summary.as_json(outcome, request))
    elif quiet:
        summary.tell_briefly(outcome, sys.stdout)
    else:
        summary.tell(outcome, request, sys.stdout)
    if outcome.trouble is not None:
        resume = summary.next_commands(outcome, request)[0] if outcome.status == "interrupted" else ""
        typer.echo(f"wholestep: {outcome.trouble}" + (f"; go on with: {resume}" if resume else ""), err=True)
