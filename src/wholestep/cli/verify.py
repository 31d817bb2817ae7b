"""`wholestep verify`: the captured step beside eager PyTorch, value by value."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from wholestep.cli import options
from wholestep.graph.plan_file import plan_at
from wholestep.passes.pipeline import pipeline_without, refuse_unknown_passes
from wholestep.train.request import check_memory, checked_recipe, look_at_recipe

EXAMPLES = """\b
Examples:
  wholestep verify gpt-1m --steps 2
  wholestep verify hf:bert --set num_hidden_layers=2 --batch 2 --seq 32
  wholestep verify gpt-1m --memory 20MiB --batch 2 --backend interpret
  wholestep verify gpt-1m --recipe recipe.toml --steps 2
  wholestep verify hf:llama --recipe shards.toml --mesh tp=2 --steps 2
  wholestep verify my_package.training:setup --backend interpret --json
"""


def command(
    model: options.Model,
    sets: options.Sets = None,
    data: options.Data = None,
    glob: options.Glob = None,
    field: options.Field = None,
    tokenizer: options.Tokenizer = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    steps: Annotated[int, typer.Option(min=1, metavar="K", help="How many steps to compare.")] = 5,
    precision: options.Precision = None,
    memory: options.Memory = None,
    host_memory: options.HostMemory = None,
    offload_path: options.OffloadPath = None,
    plan: options.PlanFile = None,
    recipe: options.RecipeFile = None,
    mesh: options.MeshText = None,
    backend: options.Backend = None,
    disable: options.Disable = None,
    dump: options.Dump = None,
    seed: options.Seed = None,
    json: options.Json = False,
) -> None:
    """Compare the captured step with eager PyTorch: losses, gradients, buffers, updates.

    Every value has to be within twice the rounding error that eager PyTorch itself shows against float64. Awkward batches
    and a step in eval mode follow the train steps. When anything differs, says where it began; exit code 1. With --recipe
    the model as it was written is the reference, and a wrong verb is named; with --mesh the ranks run side by side.
    """
    options.checked(precision=precision, backend=backend)
    check_memory(memory, plan)
    options.checked_room(host_memory, offload_path)
    refuse_unknown_passes(disable)
    look_at_recipe(recipe)
    planned, ranks = plan_at(plan), options.read_mesh(mesh)
    asked: dict[str, Any] = {
        "sets": sets or (), "data": data, "glob": glob, "field": field, "tokenizer": tokenizer, "batch": batch, "seq": seq,
        "precision": precision, "seed": seed or 0,
    }  # fmt: skip
    options.checked_job(model, keeps_all=(memory, plan, recipe, mesh) == (None,) * 4, **asked)
    chosen, passes, folder = checked_recipe(recipe), pipeline_without(disable), options.checked_dump(dump)
    backend = backend or ("inductor" if ranks is None or ranks.num_ranks == 1 else "interpret")
    from wholestep.api import verify
    from wholestep.train.job import make_job
    from wholestep.train.plan_use import fitting

    job = make_job(model, steps=steps, **asked)
    report = verify(
        job.model, job.loss_fn, job.optimizer, [job.batches.batch(number) for number in range(steps)], steps=steps,
        edge_batches=job.edge_batches or None, memory=memory, host_memory=host_memory, offload_path=offload_path or None,
        plan=fitting(planned, job.settings),
        recipe=chosen, by_verb=None if chosen is None else "blame", backend=backend, passes=passes, dump=folder,
        mesh=ranks, seed=job.settings.get("seed", 0), **job.compile_options,
    )  # fmt: skip
    typer.echo(report.to_json() if json else str(report))
    raise typer.Exit(0 if report.ok else 1)
