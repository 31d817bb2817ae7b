"""An exception nobody expected, told to people: the user's own code by file and line, the rest with its traceback in a file.

Memory that ran out has a text of its own: what fills it, by module and phase, and what would help, with predicted peaks. It
comes from the graph of the step, which is found in the frames the exception came through.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wholestep.graph.training_graph import TrainingGraph

OURS = str(Path(__file__).resolve().parent.parent)
"""The package."""


def last_words(error: BaseException) -> str:
    """What to print after `wholestep: `."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    if len(said) > 400:
        said = said[:400] + " ..."
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or error}"
    place = _users_place(error)
    if place is not None:
        return f"{said} (at {place})"
    return f"an error of Wholestep's own: {said}. The traceback is in {_written(error)}; please report it with `wholestep doctor`"


def out_of_memory(error: BaseException) -> str:
    """What to print after `wholestep: `, several lines where the step was captured before memory ran out."""
    said = " ".join(f"{type(error).__name__}: {error}".split())[:160].rstrip(".")
    first = f"out of memory. Use a smaller --batch or --seq, --precision bf16, or a budget with --memory ({said})"
    graph = _graph_in(error)
    if graph is None:
        return first
    from wholestep.profile.memory.oom import explain_oom

    try:
        return f"out of memory: {explain_oom(graph, limit_bytes=_gpu_bytes(graph))}\n({said})"
    except Exception:  # telling why must not fail in its turn
        return first


def _graph_in(error: BaseException | None) -> TrainingGraph | None:
    """The graph of the step in the frames that the exception came through, innermost first."""
    from wholestep.graph.training_graph import TrainingGraph

    while error is not None:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        for frame in reversed(frames):
            for value in list(frame.f_locals.values()):
                found = value if isinstance(value, TrainingGraph) else _held_graph(value)
                if isinstance(found, TrainingGraph):
                    return found
        error = error.__cause__ or error.__context__
    return None


def _held_graph(value: Any) -> Any:
    """Of a Step, a Variant, or what verify captured."""
    if type(value).__module__.startswith("wholestep."):
        inner = getattr(value, "capture", None) or getattr(value, "captured", None) or value
        return getattr(inner, "graph", None)
    return None


def _gpu_bytes(graph: TrainingGraph) -> int | None:
    """All memory of the GPU that the graph is for; None on a CPU."""
    import torch

    from wholestep.graph.training_graph import tensors_in

    devices = {tensor.device for node in graph.placeholders for tensor in tensors_in(node.meta.get("val"))}
    gpu = next((device for device in devices if device.type == "cuda"), None)
    return None if gpu is None or not torch.cuda.is_available() else torch.cuda.get_device_properties(gpu).total_memory


def _users_place(error: BaseException) -> str | None:
    """`file.py:12`, the innermost line that is neither ours nor of an installed package; None when there is none."""
    installed = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = os.path.realpath(frame.filename)
        foreign = (
            not os.path.isfile(path) or "site-packages" in path or any(path.startswith(p + os.sep) for p in installed)
        )
        if not foreign and not path.startswith(OURS + os.sep) and not path.startswith(sys.prefix + os.sep):
            return f"{os.path.relpath(path)}:{frame.lineno}"
    return None


def _written(error: BaseException) -> str:
    handle, path = tempfile.mkstemp(prefix="wholestep-error-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write("".join(traceback.format_exception(error)))
    return path
