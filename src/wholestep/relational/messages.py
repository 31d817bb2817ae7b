"""What a message function is given, and `edge_softmax`, which it may call.

In: features of nodes and edges, parameters, numbers of relations and types, a row per edge. Out: `e` and `p`, as the function
reads them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from wholestep.errors import BadOption
from wholestep.ops.amounts import numel
from wholestep.ops.record import record

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define("edge_softmax(Tensor logits, Tensor dst, Tensor? etype=None) -> Tensor")
LIBRARY.define("row_matmul(Tensor left, Tensor right) -> Tensor")
LIBRARY.define("row_einsum(str equation, Tensor[] operands) -> Tensor")


def _edge_softmax(logits: Tensor, dst: Tensor, etype: Tensor | None = None) -> Tensor:
    """Edges in any order."""
    dst = dst if etype is None else pair_of(dst, etype)
    order = dst.argsort(stable=True)
    last = int(dst.max()) + 1 if dst.numel() else 0
    ptr = torch.searchsorted(dst[order], torch.arange(last + 1, device=dst.device))
    return torch.ops.ws.segment_softmax(logits[order], ptr)[order.argsort()]  # type: ignore[no-any-return]


LIBRARY.impl("edge_softmax", _edge_softmax, "CompositeExplicitAutograd")
# marks in a traced message function, of which a program has none
record("ws::edge_softmax", kind="reduction", flops=lambda call: 5 * numel(call.outputs[0]))
record("ws::row_matmul", kind="matmul", flops=lambda call: 2 * numel(call.outputs[0]) * call.shape("left")[-1])
record("ws::row_einsum", kind="matmul", flops=lambda call: 2 * numel(call.outputs[0]))
for _name, _plain in (("row_matmul", torch.matmul), ("row_einsum", torch.einsum)):
    LIBRARY.impl(_name, _plain, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ws::{_name}", _plain, lib=LIBRARY)
torch.library.register_fake("ws::edge_softmax", lambda logits, dst, etype=None: torch.empty_like(logits), lib=LIBRARY)


class Fields:
    """Named values: `e`, `e.src`, `e.dst` and `p`."""

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self, name, value)


def arguments_of(
    src: Mapping[str, Tensor], dst: Mapping[str, Tensor], edge: Mapping[str, Tensor], params: Mapping[str, Tensor],
    etype: Tensor, *types_of_ends: Tensor,
) -> tuple[Fields, Fields]:  # fmt: skip
    """`e` and `p` of tensors by name; types of sources and destinations where the graph has them."""
    ends = [dict(src), dict(dst)]
    for end, kind in zip(ends, types_of_ends, strict=False):
        end["type"] = kind
    return Fields(src=Fields(**ends[0]), dst=Fields(**ends[1]), type=etype, **edge), Fields(**params)


# ---- softmax over the edges of a node ----


class _AtWork(threading.local):
    softmax: Callable[[Tensor, bool], Tensor] | None = None
    """How softmax is computed where a message function runs now; None outside of all."""


_at_work = _AtWork()


class softmax_by:
    """While it is open, `edge_softmax(logits, within_relation=...)` is `function(logits, within_relation)`."""

    def __init__(self, function: Callable[[Tensor, bool], Tensor]) -> None:
        self.function = function

    def __enter__(self) -> None:
        self.before, _at_work.softmax = _at_work.softmax, self.function

    def __exit__(self, *exc: object) -> None:
        _at_work.softmax = self.before


def edge_softmax(logits: Tensor, *, within_relation: bool = False) -> Tensor:
    """Inside of a message function: softmax over the edges that come in at one node; logits (edges,) or (edges, heads).

    `within_relation`: over those of the same relation only.
    """
    if _at_work.softmax is None:
        raise BadOption("edge_softmax outside of a message function", hint="call it in the function given to rel.layer")
    return _at_work.softmax(logits, within_relation)


torch.compiler.allow_in_graph(edge_softmax)


def softmax_mark(dst: Tensor, etype: Tensor) -> softmax_by:
    """One operator, for a trace."""
    return softmax_by(lambda logits, within: torch.ops.ws.edge_softmax(logits, *((dst, etype) if within else (dst,))))


def softmax_by_edges(dst: Tensor, etype: Tensor) -> softmax_by:
    """In plain PyTorch, with its own derivative."""
    return softmax_by(lambda logits, within: _plain_softmax(logits, pair_of(dst, etype) if within else dst))


def _plain_softmax(logits: Tensor, dst: Tensor) -> Tensor:
    place = dst.reshape(-1, *[1] * (logits.dim() - 1)).expand(logits.shape)
    nodes = int(dst.max()) + 1 if dst.numel() else 0
    top = (
        logits.detach()
        .new_full((nodes, *logits.shape[1:]), float("-inf"))
        .scatter_reduce(0, place, logits.detach(), "amax")
    )
    risen = (logits - top[dst]).exp()
    return risen / risen.new_zeros(nodes, *logits.shape[1:]).index_add(0, dst, risen)[dst]


def largest_of(messages: Tensor, dst: Tensor, degree: Tensor) -> Tensor:
    """The largest message at every node, 0 where none comes in; messages that tie share the gradient.

    torch's own reduction counts the value that it starts from among those that tie, though it is told to leave it out: it is to be
    one that no message has.
    """
    tail = [1] * (messages.dim() - 1)
    start = float("-inf") if messages.is_floating_point() else 0
    place = dst.reshape(-1, *tail).expand(messages.shape)
    found = messages.new_full((degree.shape[0], *messages.shape[1:]), start)
    found = found.scatter_reduce(0, place, messages, "amax", include_self=False)
    return found.masked_fill((degree == 0).reshape(-1, *tail), 0)


def pair_of(dst: Tensor, etype: Tensor) -> Tensor:
    """A number for every destination and relation of which there are edges."""
    relations = int(etype.max()) + 1 if etype.numel() else 1
    return torch.unique(dst * relations + etype, return_inverse=True)[1]
