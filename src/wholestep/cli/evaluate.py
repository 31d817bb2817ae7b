"""`wholestep eval`: how good a trained model is."""

from __future__ import annotations

import dataclasses
import json as json_format
from typing import Annotated

import typer

from wholestep.cli import options

EXAMPLES = """\b
Examples:
  wholestep eval runs/gpt-1m-shakespeare
  wholestep eval runs/gpt-1m-shakespeare --data my_test.txt --json
  wholestep eval runs/resnet-18-digits
"""


def command(
    run: options.Run,
    data: options.Data = None,
    glob: options.Glob = None,
    field: options.Field = None,
    tokenizer: options.Tokenizer = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    batches: Annotated[
        int, typer.Option(min=1, metavar="N", help="At most so many batches, from the start of the part.")
    ] = 200,
    json: options.Json = False,
) -> None:
    """Measure a trained model: loss, and perplexity or accuracy.

    Without --data, measures the part of its own data that was held out; with --data, all of that data.
    """
    options.checked_run(run, tokenizer=tokenizer, data=data, glob=glob, field=field, batch=batch, seq=seq)
    from wholestep.train.evaluate import evaluate
    from wholestep.train.trained import open_trained

    trained = open_trained(run, tokenizer=tokenizer)
    found = evaluate(trained, data=data, glob=glob, field=field, batch=batch, seq=seq, batches=batches)
    if json:
        typer.echo(json_format.dumps(dataclasses.asdict(found), indent=1))
        return
    figures = [f"loss {found.loss:.4f}"]
    figures += [] if found.perplexity is None else [f"perplexity {found.perplexity:.2f}"]
    figures += [] if found.bits_per_byte is None else [f"{found.bits_per_byte:.3f} bits per byte"]
    figures += [] if found.accuracy is None else [f"accuracy {100 * found.accuracy:.1f} %"]
    part = {"held out": "the held-out part of ", "all": "", "its own": "batches of "}[found.part]
    some = "" if found.complete else "the first "
    typer.echo(f"{', '.join(figures)}\nover {some}{found.count:,} {found.unit} of {part}{found.data}")
