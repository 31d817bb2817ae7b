"""What every test starts from: one thread per worker (or OMP_NUM_THREADS), fixed seeds, caches of its own, no network.

The compile caches live in one folder per run, shared by the xdist workers, so a region compiled for one test is found
by the next, and nothing an earlier run compiled (perhaps from other code) is. `--compile-cache DIR` keeps them instead.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

# Tests that start a process of their own find the package without an install.
SOURCES = str(Path(__file__).parent.parent / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (SOURCES, os.environ.get("PYTHONPATH"))))
# Read when transformers and OpenMP are first imported, hence set before anything below imports them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Processes with two threads do not burn the other worker's core while they wait for each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
IN_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IN_WORKER:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A pool of compile processes per worker costs more, on a small machine, than it saves.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Tracing makes and drops many objects: looking for cycles after every 700 of them takes a twentieth of all tests.
gc.set_threshold(50_000, 20, 20)
# Workers, and processes that tests start, find the package compiled to bytecode by whoever imported it first.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import logging

import numpy as np
import pytest
import torch

# pytest's log capture puts handlers on every logger, and where this one has any torch describes every graph and guard in full.
torch._logging._internal.trace_log = logging.Logger("torch.__trace")

CREATED_CACHE = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="write the golden files instead of comparing with them")
    parser.addoption("--compile-cache", metavar="DIR", help="keep the compile caches in DIR between runs")


def pytest_configure(config: pytest.Config) -> None:
    if IN_WORKER:  # the environment of the process that started it says where the caches are
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        return
    chosen = config.getoption("--compile-cache")
    folder = Path(chosen).resolve() if chosen else Path(tempfile.mkdtemp(prefix="wholestep-tests-"))
    if not chosen:
        config.stash[CREATED_CACHE] = folder
    os.environ["WHOLESTEP_CACHE_DIR"] = str(folder / "wholestep")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # bindings that count their objects at the end would miss those
    if CREATED_CACHE in config.stash:
        shutil.rmtree(config.stash[CREATED_CACHE], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("multi_gpu") and devices < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two CUDA devices, found {devices}"))
        elif item.get_closest_marker("gpu") and devices < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, found none"))


@pytest.fixture(autouse=True, scope="module")
def older_objects_are_not_looked_at() -> None:
    """The collector, and memory profiles that ask it for all tensors, look at what this module's tests make: the millions of
    objects that torch and earlier tests keep cost seconds each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seeds() -> Iterator[None]:
    """Every test draws the same numbers, whichever tests ran before it; it puts the default dtype back, and leaves no
    mode on or off."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    if (
        torch.cuda.is_available()
    ):  # torch.manual_seed would note down, for every device there might be, where it was called
        torch.cuda.manual_seed_all(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    assert not torch.is_autocast_enabled("cpu"), "a test left autocast on"
    assert torch.is_grad_enabled() and torch._C._is_torch_function_enabled(), (
        "a test left gradients or function modes off"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("name.txt", text)`: text must equal `golden/name.txt` beside the test; `--accept` writes that file."""
    folder = request.path.parent / "golden"

    def check(name: str, text: str) -> None:
        path = folder / name
        if request.config.getoption("--accept"):
            folder.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"{path} does not exist; run the test once with --accept and read what it wrote"
        assert text == path.read_text(encoding="utf-8"), f"{path} differs; --accept takes the new text"

    return check


def settle_hypothesis() -> None:
    """Same examples in every run, no deadline: the first example of a test often pays for a compilation."""
    try:
        import hypothesis
    except ImportError:  # a machine with a GPU may hold only what the GPU tests need
        return
    hypothesis.settings.register_profile("wholestep", deadline=None, derandomize=True, max_examples=25, database=None)
    hypothesis.settings.load_profile("wholestep")


settle_hypothesis()


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
