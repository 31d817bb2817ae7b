"""Activation checkpoints within a whole step: set aside, but for what eager's second forward writes.

In eager a checkpointed part runs once more in the backward, and a batch norm in it counts every batch twice. A whole step
plans itself what it recomputes, so the part runs once here; its statistics are then written a second time, in the order of the
backward. What else such a part writes to, or what its statistics draw, is refused by name.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from wholestep.errors import CaptureRefused

RANDOM = re.compile(
    r"drop|rand|bernoulli|normal|uniform|exponential|multinomial|attention|poisson|rrelu|gumbel|cauchy|geometric"
)
"""In the name of what may draw random numbers."""
_STATISTICS = {"batch_norm": 5, "instance_norm": 5}
"""Function -> the place of the flag that says whether it looks at the batch; its output then depends on no statistics."""
_COUNTS = {"add_", "iadd"}


def is_checkpoint(node: fx.Node) -> bool:
    return node.op == "call_function" and _name(node) == "tag_activation_checkpoint"


class Checkpointed:
    """The checkpointed parts of one run of a graph."""

    def __init__(self) -> None:
        self.again: list[Callable[[], Any]] = []

    def run(self, part: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        held = [value if isinstance(value, torch.Tensor) else None for value in inputs]
        before = [None if value is None else value._version for value in held]
        result = part(*inputs)
        written = [i for i, value in enumerate(held) if value is not None and value._version != before[i]]
        if written and any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(result)):
            _refuse_all_but_statistics(part, written)
            kept = _autocasts()
            self.again.append(lambda: _run_under(kept, part, inputs))
        return result

    def write_again(self) -> None:
        """What the second forward of eager writes."""
        with torch.no_grad():
            while self.again:
                self.again.pop()()


def _refuse_all_but_statistics(part: fx.GraphModule, written: Sequence[int]) -> None:
    placeholders = part.graph.find_nodes(op="placeholder")
    for i in written:
        for user in placeholders[i].users:
            if _name(user) not in _COUNTS and not _looks_at_batch(user):
                raise CaptureRefused(
                    f"{_name(user)} reads or writes what an activation checkpoint writes to; eager does so twice for a batch: "
                    "write outside of the checkpoint"
                )
    names = [_name(node) for node in _nodes(part)]
    random = [name for name in names if RANDOM.search(name) and name not in _STATISTICS]
    if random:
        raise CaptureRefused(
            f"an activation checkpoint holds statistics, which eager counts twice for a batch, and {random[0]}, which may draw "
            "random numbers: take one of them out of the checkpoint"
        )


def writes_twice(module: fx.GraphModule) -> bool:
    """Whether a graph of Dynamo's has a checkpointed part that writes to what it is given: compilers would run it once."""
    for node in module.graph.nodes:
        if is_checkpoint(node):
            part = getattr(module, str(node.args[0].target))
            if any(_looks_at_batch(inner) or _writes_to_input(inner) for inner in _nodes(part)):
                return True
    return False


def _nodes(part: fx.GraphModule) -> Iterator[fx.Node]:
    """Of a graph and the graphs within it."""
    for module in part.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def _looks_at_batch(node: fx.Node) -> bool:
    place = _STATISTICS.get(_name(node))
    if place is None:
        return False
    named = node.kwargs.get("training", node.kwargs.get("use_input_stats"))
    return bool(node.args[place] if len(node.args) > place else named)


def _writes_to_input(node: fx.Node) -> bool:
    writes = _name(node) in _COUNTS or (_name(node).endswith("_") and not _name(node).startswith("_"))
    return writes and bool(node.args) and getattr(node.args[0], "op", "") == "placeholder"


def _autocasts() -> list[tuple[str, torch.dtype, bool]]:
    return [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda")]


def _run_under(autocasts: Sequence[tuple[str, torch.dtype, bool]], part: fx.GraphModule, inputs: Sequence[Any]) -> None:
    with contextlib.ExitStack() as stack:
        for kind, dtype, enabled in autocasts:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
        part(*inputs)


def _name(node: fx.Node) -> str:
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))
