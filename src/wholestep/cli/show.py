"""`wholestep show`: the graph of the whole training step, as Python."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from wholestep.cli import options
from wholestep.errors import BadOption, one_of
from wholestep.graph.plan_file import plan_at
from wholestep.passes.pipeline import pipeline_without, refuse_unknown_passes
from wholestep.train.request import check_memory, checked_recipe, look_at_recipe

STAGES = ("captured", "prepared", "planned", "lowered")

EXAMPLES = """\b
Examples:
  wholestep show gpt-1m | less
  wholestep show hf:bert --set num_hidden_layers=1 --stage prepared
  wholestep show gpt-1m --batch 4 --stage planned --memory 40MiB
  wholestep show my_package.training:setup --stage lowered
"""


def command(
    model: options.Model,
    stage: Annotated[
        str, typer.Option(metavar="|".join(STAGES), help="As captured; after the passes; for a budget; as it will run.")
    ] = "captured",
    sets: options.Sets = None,
    data: options.Data = None,
    glob: options.Glob = None,
    field: options.Field = None,
    tokenizer: options.Tokenizer = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    precision: options.Precision = None,
    memory: options.Memory = None,
    plan: options.PlanFile = None,
    recipe: options.RecipeFile = None,
    disable: options.Disable = None,
    dump: options.Dump = None,
) -> None:
    """Print the graph of the whole step (forward, loss, backward, update) as Python."""
    one_of("--stage", stage, STAGES)
    options.checked(precision=precision)
    check_memory(memory, plan)
    if (memory or plan) and stage in ("captured", "prepared"):
        given = f"--memory {memory}" if memory else f"--plan {plan}"
        raise BadOption(f"{given} with --stage {stage}, which comes before it", hint="use --stage planned or lowered")
    refuse_unknown_passes(disable)
    look_at_recipe(recipe)
    planned = plan_at(plan)
    asked: dict[str, Any] = {
        "sets": sets or (), "data": data, "glob": glob, "field": field, "tokenizer": tokenizer, "batch": batch, "seq": seq,
        "precision": precision,
    }  # fmt: skip
    options.checked_job(model, **asked)
    chosen = checked_recipe(recipe)
    passes = pipeline_without(disable)
    folder = options.checked_dump(dump)
    from wholestep.api import compile as compile_step
    from wholestep.graph.printer import to_python
    from wholestep.passes.pipeline import Pipeline, default_pipeline
    from wholestep.train.job import make_job
    from wholestep.train.plan_use import fitting

    job = make_job(model, **asked)
    everything = passes or default_pipeline()
    run = {
        "captured": Pipeline([]),
        "prepared": Pipeline(everything.passes),
        "planned": everything,
        "lowered": everything,
    }
    step = compile_step(
        job.model, job.loss_fn, job.optimizer, job.batches.batch(0), backend="interpret", check="off", dump=folder, verbose=False,
        passes=run[stage], memory=memory, plan=fitting(planned, job.settings), recipe=chosen,
        **job.compile_options,
    )  # fmt: skip
    if step.graph is None:
        typer.echo("nothing was captured: " + "; ".join(map(str, step.falls)), err=True)
        raise typer.Exit(1)
    typer.echo(step.regions["driver"] if stage == "lowered" else to_python(step.graph))
