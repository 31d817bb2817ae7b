"""`wholestep profile`: one training step measured, as a page with pictures and a few lines here."""

from __future__ import annotations

import json as json_text
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wholestep.cli import options
from wholestep.cli.plan import check_writable, tell_passing
from wholestep.errors import BadOption, one_of
from wholestep.graph.plan_file import plan_at
from wholestep.passes.pipeline import pipeline_without, refuse_unknown_passes
from wholestep.train.request import check_memory

if TYPE_CHECKING:
    from wholestep.profile.profile import Profile

SYSTEMS = ("wholestep", "eager", "compile")

System = Annotated[str, typer.Option(metavar="|".join(SYSTEMS), help="Whose step: Wholestep's, or a peer's.")]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.html", help="The page; the default is profile-MODEL.html. The JSON goes into the same folder."
    ),
]

EXAMPLES = """\b
Examples:
  wholestep profile gpt-1m
  wholestep profile bert-large --batch 16 --out report.html --open
  wholestep profile gpt-1m --system eager --json
  wholestep profile bert-large --batch 16 --memory 12GiB
  wholestep profile llama-1b --batch 8 --memory 16GiB --host-memory 64GiB
  wholestep profile hf:bert --set num_hidden_layers=2 --batch 2 --seq 64
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
    precision: options.Precision = None,
    memory: options.Memory = None,
    host_memory: options.HostMemory = None,
    offload_path: options.OffloadPath = None,
    plan: options.PlanFile = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps to sample after warm-up.")] = 20,
    system: System = "wholestep",
    out: Out = None,
    open_page: Annotated[bool, typer.Option("--open", help="Show the page in a browser.")] = False,
    no_memory: Annotated[bool, typer.Option("--no-memory", help="Do not measure the memory of a step.")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not compare a step with eager PyTorch.")] = False,
    backend: options.Backend = None,
    disable: options.Disable = None,
    seed: options.Seed = None,
    json: options.Json = False,
) -> None:
    """Measure one training step: time by call and module, memory, what could be saved, and how.

    Writes one HTML page that needs no network, and a JSON file of the same name with every number in it. The model trains
    while it is measured. When memory runs out, says what fills it and what would help; exit code 1.
    """
    # before torch is imported: its allocator tells about blocks older than a recording, which the memory profile accounts for
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    options.checked(precision=precision, backend=backend)
    check_memory(memory)
    _checked_system(system, memory)
    planned = plan_at(plan)
    refuse_unknown_passes(disable)
    page = checked_page(out, model)
    asked: dict[str, Any] = {
        "sets": sets or [], "data": data, "glob": glob, "field": field, "tokenizer": tokenizer, "batch": batch, "seq": seq,
        "precision": precision,
    }  # fmt: skip
    options.checked_job(model, seed=seed, keeps_all=memory is None and plan is None, **asked)
    from wholestep.profile.profile import profile_job
    from wholestep.train.job import make_job
    from wholestep.train.plan_use import fitting

    job = make_job(model, seed=seed or 0, **asked)
    planned = fitting(planned, job.settings)
    profile = profile_job(
        job, system=system, backend=backend or "inductor", steps=steps, memory=not no_memory, passes=pipeline_without(disable),
        tell=tell_passing, budget=memory, host_memory=host_memory, offload_path=offload_path, plan=planned, verified=not no_verify,
        command=_words(model, **asked, memory=memory, host_memory=host_memory, offload_path=offload_path, plan=plan,
                       backend=backend, disable=disable, seed=seed, system=None if system == "wholestep" else system),
    )  # fmt: skip
    tell_passing("")
    _report(profile, page, json)
    if open_page:
        _open(page)


def _checked_system(system: str, memory: str | None) -> None:
    one_of("--system", system, SYSTEMS)
    if memory is not None and system != "wholestep":
        hint = "only Wholestep's own step is planned for a budget"
        raise BadOption(f"--memory {memory} with --system {system}", hint=hint)


def _words(model: str, **given: Any) -> list[str]:
    """The command again, for advice to be copied from: what was given, every option with its value."""
    words = ["wholestep", "profile", model]
    for name, value in given.items():
        option = f"--{name.removesuffix('s') if name == 'sets' else name.replace('_', '-')}"
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            words += [option, str(one)]
    return words


def _report(profile: Profile, page: Path, json: bool) -> None:
    from wholestep.profile.text import summary_lines
    from wholestep.report.page import write_report

    facts = profile.to_json()
    twin = write_report(facts, page)
    if json:
        typer.echo(json_text.dumps(facts, indent=1))
        options.say(f"{page} and {twin.name} written")
    else:
        typer.echo("\n".join([*summary_lines(profile), f"page      {page}", f"numbers   {twin}"]))


def checked_page(out: Path | None, model: str) -> Path:
    """Where the page goes, found writable before anything is measured."""
    page = out or Path(f"profile-{re.sub(r'[^A-Za-z0-9._-]+', '-', model).strip('-')}.html")
    if page.suffix.lower() not in (".html", ".htm"):
        raise BadOption(
            f"--out {page}", hint="name a file that ends in .html; the JSON is written into the same folder"
        )
    check_writable("--out", page)
    return page


def _open(page: Path) -> None:
    """In a browser where there is one; otherwise that is said."""
    import webbrowser

    opened: Any = False
    try:
        opened = webbrowser.open(page.resolve().as_uri())
    except webbrowser.Error:
        opened = False
    if not opened:
        options.say(f"no browser was found; open {page} yourself")
