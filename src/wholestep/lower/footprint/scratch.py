"""What operators take beyond what their results show: a graph in, name of a node -> Scratch out.

A matrix product may copy an operand, a convolution unfolds its input, an optimizer written with `_foreach` makes lists of
temporaries; a loss that was reduced in place keeps the storage of all its terms. No graph shows any of it. Each distinct
call (operator, shapes, strides, dtypes, numbers) is run once on stand-ins, alone, and watched. This is the only part of a
prediction that runs anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from wholestep.graph.equality import describe_call
from wholestep.graph.liveness import tensor_bytes
from wholestep.graph.training_graph import TrainingGraph, tensors_in
from wholestep.graph.views import is_cheap_view_or_entry
from wholestep.lower.footprint import cuda
from wholestep.lower.footprint.events import Event, mark, record
from wholestep.lower.footprint.owners import storage_of
from wholestep.lower.in_place import write_state_in_place
from wholestep.lower.statements import statement_of
from wholestep.ops import multi_tensor
from wholestep.ops.updates import BY_IN_PLACE
from wholestep.ops.updates.operators import BYTES_AT_ONCE


@dataclasses.dataclass(frozen=True, slots=True)
class Scratch:
    """Bytes of one call."""

    running: int
    """At its peak, beyond those of its results that are there by then."""
    results: tuple[int, ...]
    """Of the whole storage of each tensor it returns; 0 where it was there before; empty where that is not known."""
    late: tuple[bool, ...] = ()
    """Which results are made only after that peak: some kernels compute into memory of their own, and copy what they return."""


alone: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
"""Open while a call runs on a GPU; a benchmark whose processes share one puts its turns here."""


UPDATED_BYTES = BYTES_AT_ONCE
"""Of parameters that an optimizer's update is measured on."""


class _Unknown(Exception):
    """An argument that no stand-in can be made for."""


_FAILURES = (_Unknown, RuntimeError, IndexError, ValueError, TypeError, ArithmeticError)
"""What an operator may say to arguments without meaning; it is then taken to need nothing for itself."""


def measure_scratch(graph: TrainingGraph, known: dict[str, Scratch] | None = None) -> dict[str, Scratch]:
    """Name of a node (of the lowered graph) -> what it takes; calls that cannot be made on stand-ins are left out.

    `known`: calls that were measured before, of other graphs on the same device; those of this graph are added.
    """
    known = {} if known is None else known
    calls = {
        node: describe_call(node) for node in write_state_in_place(graph).graph.nodes
        if node.op == "call_function" and not is_cheap_view_or_entry(node)
    }  # fmt: skip
    new: dict[str, fx.Node] = {}
    for node, call in calls.items():
        if call not in known:
            new.setdefault(call, node)
    devices = [tensor.device for node in graph.placeholders for tensor in tensors_in(node.meta.get("val"))]
    device = devices[0] if devices else torch.device("cpu")
    measured = measure_calls([functools.partial(prepare_node, node) for node in new.values()], device)
    known.update({call: found for call, found in zip(new, measured, strict=True) if found is not None})
    return {node.name: known[call] for node, call in calls.items() if call in known}


def measure_calls(
    prepare: Sequence[Callable[[], Callable[[], Any]]], device: torch.device, *, strict: bool = False
) -> list[Scratch | None]:
    """One Scratch per call, from one recording. Each entry makes the stand-ins and returns the call itself; None where
    that raised. With `strict` a call that memory does not suffice for raises torch.OutOfMemoryError."""
    if device.type == "cuda":
        return [_measure_on_cuda(prepared, device, strict) for prepared in prepare]
    failed: set[int] = set()
    addresses: list[tuple[int, ...]] = []
    with torch.no_grad(), record(device, reads=False) as recording:
        for number, prepared in enumerate(prepare):
            result = call = None
            try:
                call = prepared()
                with mark(f"call|{number}"):
                    result = call()
            except _FAILURES:
                failed.add(number)
            addresses.append(tuple(storage_of(tensor)[0] for tensor in tensors_in(result)))
            del result, call  # outside the mark: what it frees is no longer the call's
    found = [_Count() for _ in prepare]
    for event in recording.events:
        if event.kind == "memory" and event.context.call is not None:
            found[event.context.call].add(event)
    return [None if number in failed else count.scratch(addresses[number]) for number, count in enumerate(found)]


