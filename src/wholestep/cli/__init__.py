"""The command line: train (a tiny real run), verify, show, doctor; the other verbs of the contract follow with their stages."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from wholestep.errors import BadOption, WholestepError

app = typer.Typer(add_completion=False, no_args_is_help=True, help="A holistic compiler for training PyTorch models.")


@app.callback()
def root() -> None:
    """A holistic compiler for training PyTorch models."""


@app.command()
def train(
    steps: Annotated[int, typer.Option(min=1, help="How many steps to train.")] = 200,
    backend: Annotated[str, typer.Option(help="inductor, or interpret.")] = "inductor",
    dump: Annotated[str | None, typer.Option(help="Write the graph here after every stage, as Python.")] = None,
) -> None:
    """Train a tiny language model on this package's own source text.

    Example: wholestep train --steps 100 --dump graphs/
    """
    from wholestep.api import compile as compile_step
    from wholestep.train.tiny import train_tiny

    train_tiny(compile_step, steps, backend=backend, dump=dump, say=typer.echo)


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help="package.module:callable, returning (model, loss_fn, optimizer, batch).")],
    steps: Annotated[int, typer.Option(min=1, help="How many steps to compare.")] = 5,
    backend: Annotated[str, typer.Option(help="inductor, or interpret.")] = "inductor",
    precision: Annotated[str, typer.Option(help="fp32, or bf16.")] = "fp32",
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compare the captured step with eager PyTorch; exit code 1 when they differ.

    Example: wholestep verify my_package.training:setup --steps 3
    """
    from wholestep.cli.models import resolve
    from wholestep.verify.verify import verify as compare

    report = compare(*resolve(model), steps=steps, backend=backend, precision=precision)
    typer.echo(report.to_json() if json else str(report))
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def show(
    model: Annotated[str, typer.Argument(help="package.module:callable, returning (model, loss_fn, optimizer, batch).")],
    stage: Annotated[str, typer.Option(help="captured, prepared (after the passes), or lowered.")] = "captured",
) -> None:
    """Print the graph of the whole step as Python.

    Example: wholestep show my_package.training:setup --stage prepared
    """
    from wholestep.api import compile as compile_step
    from wholestep.cli.models import resolve
    from wholestep.graph.printer import to_python
    from wholestep.passes.pipeline import Pipeline

    if stage not in ("captured", "prepared", "lowered"):
        raise BadOption(f"--stage {stage!r}", hint="use captured, prepared or lowered; planned is not part of this version")
    passes = Pipeline([]) if stage == "captured" else None
    step = compile_step(*resolve(model), backend="interpret", check="off", passes=passes)
    if step.graph is None:
        typer.echo("nothing was captured: " + "; ".join(map(str, step.falls)), err=True)
        raise typer.Exit(1)
    typer.echo(step.regions["driver"] if stage == "lowered" else to_python(step.graph))


@app.command()
def doctor() -> None:
    """Say what this machine has and what is missing, to be pasted into a bug report.

    Example: wholestep doctor
    """
    from wholestep.cli.doctor import examine

    for what, how in examine():
        typer.echo(f"{what:<13} {how}")


def main() -> None:
    """Entry point: an error meant for the user is one line and exit code 2, never a traceback."""
    try:
        code = app(standalone_mode=False)
    except WholestepError as error:
        typer.echo(f"wholestep: {error}", err=True)
        sys.exit(2)
    except Exception as error:
        if not hasattr(error, "format_message"):  # not one of the argument parser's own
            raise
        if error.format_message():  # without arguments it has printed the help already
            typer.echo(f"wholestep: {error.format_message()}", err=True)
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)
