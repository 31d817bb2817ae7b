"""The memory of a compiled step before it runs: values that cross region borders, plus each region's own peak.

In goes a TrainingGraph, out comes a predicted MemoryProfile of backend `inductor`. What crosses borders follows from
liveness over the driver's calls (`predict.py`). What a region takes inside - the buffers of Inductor's wrapper, the
workspaces of the libraries it calls - is measured by running each distinct region once on stand-ins, with those arguments
released that die there in the step. 24 equal layers are run once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from wholestep.graph.equality import describe_call
from wholestep.graph.training_graph import TrainingGraph, tensors_in
from wholestep.lower.compile_region import Compiled
from wholestep.lower.footprint.blocks import MemoryProfile
from wholestep.lower.footprint.predict import CallFootprint, last_uses, profile_of_calls, unmeasured
from wholestep.lower.footprint.scratch import Scratch, measure_calls, prepare_node, stand_in
from wholestep.lower.in_place import ImperativeGraph
from wholestep.lower.inductor import compile_together, imperative_form
from wholestep.lower.regions import Piece, Region, split_regions


def predict_compiled(
    graph: TrainingGraph, *, rounding: int | None = None, code: list[Compiled] | None = None, strict: bool = False
) -> MemoryProfile:
    """The profile of backend `inductor`. Compiles what is not compiled yet, and runs every distinct piece once.

    Args:
        rounding: of the allocator, in bytes; None is 1 on a CPU and 512 on a GPU.
        code: compiled regions are added to it: held there, they need not be compiled again by whoever lowers this graph.
        strict: raise torch.OutOfMemoryError where memory does not suffice for a piece, instead of leaving it out.
    """
    imperative = imperative_form(graph)
    pieces = split_regions(imperative)
    compiled = compile_together([piece for piece in pieces if isinstance(piece, Region)])
    if code is not None:
        code += compiled.values()
    bare = [_call(piece) for piece in pieces]
    last = last_uses(bare, imperative)
    dying = [_dying(call, index, last) for index, call in enumerate(bare)]
    measured = _measure(imperative, pieces, dying, compiled, strict)
    calls = [_call(piece, found) for piece, found in zip(pieces, measured, strict=True)]
    return profile_of_calls(graph, imperative, calls, rounding=rounding, notes=unmeasured(calls))


def _call(piece: Piece, scratch: Scratch | None = None) -> CallFootprint:
    if isinstance(piece, Region):
        return CallFootprint(piece.reads, piece.defines, piece.body, boxed=True, scratch=scratch)
    return CallFootprint(tuple(piece.all_input_nodes), (piece,), (piece,), scratch=scratch)


def _dying(call: CallFootprint, index: int, last: dict[fx.Node, int]) -> tuple[bool, ...]:
    return tuple(last.get(node) == index for node in call.reads)


def _measure(
    imperative: ImperativeGraph,
    pieces: Sequence[Piece],
    dying: Sequence[tuple[bool, ...]],
    compiled: Mapping[str, Compiled],
    strict: bool,
) -> list[Scratch | None]:
    """One Scratch per piece; pieces that are the same call share one measurement."""
    keys: list[Any] = []
    prepare: dict[Any, Callable[[], Callable[[], Any]]] = {}
    for piece, dies in zip(pieces, dying, strict=True):
        if isinstance(piece, Region):
            key: Any = (piece.signature, dies)
            function = compiled[piece.signature].function
            prepare.setdefault(key, lambda f=function, piece=piece, dies=dies: _prepare_region(f, piece, dies))  # type: ignore[misc]
        else:
            key = describe_call(piece)
            prepare.setdefault(key, lambda piece=piece: prepare_node(piece))  # type: ignore[misc]
        keys.append(key)
    devices = [tensor.device for node in imperative.placeholders for tensor in tensors_in(node.meta.get("val"))]
    found = measure_calls(list(prepare.values()), devices[0] if devices else torch.device("cpu"), strict=strict)
    by_key = dict(zip(prepare, found, strict=True))
    return [by_key[key] for key in keys]


def _prepare_region(function: Callable[[list[Any]], Any], region: Region, dies: tuple[bool, ...]) -> Callable[[], Any]:
    """The region on stand-ins; those that do not die here are held by someone else, as in the step."""
    arguments = [stand_in(node) for node in region.reads]
    kept = [value for value, dead in zip(arguments, dies, strict=True) if not dead]

    def call() -> Any:
        assert kept is not None
        return function(arguments)

    return call
