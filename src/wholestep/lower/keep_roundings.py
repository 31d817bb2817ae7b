"""What the user's code rounds stays rounded in compiled code.

`x.to(torch.bfloat16).float()` rounds: quantised training and tests of low precision are written so. Inductor computes narrow
types in float32 and drops the pair, so that nothing is rounded. Between the two casts go the bits as integers, under a mask that is
an input, so that neither it nor a C++ compiler sees that nothing changes. Autocast leaves such pairs in few models.
"""

from __future__ import annotations

import torch
from torch import fx

from wholestep.lower.in_place import ImperativeGraph

aten = torch.ops.aten

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_SAME_ELEMENTS = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int, aten.t.default,
    aten.expand.default, aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
    aten.alias.default, aten.detach.default, aten.clone.default,
)  # fmt: skip


def keep_roundings(imperative: ImperativeGraph) -> int:
    """Guard every cast to a narrower float that is widened again; how many."""
    graph, masks, kept = imperative.graph, dict[tuple[torch.dtype, torch.device], fx.Node](), 0
    for node in list(graph.nodes):
        if not _is_cast(node, narrower=True) or not _is_widened(node):
            continue
        value: torch.Tensor = node.meta["val"]
        whole = _BITS[value.dtype.itemsize]
        if (whole, value.device) not in masks:
            masks[whole, value.device] = _mask(imperative, whole, value, len(masks))
        with graph.inserting_after(node):
            bits = graph.call_function(aten.view.dtype, (node, whole))
        with graph.inserting_after(bits):
            same = graph.call_function(aten.bitwise_and.Tensor, (bits, masks[whole, value.device]))
        with graph.inserting_after(same):
            again = graph.call_function(aten.view.dtype, (same, value.dtype))
        bits.meta = {**node.meta, "val": value.view(whole)}
        same.meta = dict(bits.meta)
        again.meta = dict(node.meta)
        node.replace_all_uses_with(again, delete_user_cb=lambda user, bits=bits: user is not bits)  # type: ignore[misc]
        kept += 1
    return kept


def _mask(imperative: ImperativeGraph, whole: torch.dtype, beside: torch.Tensor, number: int) -> fx.Node:
    """All bits set, as an input: a C++ compiler that knew it would see the two casts."""
    ones = torch.full((), -1, dtype=whole, device=beside.device)
    imperative.owner.register_buffer(f"_all_bits{number}", ones, persistent=False)
    with imperative.graph.inserting_before(next(iter(imperative.graph.nodes))):
        mask = imperative.graph.get_attr(f"_all_bits{number}")
    mask.meta["val"] = beside.fake_mode.from_tensor(ones)  # type: ignore[attr-defined]
    return mask


def _is_cast(node: fx.Node, *, narrower: bool) -> bool:
    if node.target not in _CASTS or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if not before.is_floating_point() or not after.is_floating_point():
        return False
    return before.dtype.itemsize > after.dtype.itemsize if narrower else before.dtype.itemsize < after.dtype.itemsize


def _is_widened(node: fx.Node) -> bool:
    return any(
        _is_cast(user, narrower=False) or (user.target in _SAME_ELEMENTS and _is_widened(user)) for user in node.users
    )
