"""Lowering `inductor`: regions compiled by TorchInductor, each distinct one once, called by a generated driver.

In goes a TrainingGraph, out comes a Runner. The graph becomes imperative (`in_place.py`), numbers in which equal layers differ
become inputs (`lift_numbers.py`), casts that round are kept (`keep_roundings.py`), it is cut at layer borders (`regions.py`),
each distinct region is compiled (`compile_region.py`), and one flat function calls them in order (`driver.py`). A region that
fails to compile runs operator by operator instead, and `describe()["notes"]` says why.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from wholestep.graph.training_graph import TrainingGraph
from wholestep.lower.compile_region import Compiled, compile_region, forget_compiled, require_compiler
from wholestep.lower.driver import Statement
from wholestep.lower.in_place import ImperativeGraph, write_state_in_place
from wholestep.lower.interpret import driven, facts_of
from wholestep.lower.keep_roundings import keep_roundings
from wholestep.lower.lift_numbers import lift_numbers
from wholestep.lower.overlap import one_wait_for_all
from wholestep.lower.regions import Piece, Region, split_regions
from wholestep.lower.runner import Runner
from wholestep.lower.transfers import Transfers, device_of
from wholestep.ops.updates import BY_IN_PLACE
from wholestep.tiers.files import FileStore

Progress = Callable[[str, int, int], None]


def lower_inductor(
    graph: TrainingGraph, *, watch: Sequence[str] = (), progress: Progress | None = None, store: FileStore | None = None
) -> Runner:
    """A Runner of compiled regions; `progress(text, done, total)` is called before each compilation; `store` as in `interpret`."""
    started = time.perf_counter()
    imperative = imperative_form(graph, watch)
    pieces = split_regions(imperative)
    regions = [piece for piece in pieces if isinstance(piece, Region)]
    require_compiler(regions)
    split_seconds = time.perf_counter() - started
    compiled = compile_together(regions, progress)
    device = device_of(imperative.graph)
    transfers = Transfers(device, store)
    statements = _statements(pieces, compiled, transfers)
    driver = driven(imperative, statements, transfers, device)
    facts = facts_of(imperative, started) | _facts(pieces, compiled) | transfers.facts()
    facts |= {"split_seconds": split_seconds, "driver": driver.source}
    return Runner(driver.function, len(graph.inputs), facts, keep=list(compiled.values()))


def imperative_form(graph: TrainingGraph, watch: Sequence[str] = ()) -> ImperativeGraph:
    """The graph as this backend cuts it into regions."""
    imperative = write_state_in_place(graph, watch)
    take_fused_updates(imperative)
    lift_numbers(imperative)
    keep_roundings(imperative)
    return imperative


def take_fused_updates(imperative: ImperativeGraph) -> None:
    """torch's fused optimizer kernels instead of the user's choice: same formula, one pass over memory on the CPU."""
    for node in imperative.graph.nodes:
        update = BY_IN_PLACE.get(node.target) if node.op == "call_function" else None
        if update is not None and update.has_fused_kernel and node.args[-1] in ("single", "foreach"):
            node.update_arg(len(node.args) - 1, "fused")


def compile_together(regions: list[Region], progress: Progress | None = None) -> dict[str, Compiled]:
    """Signature -> compiled code. Waits for all C++ and Triton at the end; if any of it fails, again one by one, to know which."""
    with recursion_limit_kept():
        try:
            with one_wait_for_all():
                return _compile_distinct(regions, progress)
        except Exception:
            forget_compiled()
        return _compile_distinct(regions, progress)


@contextlib.contextmanager
def recursion_limit_kept() -> Iterator[None]:
    """Inductor raises Python's limit for the whole process."""
    limit = sys.getrecursionlimit()
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def _compile_distinct(regions: list[Region], progress: Progress | None) -> dict[str, Compiled]:
    """Signature -> compiled code."""
    times = Counter(region.signature for region in regions)
    distinct = list({region.signature: region for region in reversed(regions)}.values())[::-1]
    compiled: dict[str, Compiled] = {}
    for index, region in enumerate(distinct, start=1):
        if progress is not None:
            repeat = f" x{times[region.signature]}" if times[region.signature] > 1 else ""
            progress(f"compiling region {index} of {len(distinct)} ({region.title}{repeat})", index, len(distinct))
        compiled[region.signature] = compile_region(region)
    return compiled


def _statements(pieces: list[Piece], compiled: dict[str, Compiled], transfers: Transfers) -> list[Statement]:
    read = {node for piece in pieces if isinstance(piece, Region) for node in piece.reads}
    found: list[Statement] = []
    for piece in pieces:
        if isinstance(piece, fx.Node):
            found += transfers.statements(piece, exactly=piece in read)
            continue
        transfers.passed()
        function = compiled[piece.signature].function
        found.append(Statement(function, piece.reads, {}, piece.defines, unpack=True, boxed=True, comment=piece.title))
    return found


def _facts(pieces: list[Piece], compiled: dict[str, Compiled]) -> dict[str, Any]:
    regions = [piece for piece in pieces if isinstance(piece, Region)]
    titles = {region.signature: region.title for region in regions}
    return {
        "backend": "inductor",
        "regions": len(regions),
        "unique_regions": len(compiled),
        "direct_calls": len(pieces) - len(regions),
        "seconds_per_region": {f"{titles[key]} {key[:8]}": code.seconds for key, code in compiled.items()},
        "cache_hits": sum(code.cached for code in compiled.values()),
        "notes": [f"{titles[key]}: {code.note}" for key, code in compiled.items() if code.note],
    }
