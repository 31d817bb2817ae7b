"""`wholestep export`: a trained model for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wholestep.cli import options
from wholestep.graph.plan_file import PRECISIONS

EXAMPLES = """\b
Examples:
  wholestep export runs/gpt-1m-shakespeare my_gpt
  wholestep export runs/gpt-1m-shakespeare my_gpt --precision bf16
  wholestep export runs/resnet-18-digits weights.safetensors
"""


def command(
    run: options.Run,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A new folder, or a new file that ends with .safetensors.")
    ],
    precision: Annotated[
        str | None, typer.Option(metavar="|".join(PRECISIONS), help="Of the weights; as trained if not given.")
    ] = None,
    tokenizer: options.Tokenizer = None,
) -> None:
    """Write a trained model as a folder that transformers opens, or as one safetensors file.

    A model of transformers, and a GPT or ResNet of Wholestep's own that a class of transformers can compute, becomes a
    folder with config.json, weights and tokenizer. Other models become one safetensors file.
    """
    options.checked(precision=precision)
    from wholestep.train.saved import refuse_taken

    refuse_taken(out)
    options.checked_run(run, tokenizer=tokenizer)
    from wholestep.train.export import export
    from wholestep.train.trained import open_trained

    found = export(open_trained(run, tokenizer=tokenizer, device="cpu"), out, precision=precision)
    typer.echo(f"exported  {found.path}: {found.form}")
    for label, line in zip(("open it", "", ""), found.open_with, strict=False):
        typer.echo(f"{label:10}{line}")
