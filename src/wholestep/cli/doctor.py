"""`wholestep doctor`: what this machine has, what is missing and how to get it; to be pasted into a bug report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator

from wholestep.disk import cache_folder

PACKAGES = ("torch", "triton", "transformers", "safetensors", "numpy", "accelerate")


def examine() -> Iterator[tuple[str, str]]:
    """(what, how it stands), line by line."""
    import torch

    from wholestep import __version__, compat

    yield "wholestep", __version__
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for package in PACKAGES:
        yield package, _version(package)
    said = compat.untested_version()
    if said is not None:
        yield "torch", said
    yield "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    yield "gpu", _gpu()
    compiler = next((path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), None)
    yield "C++ compiler", compiler or "missing: the CPU backend runs interpreted; install g++"
    folder = cache_folder("")
    yield "cache", f"{folder} ({_megabytes(str(folder)):.1f} MB; WHOLESTEP_CACHE_DIR moves it)"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"not installed (pip install {package}), needed only for what uses it"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none: everything runs on the CPU"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{', '.join(names)}; CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"


def _megabytes(folder: str) -> float:
    files = (os.path.join(root, name) for root, _, names in os.walk(folder) for name in names)
    return sum(os.path.getsize(path) for path in files if os.path.isfile(path)) / 1e6
