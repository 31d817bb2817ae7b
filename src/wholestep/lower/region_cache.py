"""From a region's signature straight to Inductor's compiled code on disk.

In goes the signature of a region (`regions.py`), out comes the callable that an earlier process compiled for it, or
None. Inductor's own FxGraphCache finds code by a hash of the decomposed graph, so a warm start would still retrace
every region, run the joint-graph passes and hash Triton's sources: seconds, for an answer that the signature already
gives. Here a small file per (signature, environment) remembers the FxGraphCache key. The environment covers whatever
else changes the code: versions, settings, devices, threads and the package's own operators. Anything unexpected means
a miss, and the long way is taken.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
from pathlib import Path
from typing import Any

import torch

from wholestep import compat
from wholestep.disk import read_json, write_json
from wholestep.lower.overlap import probing, vector_isa

FORMAT = 1


def load(signature: str, inputs: list[Any]) -> Any | None:
    """The compiled region, ready to be called, or None. Must run inside the surroundings of a compilation."""
    # Private names of torch: a version that changed them costs the shortcut, nothing else.
    with contextlib.suppress(Exception):
        entry = _read(signature)
        if entry is not None:
            return _load_by_key(entry["key"], entry["vector_isa"], inputs)
    return None


def _load_by_key(key: str, vector_isa: str | None, inputs: list[Any]) -> Any | None:
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraphConstants

    if vector_isa is not None and not _same_vector_isa(vector_isa):
        return None
    constants = CompiledFxGraphConstants()
    graph, _ = FxGraphCache.load_with_key(key, [], inputs, True, None, False, constants)
    if graph is not None:
        options: Any = {"cudagraphs": False, "is_backward": False, "static_input_idxs": (), "is_inference": True}
        graph.post_compile(inputs, constants, options)
    return graph


def remember(signature: str, compiled: Any, *, on_cpu: bool) -> None:
    """Note under which key FxGraphCache stored a region."""
    key = getattr(compiled, "_fx_graph_cache_key", None)
    if key is None:
        return
    with contextlib.suppress(Exception):
        if not _enabled():
            return
        isa = vector_isa() if on_cpu else None
        write_json(_path(signature), {"format": FORMAT, "key": key, "vector_isa": isa})


def _read(signature: str) -> dict[str, Any] | None:
    if not _enabled():
        return None
    try:
        entry = read_json(_path(signature))
    except (OSError, ValueError):
        return None
    return entry if isinstance(entry, dict) and entry.get("format") == FORMAT else None


def _enabled() -> bool:
    from torch._inductor import config

    return bool(config.fx_graph_cache) and not config.force_disable_caches


def _path(signature: str) -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    name = hashlib.sha256(f"{signature} {environment()}".encode()).hexdigest()
    return Path(cache_dir()) / "wholestep" / name[:2] / f"{name}.json"


def environment() -> str:
    """Everything but the graph that decides what Inductor generates, as a hash."""
    from torch._inductor import config

    settings = getattr(config, "save_config_portable", config.get_config_copy)()
    facts = [
        FORMAT,
        sys.version_info[:3],
        torch.__version__,
        torch.version.git_version,
        compat.installed_version("triton"),
        _devices(),
        _own_sources(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        _matmul_settings(),
        sorted((name, repr(value)) for name, value in settings.items()),
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _matmul_settings() -> list[str]:
    """How exact matrix products are; torch refuses to read the old names once the new ones were used to write."""
    reduced = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    names = ["allow_tf32", "fp32_precision", *reduced]
    found = []
    for read in (torch.get_float32_matmul_precision, *(functools.partial(_matmul_setting, name) for name in names)):
        try:
            found.append(str(read()))
        except (RuntimeError, AttributeError, AssertionError):
            found.append("?")
    return found


def _matmul_setting(name: str) -> object:
    value = getattr(torch.backends.cuda.matmul, name)
    return "ieee" if value == "none" else value  # two names of the default: which one depends on who wrote last


@functools.cache
def _devices() -> list[str]:
    if not torch.cuda.is_available():
        return []
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [*names, str(torch.version.cuda), str(torch.version.hip)]


@functools.cache
def _own_sources() -> str:
    """A hash of the operators' sources: decompositions are part of what was compiled."""
    import wholestep.ops
    from wholestep.lower import compile_region

    digest = hashlib.sha256(Path(compile_region.__file__).read_bytes())
    for path in sorted(Path(wholestep.ops.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _same_vector_isa(expected: str) -> bool:
    """Whether this CPU would get the instruction set that the code on disk was compiled for.

    Inductor proves each instruction set with a subprocess, 0.5 s apiece, in every process. The proof was made when
    the code was compiled, so here the processor's own list of capabilities is enough; when it disagrees, the proof is
    repeated.
    """
    from torch._inductor import config, cpu_vec_isa

    with probing(), config.patch({"cpp.vec_isa_ok": True}):
        same = str(cpu_vec_isa.pick_vec_isa()) == expected
    if not same:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
    return same
