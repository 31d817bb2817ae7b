"""`wholestep bench`: representative trainings, every system measured on them alike."""

from __future__ import annotations

import itertools
import json as json_text
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wholestep.cli import options
from wholestep.cli.plan import check_writable
from wholestep.errors import BadOption, did_you_mean, one_of
from wholestep.train.request import look_at_recipe

if TYPE_CHECKING:
    from wholestep.bench.workload import Workload

SUITES = ("papers",)
PEERS = ("eager", "compile", "liger")
"""What Wholestep is measured against when nothing is asked for; liger only where it has kernels."""

Workloads = Annotated[list[str] | None, typer.Argument(metavar="WORKLOAD", help="The default is all of them.")]
Against = Annotated[
    str | None, typer.Option(metavar="NAMES", help="Systems, by commas; package.module:callable for your own.")
]
OwnPasses = Annotated[
    str | None, typer.Option("--with", metavar="FILE", help="Passes of your own, after Wholestep's; a row more.")
]
Recipe = Annotated[Path | None, typer.Option("--recipe", metavar="FILE", help="A recipe for Wholestep; a row more.")]
Limit = Annotated[float | None, typer.Option(min=1, metavar="SECONDS", help="Begin no row that would end later.")]
Out = Annotated[
    str | None, typer.Option(metavar="FILE", help="Results; the default is bench_gpu.json or bench_cpu.json.")
]
Suite = Annotated[str | None, typer.Option(metavar="papers", help="Show what ten papers claim, next to your results.")]

EXAMPLES = """\b
Examples:
  wholestep bench --list
  wholestep bench --smoke
  wholestep bench bert-large resnet-50 --out results.json
  wholestep bench neumf --against compile,my_package:my_step
  wholestep bench gpt2-medium --with my_pass.py
  wholestep bench gpt2-medium --recipe recipe.toml
  wholestep bench --suite papers --out results.json
"""


def command(
    workloads: Workloads = None,
    listed: Annotated[bool, typer.Option("--list", help="Print the workloads there are.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Check every workload at a small size on the CPU.")] = False,
    against: Against = None,
    own_passes: OwnPasses = None,
    recipe: Recipe = None,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Steps to sample after warm-up (20).")] = None,
    limit: Limit = None,
    case_limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="For one row.")] = 600.0,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Rows made at once; they are timed in turns.")] = 1,
    out: Out = None,
    retry: Annotated[bool, typer.Option("--retry", help="Run rows that failed again.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start the results file over.")] = False,
    suite: Suite = None,
    seed: options.Seed = None,
    json: options.Json = False,
) -> None:
    """Measure training steps of many domains: eager PyTorch, torch.compile, Wholestep, your own.

    Every row runs in its own process with empty compile caches, with the same data and seed. Losses are compared with
    eager PyTorch's, so that no system wins by computing something else. The results file is written after every row, and
    the same command continues where it stopped. Exit code 1 when a row of Wholestep failed or its loss departs; with
    --smoke, when any loss is not finite, does not fall from the first third of the steps to the last, or departs.

    Systems: eager, compile, compile-budget, liger, wholestep, wholestep-interpret, or package.module:callable, a
    function (part, precision) that returns step(batch) -> loss. eager and one of Wholestep's always run.
    """
    one_of("--suite", suite, SUITES)
    from wholestep.bench.workloads import WORKLOADS

    chosen = find_workloads(workloads or (), WORKLOADS)
    if suite is None:
        check_writable("--out", None if out is None else Path(out))
    if listed:
        _print_list(chosen, json)
        return
    if suite is not None:
        _print_papers(out, json)
        return
    if smoke:
        if own_passes is not None or recipe is not None or steps is not None or limit is not None:
            raise BadOption(
                "--smoke takes no --with, --recipe, --steps or --limit", hint="leave --smoke out to measure"
            )
        raise typer.Exit(
            _smoke(chosen, contenders(against, peers=("eager",), ours="wholestep-interpret"), seed or 0, out, json)
        )
    names = contenders(against, peers=PEERS, ours="wholestep")
    if recipe is not None:
        if own_passes is not None:
            raise BadOption(f"--recipe {recipe} together with --with {own_passes}", hint="give one of them")
        look_at_recipe(recipe)
        own_passes = str(recipe)
    if own_passes is not None and not Path(own_passes).is_file():
        hint = "name a Python file with functions marked @compiler_pass"
        raise BadOption(f"--with {own_passes}: there is no such file", hint=hint)
    raise typer.Exit(
        _measure(chosen, names, own_passes, steps, limit, case_limit, out, retry, fresh, seed or 0, json, jobs)
    )


def find_workloads(names: Sequence[str], known: dict[str, Workload]) -> list[Workload]:
    """The named ones in the order given; all when none is named."""
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known, "wholestep bench --list prints those there are")
            raise BadOption(f"there is no workload {name!r}", hint=hint)
    return [known[name] for name in dict.fromkeys(names)] or list(known.values())


def contenders(against: str | None, *, peers: Sequence[str], ours: str) -> list[str]:
    """Eager first, for its losses are the reference; then those asked for; one of Wholestep's own in any case."""
    from wholestep.bench.contender_names import is_ours, known

    asked = list(peers) if against is None else [name.strip() for name in against.split(",") if name.strip()]
    for name in asked:
        known(name)
    asked = list(dict.fromkeys(["eager", *asked]))
    return asked if any(map(is_ours, asked)) else [*asked, ours]


