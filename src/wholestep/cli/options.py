"""What several commands take: their options, and the checks that turn a bad value into one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wholestep.errors import BadOption, one_of
from wholestep.graph.plan_file import PRECISIONS
from wholestep.options import BACKENDS

if TYPE_CHECKING:
    from wholestep.graph.mesh import Mesh
    from wholestep.train.look_ahead import Found


Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of model or training; again for more."),
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|PATH",
        help="shakespeare, stdlib, digits, pygraph; or a text file, a folder of texts, .jsonl, .parquet, a datasets folder, "
        "a folder of images by class, .npy or .safetensors of tokens, package.module:callable.",
    ),
]
Glob = Annotated[
    str | None,
    typer.Option(metavar="PATTERN", help="Which files of the folder --data, such as '*.txt'; the default is all."),
]
Field = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Which field of a row, or which tensor, --data is; the default is text."),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        metavar="bytes|bpe|DIR", help="How text becomes tokens: a BPE trained on --data, or a folder's tokenizer.json."
    ),
]
Batch = Annotated[int | None, typer.Option(min=1, metavar="B", help="Sequences (or samples) per batch.")]
Seq = Annotated[int | None, typer.Option(min=1, metavar="S", help="Tokens per sequence.")]
Precision = Annotated[
    str | None, typer.Option(metavar="|".join(PRECISIONS), help="Arithmetic of forward and backward.")
]
Memory = Annotated[
    str | None, typer.Option(metavar="BYTES|auto", help="A budget of the card, such as 12GiB; auto is what is free.")
]
HostMemory = Annotated[
    str | None,
    typer.Option(metavar="BYTES", help="Host memory in which values and optimizer state may wait, such as 64GiB."),
]
OffloadPath = Annotated[
    list[Path] | None,
    typer.Option(metavar="DIR", help="A folder for what host memory does not hold; again for several disks."),
]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", metavar="FILE", help="A plan that `wholestep plan --out FILE` wrote.")
]
RecipeFile = Annotated[
    Path | None, typer.Option("--recipe", metavar="FILE", help="How the model runs, verb by verb, as a file.")
]
MeshText = Annotated[
    str | None, typer.Option("--mesh", metavar="tp=N", help="Ranks that run the step; a recipe says what is cut.")
]
Backend = Annotated[
    str | None,
    typer.Option(metavar="|".join(BACKENDS), help="Compile (inductor, the default), or run operator by operator."),
]
Dump = Annotated[str | None, typer.Option(metavar="DIR", help="Write the graph here after every stage, as Python.")]
Disable = Annotated[
    list[str] | None, typer.Option(metavar="PASS", help="Leave out the pass of that name; again for more.")
]
Seed = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Seed of weights, data and dropout; the default is 0.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for programs.")]
MODEL_HELP = "A preset, hf:<model_type>, a folder, a run, or package.module:callable."
Run = Annotated[
    str, typer.Argument(metavar="RUN", help="The folder of a run, one of its checkpoints, or a folder of transformers.")
]
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]


def checked_job(
    model: str | None, *, reads_data: bool = True, on_gpu: bool = False, keeps_all: bool = False, **asked: Any
) -> Found | None:
    """MODEL, --set, sizes and data, as far as they can be told to be wrong before torch is loaded; what was found, if anything."""
    from wholestep.train.look_ahead import look_ahead

    sets, seed = tuple(asked.pop("sets", None) or ()), asked.pop("seed", None) or 0
    return look_ahead(model, sets=sets, seed=seed, on_gpu=on_gpu, reads_data=reads_data, keeps_all=keeps_all, **asked)


def checked_run(run: str, **asked: Any) -> str | None:
    """RUN, before torch is loaded: is it a trained model, and whole? The task it was trained for, where that is known."""
    from wholestep.train.look_ahead import look_at_trained

    return look_at_trained(run, **asked)


def checked(*, precision: str | None = None, backend: str | None = None) -> None:
    """The values of options that several commands have."""
    one_of("--precision", precision, PRECISIONS)
    one_of("--backend", backend, BACKENDS)


def checked_room(host_memory: str | None, folders: Sequence[Path] | None) -> None:
    """What waits outside of the card: an amount, and folders."""
    from wholestep.graph.bytes import parse_bytes

    if host_memory is not None:
        parse_bytes(host_memory)
    for folder in folders or ():
        if not folder.is_dir():
            raise BadOption(f"--offload-path {folder} is no folder", hint="name a folder of a local disk")


def read_mesh(text: str | None) -> Mesh | None:
    """The mesh of `--mesh tp=4`."""
    if text is None:
        return None
    from wholestep.graph.mesh import Mesh

    return Mesh.read(text)


def checked_dump(dump: str | None) -> str | None:
    """The folder, made and found writable before anything is compiled for it."""
    if dump is None:
        return None
    try:
        Path(dump).mkdir(parents=True, exist_ok=True)
        probe = Path(dump) / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BadOption(
            f"--dump {dump}: {error.strerror or error}", hint="name a folder that can be written to"
        ) from error
    return dump


def say(text: str) -> None:
    """A line to people, whatever goes to stdout."""
    typer.echo(f"wholestep: {text}", err=True)
