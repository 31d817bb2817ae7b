"""`wholestep sample`: what a trained model writes."""

from __future__ import annotations

from typing import Annotated

import typer

from wholestep.cli import options
from wholestep.errors import BadOption

NOTHING = {
    "image": "it tells images apart", "graph": "it tells the nodes of a graph apart", "masked": "it guesses masked words",
}  # fmt: skip


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
    """Write a text with a trained model: a run, one of its checkpoints, or a folder of transformers.

    \b
    Examples:
      wholestep sample runs/gpt-1m-shakespeare
      wholestep sample runs/gpt-1m-shakespeare --prompt "To be" --tokens 100 --temperature 0
      wholestep sample runs/gpt-1m-shakespeare/checkpoints/step-000600 --seed 7
    """
    if not top_p > 0:
        raise BadOption(f"--top-p {top_p}", hint="use more than 0, up to 1")
    options.checked_run(run)
    from wholestep.train.sampling import Choice, Writer
    from wholestep.train.trained import open_trained

    trained = open_trained(run, tokenizer=tokenizer)
    task = None if trained.family is None else trained.family.task
    if trained.family is None or task in NOTHING:
        what = f"there is nothing to sample from {run}: {NOTHING.get(task or '', 'it is a model of your own')}"
        raise BadOption(what, hint=f"`wholestep eval {run}` tells how well")
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
