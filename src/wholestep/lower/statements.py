"""The call that a node of an imperative graph stands for: a node in, a Statement of the driver out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from wholestep.graph.strides import is_dense_in, laid_out, memory_order
from wholestep.graph.training_graph import module_of
from wholestep.lower.driver import Statement
from wholestep.ops import IN_ORDER

aten = torch.ops.aten

_AS_RESHAPE = (aten.view.default, aten._unsafe_view.default)
"""Called as `reshape`, which copies where it must: a real kernel may return other strides than tracing was told (torch's batch
norm does so on the CPU for a transposed input)."""


def statement_of(node: fx.Node, *, exactly: bool = False) -> Statement:
    """The call that a node stands for; `exactly` with the strides of the trace, for a reader that was compiled for them."""
    if not callable(node.target):
        raise TypeError(f"node {node.name} calls {node.target!r}, which is no function")
    function = aten.reshape.default if node.target in _AS_RESHAPE else _in_order(node.target)
    if exactly:
        function = _with_strides(function, node.meta.get("val"))
    return Statement(function, node.args, node.kwargs, (node,), comment=module_of(node) or "")


def _in_order(target: Callable[..., Any]) -> Callable[..., Any]:
    """The operator, or what gives the same sums in an order that repeats itself."""
    ordered = IN_ORDER.get(target)  # type: ignore[call-overload]
    if ordered is None:
        return target

    def call(*args: Any, **kwargs: Any) -> Any:
        found = ordered(*args, **kwargs)
        return target(*args, **kwargs) if found is NotImplemented else found

    return call


def _with_strides(function: Callable[..., Any], traced: Any) -> Callable[..., Any]:
    """Copies a result that lies in memory otherwise than tracing was told (hardtanh's backward does, for a transposed gradient).
    How one of a size that only data tells would lie cannot be asked."""
    if not isinstance(traced, torch.Tensor) or traced.dim() < 2 or free_unbacked_symbols(traced):
        return function
    order = memory_order(traced)
    if not is_dense_in(traced, order):
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        return laid_out(function(*args, **kwargs), order)

    return call
