"""`wholestep train`: from what was asked to a Job, through the training loop, to the last lines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wholestep.cli import options

if TYPE_CHECKING:
    from wholestep.train.running import Outcome

Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="The folder of the run, which is never overwritten; the default is runs/MODEL-DATA."
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue from the newest checkpoint of --out, or of the newest run. "
        "--out may also be one checkpoint. Options that are not given again keep their values.",
    ),
]
Init = Annotated[
    str | None,
    typer.Option(
        "--init", metavar="RUN", help="Start from the weights of a run, a checkpoint, or a folder of transformers."
    ),
]
Nonfinite = Annotated[
    str | None,
    typer.Option(
        metavar="stop|skip|allow",
        help="What to do about a loss or gradient that is not finite; the default is stop. allow updates each layer before the "
        "gradients of the others are known, and stops when the loss is not finite.",
    ),
]
SaveEvery = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Steps between checkpoints; the default gives about ten over a run."),
]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Options from a file, such as the run.toml of a run; those on the command line win."
    ),
]
Log = Annotated[
    str | None, typer.Option(metavar="NAMES", help="Also log to csv, tensorboard, wandb; several by commas.")
]

EXAMPLES = """\b
Examples:
  wholestep train
  wholestep train gpt-1m --data stdlib --steps 500 --set lr=0.002
  wholestep train gpt-1m --data my_texts --glob '*.md'
  wholestep train resnet-18 --data my_images
  wholestep train --init runs/gpt-1m-shakespeare --data my_texts
  wholestep train hf:bert --set num_hidden_layers=2 --batch 4 --steps 20
  wholestep train my_package.training:setup --out runs/mine
  wholestep train llama-1b --memory 26GiB
  wholestep train llama-1b --memory 16GiB --host-memory 64GiB
  wholestep train llama-1b --plan plan.toml
  wholestep train gpt-1m --recipe recipe.toml
  wholestep train gpt-1m --log csv,tensorboard
  wholestep train --config runs/gpt-1m-shakespeare/run.toml --out runs/again
  wholestep train --resume --steps 2000
"""


def command(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=options.MODEL_HELP)] = None,
    sets: options.Sets = None,
    data: options.Data = None,
    glob: options.Glob = None,
    field: options.Field = None,
    tokenizer: options.Tokenizer = None,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="How many steps to train, in all.")] = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    precision: options.Precision = None,
    out: Out = None,
    resume: Resume = False,
    init: Init = None,
    nonfinite: Nonfinite = None,
    save_every: SaveEvery = None,
    memory: options.Memory = None,
    host_memory: options.HostMemory = None,
    offload_path: options.OffloadPath = None,
    plan: options.PlanFile = None,
    recipe: options.RecipeFile = None,
    backend: options.Backend = None,
    disable: options.Disable = None,
    dump: options.Dump = None,
    seed: options.Seed = None,
    config: Config = None,
    log: Log = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print one line at the end, and errors.")] = False,
    json: options.Json = False,
) -> None:
    """Train a model. Without arguments: a small one, on texts that come with Wholestep.

    The run gets a folder with metrics, checkpoints, a picture of the loss and a sample. Ctrl-C saves, and --resume
    continues where training stopped, on a CPU bit for bit. Exit code 1 when training had to stop.
    """
    options.checked_room(host_memory, offload_path)
    given = {
        "model": model, "sets": sets or None, "data": data, "glob": glob, "field": field,
        "tokenizer": tokenizer, "batch": batch, "seq": seq, "precision": precision, "steps": steps,
        "seed": seed, "init": init, "backend": backend, "disable": disable or None,
        "memory": memory, "plan": None if plan is None else str(plan.absolute()), "nonfinite": nonfinite, "save_every": save_every,
        "recipe": None if recipe is None else str(recipe.absolute()), "log": log, "host_memory": host_memory,
        "offload_path": [str(path.absolute()) for path in offload_path] if offload_path else None,
    }  # fmt: skip
    from wholestep.train.display import make_display
    from wholestep.train.request import run

    display = make_display(sys.stderr if json else sys.stdout, quiet=quiet)
    outcome, request = run(
        given, config=config, out=out, resume=resume, dump=options.checked_dump(dump), display=display,
        tell=(lambda text: None) if quiet else display.say,
    )  # fmt: skip
    report(outcome, request, quiet=quiet, json=json)
    raise typer.Exit(outcome.exit_code)


def report(outcome: Outcome, request: dict[str, Any], *, quiet: bool, json: bool) -> None:
    """The last lines; what went wrong goes to stderr."""
    from wholestep.train import summary

    if json:
        typer.echo(summary.as_json(outcome, request))
    elif quiet:
        summary.tell_briefly(outcome, sys.stdout)
    else:
        summary.tell(outcome, request, sys.stdout)
    if outcome.trouble is not None:
        resume = summary.next_commands(outcome, request)[0] if outcome.status == "interrupted" else ""
        options.say(outcome.trouble + (f"; go on with: {resume}" if resume else ""))
