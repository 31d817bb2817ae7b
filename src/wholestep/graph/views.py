"""Views: operators whose results are memory of their arguments. In: an operator, or a node that calls one. Out: yes or no.

One fact, and three narrower questions about it:

    shares_memory   the result may be memory of an argument: by the operator's schema, which holds for every call, while storages of
                    fake tensors lie where passes copied `meta["val"]`
    declares_view   the schema itself says so; `UNDECLARED_VIEWS` are those that keep it to themselves
    is_cheap_view   only sizes and strides change: it costs nothing, so it may be recomputed anywhere
    WHOLE_VIEWS     overloads of those that show all of what they look at, which passes look through
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# Operators that hand back their input's memory although their schemas promise a new tensor. By name, because the
# collectives are registered only where torch.distributed is built in.
UNDECLARED_VIEWS = {
    "aten::_unsafe_view",
    "aten::unsafe_split",
    "aten::unsafe_split_with_sizes",
    "aten::unsafe_chunk",
    "_c10d_functional::wait_tensor",
}
# fmt: off
_CHEAP_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "t", "transpose", "permute", "view", "_unsafe_view", "expand", "unsqueeze", "squeeze", "slice", "select",
        "alias", "detach", "as_strided", "split", "split_with_sizes", "unbind", "diagonal", "unfold",
    )
)
_PARTIAL_VIEWS = frozenset(("aten::slice", "aten::select", "aten::split", "aten::as_strided", "aten::diagonal", "aten::unbind"))
WHOLE_VIEWS = frozenset((
    aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int, aten.t.default,
    aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
))
# fmt: on


@functools.lru_cache(maxsize=4096)  # schemas are slow to read
def declares_view(target: Any) -> bool:
    """Whether the schema says that a result is memory of an argument, or that argument itself, written in place."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    # the alias set of a list of views (`split`) is empty in the schema object; that it exists is what tells
    return any(result.alias_info is not None for result in target._schema.returns)


@functools.lru_cache(maxsize=4096)
def shares_memory(target: Any) -> bool:
    """Whether a call of `target` may return memory of one of its arguments; an entry of a list is the list's."""
    if target is operator.getitem or declares_view(target):
        return True
    return isinstance(target, torch._ops.OpOverload) and target._schema.name in UNDECLARED_VIEWS


def is_cheap_view(node: fx.Node) -> bool:
    """Whether the node only changes sizes and strides: it costs nothing to compute again."""
    return _schema_name(node) in _CHEAP_VIEWS


def is_cheap_view_or_entry(node: fx.Node) -> bool:
    """The same, or one of several results of an operator: no work and no memory of its own either way."""
    return node.target is operator.getitem or is_cheap_view(node)


def is_partial_view(node: fx.Node) -> bool:
    """Whether a cheap view keeps only part of its base: passing it on may let the rest of an intermediate die."""
    return _schema_name(node) in _PARTIAL_VIEWS


def _schema_name(node: fx.Node) -> str | None:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    return node.target._schema.name