def _measure(
    chosen: Sequence[Workload], names: Sequence[str], own_passes: str | None, steps: int | None, limit: float | None,
    case_limit: float, out: str | None, retry: bool, fresh: bool, seed: int, json: bool, jobs: int,
) -> int:  # fmt: skip
    """Make the table and print it; the exit code."""
    import torch

    from wholestep.bench.contender_names import is_ours
    from wholestep.bench.harness import planned, run_table
    from wholestep.bench.own_code import load_passes
    from wholestep.bench.protocol import Protocol
    from wholestep.bench.results import FORMAT
    from wholestep.bench.tables import results_text
    from wholestep.report.terminal_picture import blocks_fit

    digest = load_passes(own_passes).digest if own_passes is not None else None
    on_gpu = torch.cuda.is_available()
    size, device = ("gpu", "cuda") if on_gpu else ("smoke", "cpu")
    if jobs > 1 and not on_gpu:
        raise BadOption(
            f"--jobs {jobs} without a GPU: one row's compiling would slow down another's steps", hint="leave it out"
        )
    path = Path(out or ("bench_gpu.json" if on_gpu else "bench_cpu.json"))
    if not on_gpu:
        options.say("no GPU here: the small sizes run on the CPU, and their times say little about a GPU")
    cases = planned(
        chosen, names, size=size, device=device, seed=seed, protocol=Protocol(steps=steps or Protocol().steps),
        own_passes=own_passes, passes_digest=digest,
    )  # fmt: skip
    try:
        with _progress(len(cases)) as tell:
            outcome = run_table(
                cases, path, limit=limit, case_limit=case_limit, retry=retry, fresh=fresh, jobs=jobs, tell=tell
            )  # fmt: skip
    except KeyboardInterrupt:
        options.say(f"stopped; rows made so far are in {path}, and the same command continues from there")
        raise typer.Exit(130) from None
    wanted = {workload.name for workload in chosen}
    rows = [row for row in outcome.rows if row["workload"] in wanted]
    if json:
        typer.echo(json_text.dumps({"format": FORMAT, "stopped": outcome.stopped, "rows": rows}, indent=1))
    else:
        typer.echo(results_text(rows, blocks=blocks_fit(sys.stdout)))
    options.say(f"{outcome.made} rows made, {outcome.kept} kept, in {path}")
    if outcome.stopped is not None:
        options.say(f"{outcome.stopped}; the same command continues from here")
    ours = [row for row in rows if is_ours(row["contender"])]
    return 1 if any(row["status"] in ("failed", "timed out") or "departs" in row for row in ours) else 0


def _smoke(chosen: Sequence[Workload], names: Sequence[str], seed: int, out: str | None, json: bool) -> int:
    """Run every workload small, print the tables and what does not hold; the exit code."""
    from wholestep.bench.results import FORMAT, save
    from wholestep.bench.smoke import problems, run_smoke
    from wholestep.bench.tables import smoke_text
    from wholestep.report.terminal_picture import blocks_fit

    try:
        with _progress(len(chosen)) as tell:
            numbers = itertools.count(1)

            def done(workload: Workload, rows: list[dict[str, Any]]) -> None:
                tell("; ".join(problems(rows)) or f"{workload.name} trains", next(numbers))

            rows = run_smoke(chosen, names, seed=seed, tell=done)
    except KeyboardInterrupt:
        options.say("stopped")
        raise typer.Exit(130) from None
    wrong = problems(rows)
    if out is not None:
        save(Path(out), rows)
    if json:
        typer.echo(json_text.dumps({"format": FORMAT, "problems": wrong, "rows": rows}, indent=1))
    else:
        typer.echo(smoke_text(rows, blocks=blocks_fit(sys.stdout)))
        all_well = f"{chosen[0].name} trains" if len(chosen) == 1 else f"all {len(chosen)} workloads train"
        typer.echo("\n" + "\n".join(wrong or [f"{all_well}, captured as in eager"]))
    return 1 if wrong else 0


def _print_list(chosen: Sequence[Workload], json: bool) -> None:
    from wholestep.bench.tables import list_json, list_text

    table = {workload.name: workload for workload in chosen}
    typer.echo(json_text.dumps(list_json(table), indent=1) if json else list_text(table))


def _print_papers(out: str | None, json: bool) -> None:
    """The claims beside the rows of a results file; without one, beside nothing."""
    from wholestep.bench.claims import load_papers, papers_json, papers_text
    from wholestep.bench.results import load
    from wholestep.bench.workloads import WORKLOADS

    path = Path(out or "bench_gpu.json")
    rows = load(path) if out is not None or path.exists() else []
    papers = load_papers()
    if json:
        typer.echo(json_text.dumps(papers_json(papers, rows, WORKLOADS), indent=1))
        return
    typer.echo(papers_text(papers, rows, WORKLOADS))
    if not rows:
        options.say("no results file: measure with `wholestep bench --out results.json`, then give the same --out here")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """tell(what is being done, how many are done): a live bar on a terminal, plain lines elsewhere, both on stderr."""
    if not sys.stderr.isatty():
        yield lambda text, done: options.say(f"{done}/{total} {text}")
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda text, done: bar.update(task, description=text, completed=done)
