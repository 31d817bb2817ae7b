"""Twenty faults, one in every pass, planted while the fuzzer looks: does it find them, and after how many graphs?

A fault is a small patch of the pass's own file, of the kind that reviews miss. `planted` puts it there and takes it away again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import operator
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx

from wholestep.graph.training_graph import OutputKind, TrainingGraph
from wholestep.ops import IN_PLACE
from wholestep.passes import bound_counts, fold_constants, recognise_masks, share_equal

aten, ws = torch.ops.aten, torch.ops.ws


@dataclasses.dataclass(frozen=True)
class Fault:
    """In which pass, what is wrong then, and the names of its file that are replaced."""

    stage: str
    says: str
    replaced: dict[str, Any]


@contextlib.contextmanager
def planted(fault: Fault) -> Iterator[None]:
    module = importlib.import_module(f"wholestep.passes.{fault.stage}")
    with contextlib.ExitStack() as stack:
        for name, value in fault.replaced.items():
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def found_after(fault: Fault, most: int, seed: int = 0) -> int | None:
    """How many graphs it takes to find the fault; None when `most` are not enough."""
    from tests.fuzz.check import Wrong, examine
    from tests.fuzz.draw import draw

    for count in range(1, most + 1):
        with planted(fault):
            try:
                examine(draw(seed + count).case(), (fault.stage,))
            except Wrong:
                return count
    return None


# ---- the patches ----


def _view_of_fakes(source: fx.Node, after: torch.Tensor) -> list[int] | None:
    """What tensors without data answer, which merge dimensions around one of size 1."""
    try:
        viewed = source.meta["val"].view(after.shape)
    except (RuntimeError, ValueError):
        return None
    return list(after.shape) if viewed.stride() == after.stride() else None


def _causal_enough(mask: torch.Tensor) -> str | None:
    """Nothing above the diagonal is taken for all below it."""
    if mask.dtype == torch.bool and mask.shape[-1] == mask.shape[-2] and not bool(mask.triu(1).any()):
        return "causal"
    return _classify(mask)


_classify, _key, _number = recognise_masks._classify, share_equal._key, fold_constants._number
_rewritten = bound_counts._rewrite


def _truncated(node: fx.Node, value: torch.Tensor) -> Any:
    number = _number(node, value)
    return float(int(number)) if isinstance(number, float) else number


def _behind_reader(node: fx.Node, lives: Any) -> bool:
    """A node moves behind the first of its readers."""
    reader = min(node.users)
    if node.next is reader or reader.op == "output" or not lives.may_stand_beside(node, reader):
        return False
    reader.append(node)
    return True


def _after(stage: str, change: Callable[[TrainingGraph], None]) -> dict[str, Any]:
    """The pass itself, and then a change of the graph."""
    true = getattr(importlib.import_module(f"wholestep.passes.{stage}"), stage)

    @functools.wraps(true)
    def faulty(graph: TrainingGraph, *args: Any, **options: Any) -> TrainingGraph:
        graph = true(graph, *args, **options)
        change(graph)
        return graph

    return {stage: faulty}


def _lose_an_update(graph: TrainingGraph) -> None:
    """The last buffer that is written is not written."""
    at = [
        i
        for i, entry in enumerate(graph.outputs)
        if entry.kind is OutputKind.UPDATE and entry.name.startswith("buffer")
    ]
    if at:
        values = list(graph.output_values)
        values[at[-1]] = graph.placeholders[graph.outputs[at[-1]].target or 0]
        graph.output_node.args = (tuple(values),)


def _lose_biases(graph: TrainingGraph) -> None:
    """Nothing is added to a product in a region of its own."""
    for node in graph.operations():
        if node.target is aten.addmm.default and "region" in node.meta["custom"]:
            node.kwargs = {**node.kwargs, "beta": 0}


def _lose_biases_of_pieces(graph: TrainingGraph) -> None:
    """Nothing is added to the last product before a cut."""
    product = None
    for node in graph.operations():
        if product is not None and "piece" in node.meta["custom"]:
            product.kwargs = {**product.kwargs, "beta": 0}
        product = node if node.target is aten.addmm.default else product


def _exchange_copies(graph: TrainingGraph) -> None:
    """Of what comes back, two tensors of one kind are taken for each other."""
    kinds: dict[Any, fx.Node] = {}
    for node in graph.operations():
        if node.target is ws.copy_in.default:
            value = node.meta["val"]
            other = kinds.setdefault((value.shape, value.stride(), value.dtype), node)
            if other is not node:
                node.args, other.args = (other.args[0], *node.args[1:]), (node.args[0], *other.args[1:])
                graph.graph.lint()
                return


def _draw_anew(graph: TrainingGraph) -> None:
    """What is recomputed draws other random numbers."""
    for node in list(graph.operations()):
        if node.target is ws.dropout.default and node.meta["custom"].get("recomputed"):
            with graph.graph.inserting_before(node):
                key = graph.graph.call_function(aten.add.Tensor, (node.args[2], 1))
            key.meta = {"val": node.args[2].meta["val"], "custom": dict(node.meta["custom"])}  # type: ignore[union-attr]
            node.update_arg(2, key)


def _narrow_one_more(graph: TrainingGraph) -> None:
    """In a step that computes in bf16, a gradient that was made in float32 is held in bf16 too."""
    values = [node.meta.get("val") for node in graph.operations()]
    if not any(isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 for value in values):
        return
    for update in [node for node in graph.operations() if node.target in IN_PLACE]:
        for gradient in update.args[1]:  # type: ignore[union-attr]
            value = gradient.meta["val"]  # type: ignore[union-attr]
            if value.dtype == torch.float32:
                with graph.graph.inserting_before(update):
                    narrow = graph.graph.call_function(aten._to_copy.default, (gradient,), {"dtype": torch.bfloat16})
                narrow.meta = {"val": value.to(torch.bfloat16), "custom": dict(update.meta["custom"])}
                update.update_arg(1, [narrow if entry is gradient else entry for entry in update.args[1]])  # type: ignore[union-attr]
                return


def _exchange_sides(graph: TrainingGraph) -> None:
    for node in list(graph.operations()):
        if node.target is aten.clone.default and node.kwargs.get("memory_format") is torch.channels_last:
            source = node.args[0]
            value = source.meta["val"]  # type: ignore[union-attr]
            if value.shape[2] == value.shape[3] > 1:
                with graph.graph.inserting_before(node):
                    turned = graph.graph.call_function(aten.transpose.int, (source, 2, 3))
                turned.meta = {"val": value.transpose(2, 3), "custom": dict(node.meta["custom"])}
                node.update_arg(0, turned)


def _turn_patches(graph: TrainingGraph) -> None:
    """Patches are read by columns."""
    for node in graph.operations():
        if node.target is aten.permute.default and node.args[1] == [0, 2, 4, 1, 3, 5]:
            value = node.args[0].meta["val"]  # type: ignore[union-attr]
            if value.shape[3] == value.shape[5]:
                node.update_arg(1, [0, 2, 4, 1, 5, 3])
                node.meta["val"] = value.permute([0, 2, 4, 1, 5, 3])


def _ignore_another_index(graph: TrainingGraph) -> None:
    for node in graph.operations():
        if node.target is ws.linear_cross_entropy_and_gradients.default:
            node.update_arg(5, -1)


def _leave_weights_stale(graph: TrainingGraph) -> None:
    """Of several updates the first leaves a weight as it was."""
    updates = [node for node in graph.operations() if node.target in IN_PLACE]
    if len(updates) < 2:
        return
    first = next(user for user in updates[0].users if user.target is operator.getitem and user.args[1] == 0)
    values = list(graph.output_values)
    if first in values:
        values[values.index(first)] = updates[0].args[0][0]  # type: ignore[index]
        graph.output_node.args = (tuple(values),)


def _count_from_one(edit: Any, node: fx.Node) -> None:
    """What is equal to 1 .. n is counted instead of 0 .. n-1."""
    _rewritten(edit, node)
    for other in edit.graph.operations():
        if other.target is aten.arange.default and any(user.target is aten.eq.Tensor for user in other.users):
            length = other.args[0]
            other.target, other.args = aten.arange.start, (1, length + 1)  # type: ignore[operator]


def _shift_scatters(graph: TrainingGraph) -> None:
    """The first row of the index serves all rows."""
    for node in graph.operations():
        if node.target is ws.scatter_shared.default:
            index = node.args[0]
            value = index.meta["val"]  # type: ignore[union-attr]
            with graph.graph.inserting_before(node):
                first = graph.graph.call_function(aten.slice.Tensor, (index, 0, 0, 1))
                every = graph.graph.call_function(aten.expand.default, (first, list(value.shape)))
            first.meta = {"val": value[:1], "custom": dict(node.meta["custom"])}
            every.meta = {"val": value[:1].expand(value.shape), "custom": dict(node.meta["custom"])}
            node.update_arg(0, every)


def _first_window_for_all(graph: TrainingGraph) -> None:
    """Every window is masked as the first one."""
    for node in graph.operations():
        if node.target is ws.biased_attention.default and node.args[3].meta["val"].shape[0] > 1:  # type: ignore[union-attr]
            bias = node.args[3]
            value = bias.meta["val"]  # type: ignore[union-attr]
            with graph.graph.inserting_before(node):
                first = graph.graph.call_function(aten.slice.Tensor, (bias, 0, 0, 1))
            first.meta = {"val": value[:1], "custom": dict(node.meta["custom"])}
            node.update_arg(3, first)


def _hide_the_future(graph: TrainingGraph) -> None:
    """An attention that names its kernel is causal."""
    for node in graph.operations():
        if node.target is ws.attention.default and "implementation" in node.kwargs:
            node.update_arg(4, True)


FAULTS = (
    Fault("fold_views", "views around a size of 1 are merged by announced strides",
          {"_one_view": _view_of_fakes, "_keeps_order": lambda source, node: True}),
    Fault("fold_casts", "a cast to fewer bits counts as exact", {"_exact": lambda inner, source: True}),
    Fault("fold_constants", "a fraction loses its decimals", {"_number": _truncated}),
    Fault("share_equal", "two casts of one value are equal whatever the dtype",
          {"_key": lambda a: () if isinstance(a, dict) else _key(a)}),
    Fault("lean_gradients", "a float32 gradient is narrowed", _after("lean_gradients", _narrow_one_more)),
    Fault("patch_products", "patches are read by columns", _after("patch_products", _turn_patches)),
    Fault("channels_last", "height and width of a turned copy are exchanged", _after("channels_last", _exchange_sides)),
    Fault("order_for_peak", "a node moves behind its reader", {"_sink": _behind_reader}),
    Fault("remove_dead", "the last buffer is not written", _after("remove_dead", _lose_an_update)),
    Fault("recognise_masks", "a band counts as causal", {"_classify": _causal_enough}),
    Fault("fuse_loss", "another index is ignored", _after("fuse_loss", _ignore_another_index)),
    Fault("bound_counts", "counts begin at one",
          {"_rewrite": _count_from_one}),
    Fault("share_scatters", "all rows go by the first row's index", _after("share_scatters", _shift_scatters)),
    Fault("share_bias", "all windows are masked as the first", _after("share_bias", _first_window_for_all)),
    Fault("take_kernels", "an attention that names its kernel is causal", _after("take_kernels", _hide_the_future)),
    Fault("mark_regions", "a product that is fused loses its bias", _after("mark_regions", _lose_biases)),
    Fault("recompute", "what is recomputed drops others", _after("recompute", _draw_anew)),
    Fault("cut_layers", "the product before a cut loses its bias", _after("cut_layers", _lose_biases_of_pieces)),
    Fault("offload", "two values change places on their way", _after("offload", _exchange_copies)),
    Fault("stream_state", "two states change places on their way", _after("stream_state", _exchange_copies)),
    Fault("update_early", "a weight of the first layer stays stale", _after("update_early", _leave_weights_stale)),
)  # fmt: skip
