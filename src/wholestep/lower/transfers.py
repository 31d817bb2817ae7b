"""Copies between card and host as statements of the driver: a node of a trip in, calls on streams with their events out.

    copy_out(x)      main: leave `made`           out: after `made`, slot <- x, leave `out`
    out_done(x, h)   main: after `out`            x is freed here, on the main stream, when the copy is over
    copy_in(h)       main: y = memory, leave `made`     in: after `made` and `out`, y <- slot, leave `in`
    in_done(y)       main: after `in`

Memory of the card is taken and freed on the main stream only, and there only after a wait, so the allocator need not know of the
other streams: a slow link costs time, never memory. Slots of the host are fixed here, one per value. What goes to files is
written and read by threads, through a few slabs of host memory; a step that does so is not recorded.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from wholestep.graph.training_graph import tensors_in
from wholestep.lower.driver import Statement
from wholestep.lower.file_trips import FileTrip, FileTrips, kept_beside
from wholestep.lower.statements import statement_of
from wholestep.ops.offload import copy_out_into, laid_like
from wholestep.ops.record import record_of
from wholestep.tiers.arena import Arena
from wholestep.tiers.files import FileStore

OUT, IN = "out", "in"
"""Names of the streams."""


class Transfers:
    """The statements of one step: asked for node by node, in order."""

    def __init__(self, device: torch.device, store: FileStore | None = None) -> None:
        self.device = device
        self.arena = Arena(pinned=device.type == "cuda")
        self.files = None if store is None else FileTrips(store, device)
        self.trips: dict[fx.Node, FileTrip] = {}
        self.left: dict[fx.Node, str] = {}
        """Value on the host, or on its way in -> the event that says it is there."""
        self.mark: str | None = None
        """The event of the main stream that holds for this place."""
        self.moved_bytes = {OUT: 0, IN: 0}
        self.used_bytes = 0
        """Of the arena: what values take of their slots."""
        self.state_bytes = 0
        """Of optimizer state that lies on the host, in memory of its own."""

    def statements(self, node: fx.Node, *, exactly: bool = False) -> list[Statement]:
        """The calls that a node stands for."""
        if node.target is copy_out_into:
            return self._copy_out_into(node)
        handle = _HANDLERS.get(record_of(node).trip)
        if handle is None:
            self.mark = None
            return [statement_of(node, exactly=exactly)]
        return handle(self, node)  # type: ignore[no-any-return]

    def passed(self) -> None:
        """A region was called: what was marked before it does not hold behind it."""
        self.mark = None

    def ready(self) -> None:
        """Take the memory of the host where that has to be pinned: not while a step is recorded."""
        if self.arena.pinned and self.arena.bytes:
            self.arena.open()

    def facts(self) -> dict[str, Any]:
        """For reports; nothing where nothing moves."""
        if not any(self.moved_bytes.values()):
            return {}
        files = 0 if self.files is None else self.files.store.bytes
        return {
            "moved_bytes": dict(self.moved_bytes),
            "host_bytes": self.arena.bytes,
            "file_bytes": files,
            "transfers": self,
        }

    def _marked(self, name: str) -> list[Statement]:
        """Leave an event on the main stream, unless one stands here already."""
        if self.mark is not None:
            return []
        self.mark = f"{name}.made"
        return [Statement(_nothing, (), {}, (), leaves=self.mark)]

    def _copy_out(self, node: fx.Node) -> list[Statement]:
        x: Any = node.args[0]
        like = x.meta["val"]
        self.moved_bytes[OUT] += like.nbytes
        if len(node.args) > 1 and node.args[1] == "file" and self.files is not None:
            trip = self.trips[node] = self.files.trip(like)
            return [Statement(trip.send, (x,), {}, (node,), comment="to a file")]
        send = Send(self.arena, self.arena.reserve(like.nbytes), like)
        self.used_bytes += like.nbytes
        self.left[node] = f"{node.name}.out"
        marks = self._marked(node.name)
        return [*marks, Statement(send, (x,), {}, (node,), stream=OUT, after=(str(self.mark),), leaves=self.left[node])]

    def _copy_out_into(self, node: fx.Node) -> list[Statement]:
        x, target = node.args
        self.moved_bytes[OUT] += x.meta["val"].nbytes  # type: ignore[union-attr]
        self.state_bytes += x.meta["val"].nbytes  # type: ignore[union-attr]
        self.left[target] = f"{node.name}.out"  # type: ignore[index]
        marks = self._marked(node.name)
        event = self.left[target]  # type: ignore[index]
        return [
            *marks,
            Statement(copy_out_into, (x, target), {}, (), stream=OUT, after=(str(self.mark),), leaves=event),
        ]

    def _out_done(self, node: fx.Node) -> list[Statement]:
        h: Any = node.args[1]
        if h in self.trips:
            self.trips[node] = self.trips[h]
            return [Statement(self.trips[h].sent, node.args, {}, (node,))]
        self.left[node] = self.left[h]
        return [Statement(_second, node.args, {}, (node,), after=(self.left[h],))]

    def _copy_in(self, node: fx.Node) -> list[Statement]:
        h, device = node.args
        self.moved_bytes[IN] += node.meta["val"].nbytes
        if h in self.trips:
            self.trips[node] = self.trips[h]  # type: ignore[index]
            return [Statement(self.trips[h].fetch, (h, device), {}, (node,), comment="from a file")]  # type: ignore[index]
        take = Statement(laid_like, (h, device), {}, (node,))
        self.mark = None  # the memory is taken here
        marks = self._marked(node.name)
        waits = (str(self.mark), *([self.left[h]] if h in self.left else []))  # type: ignore[index,list-item]
        self.left[node] = f"{node.name}.in"
        return [take, *marks, Statement(_fill, (node, h), {}, (), stream=IN, after=waits, leaves=self.left[node])]

    def _in_done(self, node: fx.Node) -> list[Statement]:
        y: Any = node.args[0]
        if y in self.trips:
            return [Statement(self.trips[y].fetched, (y,), {}, (node,))]
        return [Statement(_first, (y,), {}, (node,), after=(self.left[y],))]


_HANDLERS: dict[str, Any] = {
    "copy_out": Transfers._copy_out, "out_done": Transfers._out_done, "copy_in": Transfers._copy_in, "in_done": Transfers._in_done,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Send:
    """Copies a value to its slot, laid out as the trace says: what comes back is read by code that was compiled for that."""

    arena: Arena
    slot: tuple[int, int]
    like: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.like.dtype:
            return kept_beside(x, self.like.dtype)
        h = self.arena.tensor(self.slot, self.like)
        h.copy_(x, non_blocking=True)
        return h


def device_of(graph: fx.Graph) -> torch.device:
    """Where a step computes: the first input that is on a GPU says so."""
    devices = [t.device for node in graph.nodes if node.op == "placeholder" for t in tensors_in(node.meta.get("val"))]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _nothing() -> None:
    return None


def _first(y: torch.Tensor) -> torch.Tensor:
    return y


def _second(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return h


def _fill(y: torch.Tensor, h: torch.Tensor) -> None:
    y.copy_(h, non_blocking=True)


WRITTEN: dict[Any, int] = {_fill: 0, copy_out_into: 1}
"""Function -> the argument that it writes to."""
BESIDE = (_nothing, _fill)
"""Of all functions those that are called beside the one call that stands for a node."""


def passes_on(statement: Statement) -> fx.Node | None:
    """The argument that a statement returns as it is."""
    index = {_first: 0, _second: 1}.get(statement.function)  # type: ignore[call-overload]
    return None if index is None else statement.args[index]
