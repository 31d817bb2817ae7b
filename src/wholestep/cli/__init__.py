"""The command line. `wholestep train` runs a tiny real training; the other verbs of the contract follow with their stages."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from wholestep.errors import WholestepError

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


def main() -> None:
    """Entry point: an error meant for the user is one line and exit code 2, never a traceback."""
    try:
        app()
    except WholestepError as error:
        typer.echo(f"wholestep: {error}", err=True)
        sys.exit(2)
