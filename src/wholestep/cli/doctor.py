"""`wholestep doctor`: what this machine has, what is missing and how to get it; to be pasted into a bug report."""

from __future__ import annotations

import json as json_text
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import typer

from wholestep.cli import options
from wholestep.disk import cache_folder
from wholestep.graph.counted import counted

PACKAGES = {
    "triton": "kernels on a GPU; comes with torch for CUDA",
    "transformers": "hf: models; pip install 'wholestep[hf]'",
    "tokenizers": "texts cut into more than bytes; pip install 'wholestep[hf]'",
    "accelerate": "wholestep.hf.Trainer; pip install 'wholestep[hf]'",
}
NEEDED = ("torch", "numpy", "scipy", "safetensors", "typer", "rich", "psutil")

EXAMPLES = """\b
Examples:
  wholestep doctor
  wholestep doctor --json
"""


def command(json: options.Json = False) -> None:
    """Say what this machine has and what is missing; paste it into a bug report."""
    found = list(examine())
    if json:
        table: dict[str, str] = {}
        for what, how in found:
            table[what] = f"{table[what]}; {how}" if what in table else how
        typer.echo(json_text.dumps(table, indent=1))
        return
    for what, how in found:
        typer.echo(f"{what:<13} {how}")


def examine() -> Iterator[tuple[str, str]]:
    """(what, how it stands), line by line."""
    import torch

    from wholestep import __version__, compat

    yield "wholestep", __version__
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for package in NEEDED:
        yield package, compat.installed_version(package) or f"missing: pip install {package}"
    for package, use in PACKAGES.items():
        yield package, compat.installed_version(package) or f"not installed (for {use})"
    said = compat.untested_version()
    if said is not None:
        yield "torch", said
    cores, threads = counted(os.cpu_count() or 1, "core"), counted(torch.get_num_threads(), "thread")
    yield "cpu", f"{cores}, {threads}, {torch.backends.cpu.get_cpu_capability()}"
    yield "memory", _memory()
    yield "gpu", _gpu()
    from wholestep.tiers.links import told_links

    for line in told_links(tempfile.gettempdir()):
        yield "link", line
    compiler = next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), None
    )
    yield "C++ compiler", compiler or "missing: on the CPU the step runs interpreted; install g++"
    yield from _caches()


def _memory() -> str:
    import psutil

    from wholestep.graph.bytes import show_bytes

    memory, disk = psutil.virtual_memory(), shutil.disk_usage(".")
    return f"{show_bytes(memory.total)}, {show_bytes(memory.available)} free; {show_bytes(disk.free)} of disk free here"


def _gpu() -> str:
    import torch

    from wholestep.graph.bytes import show_bytes

    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else " (this torch is built without CUDA)"
        return f"none: everything runs on the CPU{built}"
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = ", ".join(f"{card.name} {show_bytes(card.total_memory)}" for card in cards)
    return f"{names}; CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"


def _caches() -> Iterator[tuple[str, str]]:
    """Where things are kept between processes, how much, and what moves or empties it."""
    from wholestep.graph.bytes import show_bytes

    root = cache_folder("")
    kinds = (
        [f"{path.name} {show_bytes(_bytes(path))}" for path in sorted(root.iterdir()) if path.is_dir()]
        if root.is_dir()
        else []
    )
    detail = f": {', '.join(kinds)}" if kinds else ""
    yield "cache", f"{root} ({show_bytes(_bytes(root))}{detail}; WHOLESTEP_CACHE_DIR moves it, removing it is safe)"
    user = os.environ.get("USER") or os.environ.get("LOGNAME") or "root"
    inductor = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or Path(tempfile.gettempdir()) / f"torchinductor_{user}")
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    for name, folder in (("inductor", inductor), ("triton", triton)):
        if folder.is_dir():
            yield "cache", f"{folder} ({show_bytes(_bytes(folder))}; {name}'s own)"


def _bytes(folder: Path) -> int:
    files = (os.path.join(root, name) for root, _, names in os.walk(folder) for name in names)
    return sum(os.path.getsize(path) for path in files if os.path.isfile(path))
