"""`wholestep sample`: what a trained model writes."""

from __future__ import annotations

from typing import Annotated

import typer

from wholestep.cli import options
from wholestep.errors import BadOption

NOTHING = {
    "image": "it classifies images", "graph": "it classifies the nodes of a graph", "masked": "it guesses masked words",
}  # fmt: skip

EXAMPLES = """\b
Examples:
  wholestep sample runs/gpt-1m-shakespeare
  wholestep sample runs/gpt-1m-shakespeare --prompt "To be" --tokens 100 --temperature 0
  wholestep sample runs/gpt-1m-shakespeare/checkpoints/step-000600 --seed 7
"""


def command(
    run: options.Run,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="What the text begins with.")] = None,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="How many tokens to write.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, metavar="T", help="0 takes the likeliest token; higher is bolder.")
    ] = 0.8,
    top_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, metavar="P", help="Draw from the likeliest tokens that are so likely together."),
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="The same seed writes the same text.")] = 0,
    tokenizer: options.Tokenizer = None,
) -> None:
    """Write a text with a trained model: a run, one of its checkpoints, or a folder of transformers."""
    if not top_p > 0:
        raise BadOption(f"--top-p {top_p}", hint="use more than 0, up to 1")
    refuse_task(run, options.checked_run(run, tokenizer=tokenizer))
    from wholestep.train.sampling import Choice, Writer
    from wholestep.train.trained import open_trained

    trained = open_trained(run, tokenizer=tokenizer)
    if trained.family is None:
        raise _nothing(run, "it is a model of your own")
    task = trained.family.task
    refuse_task(run, task)
    if trained.tokens is None:
        raise BadOption(f"{run} holds no tokenizer", hint="name the one it was trained with by --tokenizer")
    config = trained.config
    if trained.tokens.size > config.vocab_size:
        what = f"the tokenizer has {trained.tokens.size} ids, {run} knows {config.vocab_size}"
        raise BadOption(what, hint="name the tokenizer it was trained with")
    begin = (prompt or "").encode("utf-8", errors="replace")
    read = trained.tokens.encode(begin)
    if len(read) and int(read.max()) >= config.vocab_size:
        raise BadOption(
            f"--prompt holds the id {int(read.max())}, {run} knows {config.vocab_size}", hint="use smaller ids"
        )
    if task == "seq2seq" and not len(read):
        raise BadOption(f"{run} answers a text, and there is none", hint="give one with --prompt")
    context = trained.family.context(config) or 1024
    writer = Writer(str(task), trained.model, trained.tokens, context, read=read[None])
    ids = writer.write(
        writer.start(begin) or [0], tokens, Choice(temperature=temperature, top_p=top_p, likeliest=None), seed
    )
    shown = ids[1:] if task == "seq2seq" or (not prompt and trained.tokens.end_id is not None) else ids
    typer.echo(trained.tokens.decode(shown).strip("\n") if not prompt else trained.tokens.decode(shown))


def refuse_task(run: str, task: str | None) -> None:
    """An error for a model that writes nothing."""
    if task in NOTHING:
        raise _nothing(run, NOTHING[task])


def _nothing(run: str, why: str) -> BadOption:
    return BadOption(f"there is nothing to sample from {run}: {why}", hint=f"`wholestep eval {run}` tells how well")
