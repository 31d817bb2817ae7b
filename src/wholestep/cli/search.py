"""`wholestep search`: of many ways to run a model the fastest, with few of them measured."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wholestep.cli import options
from wholestep.cli.plan import check_writable, tell_passing
from wholestep.errors import BadOption, one_of
from wholestep.train.request import look_at_recipe

CLOCKS = ("wall", "cpu")

if TYPE_CHECKING:
    from wholestep.search.search import Found, Outcome

Recipe = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A recipe with a table [search], values of it lists or ranges.")
]
Device = Annotated[
    str, typer.Option(metavar="NAME|this", help="The card to predict for; another than this one with --measure 0.")
]
RecordFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Where results are kept; the default is RECIPE.search.json.")
]
Svg = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A picture of throughput against memory; the default is RECIPE.search.svg."),
]
Clock = Annotated[
    str, typer.Option(metavar="wall|cpu", help="cpu: processor time over threads, where others use the CPU too.")
]

EXAMPLES = """\b
Examples:
  wholestep search recipe.toml
  wholestep search recipe.toml --measure 12 --out best.toml
  wholestep search recipe.toml --measure 0 --device h200
"""


def command(
    recipe: Recipe,
    measure: Annotated[int, typer.Option(min=0, metavar="N", help="Points to measure in all; 0 only predicts.")] = 6,
    limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="For one point, compiling included.")] = 600.0,
    device: Device = "this",
    record: RecordFile = None,
    svg: Svg = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the recipe of the best point here.")] = None,
    clock: Clock = "wall",
    retry: Annotated[bool, typer.Option("--retry", help="Measure points again that failed.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what was measured.")] = False,
    json: options.Json = False,
) -> None:
    """Find the fastest way to run a model: batch, precision, recomputation, kernels, budgets.

    Every combination of the recipe's lists is a point. All points are predicted, as by `wholestep plan`; those that do not
    fit are never run. A few are measured, each in its own process; every measurement corrects the predictions of the others.
    Results and failures are kept next to the recipe, and the same command continues where it stopped. Exit code 1 when
    nothing could be measured.
    """
    _check(clock, measure, device)
    picture = svg or recipe.with_suffix(".search.svg")
    for option, path in (("--svg", picture), ("--out", out)):
        check_writable(option, path)
    look_at_recipe(recipe, search=True)
    from wholestep.search.space import read_space

    space = read_space(recipe)
    from wholestep.cost.target import find_target
    from wholestep.search.measure import measure_in_child
    from wholestep.search.predict import Predictor
    from wholestep.search.record import Record, made_with
    from wholestep.search.search import run_search
    from wholestep.search.text import as_json, lines_of
    from wholestep.search.text import picture as drawn

    target = find_target(device)
    if clock == "cpu" and target.is_gpu:
        raise BadOption("--clock cpu on a GPU", hint="leave it out")
    kept = Record(record or recipe.with_suffix(".search.json"), made_with(target.device, clock), fresh=fresh)
    if measure:
        kept.check_writable()
    memory = target.device.memory_bytes

    def done(outcome: Outcome) -> None:
        picture.write_text(drawn(outcome, memory), encoding="utf-8")

    try:
        outcome = run_search(
            space, Predictor(target).of, lambda point: measure_in_child(point, limit, clock=clock), kept, most=measure,
            retry=retry, calibrated=target.times == "calibrated", tell=options.say,
            passing=tell_passing, done=done,
        )  # fmt: skip
    except KeyboardInterrupt:
        options.say(f"stopped; what was measured is in {kept.path}, and the same command continues from there")
        raise typer.Exit(130) from None
    done(outcome)
    typer.echo(json_text.dumps(as_json(outcome), indent=1) if json else "\n".join(lines_of(outcome)))
    _end(outcome.best, picture, out, json)
    raise typer.Exit(1 if measure and outcome.best is None else 0)


def _check(clock: str, measure: int, device: str) -> None:
    """What goes together, before anything is loaded."""
    one_of("--clock", clock, CLOCKS)
    if measure and device != "this":
        raise BadOption(
            f"--device {device}: only this machine can be measured", hint="give --measure 0 to predict only"
        )


def _end(best: Found | None, picture: Path, out: Path | None, json: bool) -> None:
    """What was written, and how to go on."""
    from wholestep.search.text import next_command

    told = [f"written   {picture}: throughput against memory"]
    if best is not None:
        if out is not None:
            from wholestep.schedule.recipe_file import write_recipe

            write_recipe(best.point.recipe, out)
            told.append(f"written   {out}: the recipe of the best point")
        told.append(f"train     {next_command(best, str(out) if out is not None and len(best.point.recipe) else None)}")
        if out is None and len(best.point.recipe):
            told[-1] += "   (its recipe: --out FILE)"
    for text in told:
        typer.echo(text, err=json)