def _measure_on_cuda(prepared: Callable[[], Callable[[], Any]], device: torch.device, strict: bool) -> Scratch | None:
    """By the allocator's count of bytes asked for: its blocks are larger by what it found not worth splitting off."""
    try:
        with torch.no_grad():
            call = prepared()
            with alone():  # Triton tunes its kernels at their first launch, some of them on copies of their arguments
                call()
            del call  # its stand-ins go before others are made: twice a region's arguments may be more than there is
            call = prepared()
            with alone():
                cuda.reset_peak(device)
                result = call()
                left, most = cuda.requested(device)
    except torch.OutOfMemoryError:
        if strict:
            raise
        return None
    except _FAILURES:
        return None
    del result
    return Scratch(most - left, ())


@dataclasses.dataclass(slots=True)
class _Count:
    """Bytes of one call as it runs, from 0; arguments that die in it count below."""

    now: int = 0
    most: int = 0
    own: dict[int, int] = dataclasses.field(default_factory=dict)
    """Address -> bytes of what it has allocated and not released."""
    late: set[int] = dataclasses.field(default_factory=set)
    """Those of them that were allocated after the peak."""

    def add(self, event: Event) -> None:
        self.now += event.bytes
        if event.bytes > 0:
            self.own[event.address] = event.bytes
            self.late.add(event.address)
        else:
            self.own.pop(event.address, None)
            self.late.discard(event.address)
        if self.now > self.most:
            self.most = self.now
            self.late.clear()

    def scratch(self, results: tuple[int, ...]) -> Scratch:
        """What was counted, once the call has returned tensors at these addresses."""
        still_to_come = sum(self.own[address] for address in self.late.intersection(results))
        return Scratch(
            running=self.most - self.now + still_to_come,
            results=tuple(self.own.get(address, 0) for address in results),
            late=tuple(address in self.late for address in results),
        )


def prepare_node(node: fx.Node) -> Callable[[], Any]:
    """The call of a node on stand-ins, by the function that the driver calls for it."""
    given: Any = (_fewer_to_update(node), node.kwargs)
    args, kwargs = fx.map_arg(given, stand_in)
    function = statement_of(node).function
    return lambda: function(*args, **kwargs)


def _fewer_to_update(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a node; of an optimizer's update on a GPU some of its parameters only.

    Stand-ins for all would be a second copy of weights, gradients and state. Where one kernel goes over all of them in place, what
    it takes for itself, a table of addresses, is next to nothing for any number of parameters. Other updates go over a few
    parameters at a time and need the most for the largest.
    """
    update = BY_IN_PLACE.get(node.target) if callable(node.target) else None
    if update is None or not _on_gpu(node) or (update.is_one_kernel and multi_tensor.triton_reason() is not None):
        return node.args
    bytes_of = [sum(tensor_bytes(t) for t in tensors_in(entry.meta.get("val"))) for entry in node.args[0]]  # type: ignore[union-attr]
    order = range(len(bytes_of)) if update.is_one_kernel else sorted(range(len(bytes_of)), key=lambda i: -bytes_of[i])
    sizes = itertools.accumulate(bytes_of[i] for i in order)
    count = max(1, sum(total <= UPDATED_BYTES for total in sizes))
    return tuple([arg[i] for i in order[:count]] if isinstance(arg, list | tuple) and arg else arg for arg in node.args)


def _on_gpu(node: fx.Node) -> bool:
    return any(t.is_cuda for entry in node.all_input_nodes for t in tensors_in(entry.meta.get("val")))


def stand_in(node: fx.Node) -> Any:
    """A tensor like the node's value: a half for numbers (an optimizer divides by 1 - beta), zeros for indices."""
    value = node.meta.get("val")
    if isinstance(value, list | tuple):
        return [_like(entry) if isinstance(entry, torch.Tensor) else entry for entry in value]
    return _like(value) if isinstance(value, torch.Tensor) else _number(value)


def _like(fake: torch.Tensor) -> torch.Tensor:
    if not all(isinstance(size, int) for size in (*fake.shape, *fake.stride())):
        raise _Unknown
    tensor = torch.empty_strided(tuple(fake.shape), tuple(fake.stride()), dtype=fake.dtype, device=fake.device)
    return tensor.fill_(0.5) if tensor.is_floating_point() else tensor.zero_()


def _number(value: Any) -> Any:
    if value is None or isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise _Unknown
    return value
