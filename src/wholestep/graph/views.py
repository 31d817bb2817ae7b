"""Which nodes only look at memory that is already there: they cost nothing, so they may be made again anywhere."""

from __future__ import annotations

import torch
from torch import fx

# fmt: off
_CHEAP_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "t", "transpose", "permute", "view", "_unsafe_view", "expand", "unsqueeze", "squeeze", "slice", "select",
        "alias", "detach", "as_strided", "split", "split_with_sizes", "unbind", "diagonal", "unfold",
    )
)
# fmt: on


def is_cheap_view(node: fx.Node) -> bool:
    """Whether the node only changes sizes and strides: it costs nothing to compute again."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target._schema.name in _CHEAP_VIEWS
