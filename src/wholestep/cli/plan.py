"""`wholestep plan`: will it fit, how fast, and what has to be recomputed - answered without a GPU and without weights."""

from __future__ import annotations

import json as json_text
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wholestep.cli import options
from wholestep.disk import read_json
from wholestep.errors import BadOption, NotBuiltYet
from wholestep.graph.bytes import parse_budget
from wholestep.passes.pipeline import pipeline_without, refuse_unknown_passes
from wholestep.train.request import checked_recipe, look_at_recipe

if TYPE_CHECKING:
    from wholestep.report.pictures.frontier_staircase import Peer
    from wholestep.train.fit import Fit

DEVICES_HELP = "h200|h100|a100-80gb|a100-40gb|l4|a10|t4|rtx4090|rtx3090|24GiB|this"

Device = Annotated[
    str,
    typer.Option(metavar="NAME|BYTES|this", help=f"The card: {DEVICES_HELP}. An amount means a card of that memory."),
]
Memory = Annotated[
    str | None, typer.Option(metavar="BYTES", help="A budget such as 40GiB; the default is the whole card.")
]
Peers = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Measured rows to draw in the same picture, as JSON: [{name, gib, ms}]."),
]
CheckBatch = Annotated[
    bool | None,
    typer.Option(
        "--check-batch/--no-check-batch",
        help="Capture again at the largest batch found; the default does so where that is quick.",
    ),
]

EXAMPLES = """\b
Examples:
  wholestep plan llama-1b --batch 8 --seq 2048 --device h200 --memory 26GiB
  wholestep plan llama-1b --batch 8 --seq 2048 --device h200 --memory 16GiB --host-memory 64GiB
  wholestep plan bert-large --batch 64 --device rtx4090 --out plan.toml
  wholestep plan gpt2-medium --device 24GiB --svg frontier.svg
  wholestep plan gpt-10m --recipe recipe.toml --out plan.toml
  wholestep plan llama-1b --recipe shards.toml --mesh tp=4
  wholestep plan hf:llama --set num_hidden_layers=8 --batch 4 --seq 1024 --json
"""


def command(
    model: options.Model,
    sets: options.Sets = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    device: Device = "h200",
    gpus: Annotated[int, typer.Option(min=1, metavar="N", help="How many cards to use; only 1 in this version.")] = 1,
    memory: Memory = None,
    host_memory: options.HostMemory = None,
    offload_path: options.OffloadPath = None,
    precision: options.Precision = None,
    recipe: options.RecipeFile = None,
    mesh: options.MeshText = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan here, as TOML.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw time against memory here.")] = None,
    peers: Peers = None,
    check_batch: CheckBatch = None,
    disable: options.Disable = None,
    json: options.Json = False,
) -> None:
    """Say whether a training step fits a card, how long it takes there, and what to recompute so that it does.

    Needs no GPU and no memory for weights: the step is captured on tensors without data. Exit code 1 when it does not fit.
    """
    options.checked(precision=precision)
    if gpus > 1:
        raise NotBuiltYet(f"--gpus {gpus}: plans for several cards are not part of this version", hint="use --gpus 1")
    options.checked_room(host_memory, offload_path)
    ranks = options.read_mesh(mesh)
    for option, path in (("--out", out), ("--svg", svg)):
        check_writable(option, path)
    measured = read_peers(peers, model)
    from wholestep.cost.target import budget_on, find_target, refuse_units

    target = find_target(device)
    if memory is not None and memory != "auto":
        parse_budget(memory)
    budget = budget_on(target, memory, f"--memory {memory}")
    refuse_unknown_passes(disable)
    look_at_recipe(recipe)
    found = options.checked_job(
        model, reads_data=False, on_gpu=target.is_gpu, sets=sets, batch=batch, seq=seq, precision=precision
    )
    if found is not None:
        refuse_units(target.device, found[0]["precision"])
    recipe_file = checked_recipe(recipe)
    passes = pipeline_without(disable)
    from wholestep.plan.room import room_for
    from wholestep.train.fit import Question, will_it_fit

    question = Question(
        model=model, sets=tuple(sets or ()), batch=batch, seq=seq, precision=precision, target=target, budget_bytes=budget,
        recipe=recipe_file, mesh=ranks, room=room_for(host_memory, offload_path),
    )  # fmt: skip
    fit = will_it_fit(question, passes=passes, check_batch=check_batch, tell=tell_passing)
    tell_passing("")
    _report(fit, out=out, svg=svg, json=json, peers=measured)
    raise typer.Exit(0 if fit.fits else 1)


def _report(fit: Fit, *, out: Path | None, svg: Path | None, json: bool, peers: list[Peer]) -> None:
    from wholestep.report.terminal_picture import blocks_fit
    from wholestep.train.fit_text import fit_json, fit_lines, fit_picture, verdict

    if json:
        typer.echo(json_text.dumps(fit_json(fit), indent=1, default=str))
    else:
        typer.echo("\n".join(fit_lines(fit, blocks=blocks_fit(sys.stdout))))
    told = []
    if out is not None and fit.fits:
        from wholestep.graph.plan_file import write_plan

        write_plan(fit.plan, out)
        told.append(f"{out}: the plan, for wholestep train {fit.name} --plan {out}")
    elif out is not None:
        told.append(f"nothing to {out}: no plan fits")
    if svg is not None:
        svg.write_text(fit_picture(fit, peers), encoding="utf-8")
        told.append(f"{svg}: time against memory")
    for text in told:
        typer.echo(f"wholestep: written {text}" if json else f"written   {text}", err=json)
    if json and not fit.fits:
        options.say(verdict(fit))


def read_peers(path: Path | None, model: str) -> list[Peer]:
    """(name, GiB, ms) of measured steps; of a file with several models, the rows of this one."""
    if path is None:
        return []
    try:
        held = read_json(path)
        rows = held["rows"] if isinstance(held, dict) else held
        found: dict[str, Peer] = {}
        for row in rows:
            if "system" not in row:
                found[row["name"]] = (str(row["name"]), float(row["gib"]), float(row["ms"]))
            elif model.startswith(row["model"]) and "step_ms" in row:
                found[row["system"]] = (row["system"], float(row["peak_reserved_gib"]), float(row["step_ms"]["median"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise BadOption(
            f"--peers {path}: {' '.join(said.split())}", hint="give JSON: [{name, gib, ms}, ...]"
        ) from error
    return list(found.values())


def check_writable(option: str, path: Path | None) -> None:
    """Before anything is captured for it."""
    if path is None:
        return
    if path.is_dir():
        raise BadOption(f"{option} {path} is a folder", hint="name a file in it")
    if not path.parent.is_dir():
        raise BadOption(f"{option} {path}: there is no folder {path.parent}", hint="make it first, or name another")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise BadOption(f"{option} {path} cannot be written", hint="name a file in a folder of yours")


def tell_passing(text: str) -> None:
    """What is being done, on a terminal, over what was told before; an empty text clears it."""
    if sys.stderr.isatty():
        typer.echo(f"\r\x1b[K{text} ..." if text else "\r\x1b[K", err=True, nl=False)
