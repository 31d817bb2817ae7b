"""When two runs of nodes are the same computation: nodes in, a hash that equal runs share out.

Equal are the operations in their order, their arguments (values by position, whoever made them), numbers, and shape, strides, type
and device of every value read or made. Names of nodes, and where in the model they come from, do not count. So twenty-four
equal layers print once (`structure.py`) and compile once (`lower/regions.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx


def equality_hash(reads: Sequence[fx.Node], body: Sequence[fx.Node], returns: Sequence[fx.Node] = ()) -> str:
    """Over everything that decides what code for these nodes does, and nothing else.

    A get_attr node in the body counts by the name of its attribute; among `reads`, its tensor is an input.
    """
    numbers = {node: f"%{index}" for index, node in enumerate([*reads, *body])}
    digest = hashlib.sha256()
    for node in reads:
        digest.update(repr(describe_value(node.meta.get("val"))).encode())
    for node in body:
        args = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
        digest.update(repr((str(node.target), args, describe_value(node.meta.get("val")))).encode())
    digest.update(repr([numbers[node] for node in returns]).encode())
    return digest.hexdigest()


def describe_value(value: Any) -> Any:
    """Shape, strides, dtype and device of a tensor, in plain text; lists entry by entry."""
    if isinstance(value, torch.Tensor):
        shape, strides = tuple(map(str, value.shape)), tuple(map(str, value.stride()))
        return shape, strides, str(value.dtype), str(value.device)
    if isinstance(value, list | tuple):
        return tuple(describe_value(entry) for entry in value)
    return str(value)


def describe_call(node: fx.Node) -> str:
    """The call of one node: operator, and kinds of its arguments. Equal calls do the same work on other data."""
    arguments = fx.map_arg((node.args, node.kwargs), lambda entry: describe_value(entry.meta.get("val")))
    return repr((str(node.target), arguments))
