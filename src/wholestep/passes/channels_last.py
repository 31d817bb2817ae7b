"""Convolutions run on channels-last memory, and what stands between two of them stays there.

In: a graph whose images, activations and weights are (batch, channels, height, width) in memory, as models are written. Out:
the same graph in which convolutions and their backward read and write (batch, height, width, channels), the order in which
tensor cores want them: cuDNN would otherwise transpose before and after every convolution.

The rewrite goes through the graph once, in order. The arguments of a convolution are copied to channels-last where they are not
so yet; the value of every other operator is computed again on fake tensors, and so has the layout that the operator will give
it (batch norm, activations, pooling, concatenation hand on the layout they are given). A cast that only convolutions read
writes the layout itself. Operators that are not known to follow a layout, gradients, results and all that the update reads have
the strides they were captured with. Where the copies would cost what they save, the graph stays as it was.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from wholestep.errors import BadOption
from wholestep.graph.check import where
from wholestep.graph.copies import copy_graph
from wholestep.graph.liveness import node_bytes, tensor_bytes
from wholestep.graph.strides import inverse, memory_order
from wholestep.graph.training_graph import TrainingGraph, tensors_in
from wholestep.graph.views import shares_memory
from wholestep.ops.flops import flops
from wholestep.ops.record import record_of
from wholestep.passes.asked_layouts import AS_WRITTEN, LAID_OUT, wanted_layouts
from wholestep.passes.fx_edit import has_static_sizes, is_static, same_sizes, tensor_of
from wholestep.passes.pipeline import compiler_pass

aten = torch.ops.aten

_FORMAT = torch.channels_last
_SLOTS: dict[Any, tuple[int, ...]] = {aten.convolution.default: (0, 1), aten.convolution_backward.default: (0, 1, 2)}
"""Convolution -> the arguments that are to be channels-last, the weight last."""

_SMALL_CHANNELS = 64
"""Up to here a convolution is too narrow for the layout to matter (the line that TorchInductor draws)."""
_LEAST_SHARE = 0.1
"""Of the step's arithmetic; a vision transformer's one convolution is less than 0.01."""
_MOST_COPIED = 0.5
"""Of the bytes that convolutions would transpose without this pass; a copy of our own costs as much as one of cuDNN's."""


_REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError)
"""What operators raise for strides they do not take."""


class GivenUp(Exception):
    """The rewrite cannot be finished: the graph stays as it was."""


@compiler_pass(numerics="rounding")
def channels_last(
    graph: TrainingGraph, *, force: bool = False, asked: Mapping[str, str] = MappingProxyType({})
) -> TrainingGraph:
    """convolution(x, w) => convolution(channels_last(x), channels_last(w)), and the same layout for all between two of them.

    Args:
        force: on every device and for every convolution over images, whether it pays or not.
        asked: a plan's `layout`; what it names is done, whether it pays or not.
    """
    found = [node for node in graph.operations() if _convolves_images(node)]
    wanted = wanted_layouts(found, asked)
    if not found or not has_static_sizes(graph):
        if LAID_OUT in wanted.values():
            raise BadOption("the plan's layout cannot be had: sizes vary", hint="use dynamic=False")
        return graph
    chosen = [
        node for node in found if wanted.get(node) != AS_WRITTEN and (force or (graph.target.is_gpu and _gains(node)))
    ]
    if not (force or _matters(graph, chosen)):
        chosen = []
    told = [node for node, layout in wanted.items() if layout == LAID_OUT]
    chosen = list(dict.fromkeys([*chosen, *told]))
    if not chosen:
        return graph
    try:
        rewrite = Relayout(copy_graph(graph), {node.name for node in chosen})
        rewrite.run()
    except GivenUp as error:
        if told:
            raise BadOption(
                f"the plan's layout cannot be had: {error}", hint="take the module out of [layout]"
            ) from error
        graph.notes.append(f"channels-last is not used: {error}")
        return graph
    if not (force or told) and rewrite.copied_bytes > _MOST_COPIED * rewrite.moved_bytes:
        graph.notes.append(
            f"channels-last is not used: it would take {len(rewrite.copies_of_activations)} copies of activations"
        )
        return graph
    if not rewrite.edits:  # the model is channels-last already
        return graph
    rewrite.graph.notes.append(rewrite.note())
    return rewrite.graph


# ---- where it pays ----


def _convolves_images(node: fx.Node) -> bool:
    if node.target not in _SLOTS:
        return False
    values = [tensor_of(node.args[slot]) for slot in _SLOTS[node.target]]
    return all(value is not None and value.dim() == 4 and is_static(value) for value in values)


def _gains(node: fx.Node) -> bool:
    """Whether cuDNN has a faster kernel for it in channels-last: on tensor cores, and not for groups of several channels."""
    image, weight = (tensor_of(node.args[slot]) for slot in _SLOTS[node.target][-2:])
    assert image is not None and weight is not None
    narrow = image.dtype in (torch.bfloat16, torch.float16)
    if not narrow and not (image.dtype is torch.float32 and torch.backends.cudnn.allow_tf32):
        return False
    groups = node.args[8] if node.target is aten.convolution.default else node.args[9]
    return groups in (1, image.shape[1])


def _matters(graph: TrainingGraph, chosen: list[fx.Node]) -> bool:
    """Whether the convolutions are wide, and a good part of the step; group norm's kernels on a GPU want the other layout."""
    if any(_name(node) == "aten::native_group_norm" for node in graph.operations()):
        return False
    weights = [tensor_of(node.args[_SLOTS[node.target][-1]]) for node in chosen]
    if all(max(weight.shape[:2]) <= _SMALL_CHANNELS for weight in weights if weight is not None):
        return False
    ours = sum(float(flops(node).count) for node in chosen)
    return ours >= _LEAST_SHARE * sum(float(flops(node).count) for node in graph.operations())


# ---- the rewrite ----


class Relayout:
    """Values that lie in memory otherwise than they were captured are handed on, on a graph of its own."""

    def __init__(self, graph: TrainingGraph, names: set[str], *, plain_follows: bool = False) -> None:
        """`names`: the convolutions to turn; `plain_follows`: whoever now reads contiguous memory does so as it is."""
        self.graph, self.plain_follows = graph, plain_follows
        self.turned = {node for node in graph.operations() if node.name in names}
        self.captured = {node: node.meta.get("val") for node in graph.graph.nodes}
        self.casts = {node for node in graph.operations() if self._is_read_by_convolutions_alone(node)}
        self.gradients = set(graph.gradients.values())
        self.turned_copies: dict[fx.Node, fx.Node] = {}
        self.restored: dict[fx.Node, fx.Node] = {}
        self.copies_of_activations: list[fx.Node] = []
        self.copies_of_weights: list[fx.Node] = []
        """Of weights and of their gradients."""
        self.edits = 0

    def run(self) -> None:
        for node in list(self.graph.operations()):
            self._rewrite(node)
            if node.name in self.gradients:
                self._restore_gradient(node)
        output = self.graph.output_node
        values = tuple(self._as_captured(value, output) for value in self.graph.output_values)
        output.args = (values,)
        self.graph.module.recompile()

    @property
    def copied_bytes(self) -> int:
        return sum(node_bytes(node) for node in self.copies_of_activations)

    @property
    def moved_bytes(self) -> int:
        """What the turned convolutions read and write, weights left out."""
        total = 0
        for node in self.turned:
            activations = [node.args[slot] for slot in _SLOTS[node.target][:-1]]
            made = tensors_in(node.meta["val"])[:1]
            total += sum(node_bytes(value) for value in activations) + sum(
                tensor_bytes(t) for t in made if t.dim() == 4
            )
        return total

    def note(self) -> str:
        forward = sum(node.target is aten.convolution.default for node in self.turned)
        activations, weights = len(self.copies_of_activations), len(self.copies_of_weights)
        turned = f"{forward} convolutions channels-last"
        return f"{turned}, {activations} layout copies of activations, {weights} of weights and gradients"

    # ---- one node ----

    def _rewrite(self, node: fx.Node) -> None:
        if node in self.turned:
            self._turn_arguments(node)
        elif self._reads_other_layout(node):
            if not _follows(node) and not (self.plain_follows and self._reads_plain(node)):
                self._read_as_captured(node)
                return
            if record_of(node).layout == "two" and any(map(_is_turned, node.all_input_nodes)):
                self._turn_images(node)
            elif record_of(node).layout == "two":
                self._read_as_captured(node)
            elif node.target is aten.cat.default:
                self._settle_channels(node)
        if self._reads_other_layout(node):
            self._propagate(node)
            if _is_elementwise(node) and self._lost_layout(node):
                self._turn_images(node)
                self._propagate(node)
        if node in self.casts and not _is_turned(node):
            self._write_as(node, _FORMAT)

    def _turn_arguments(self, node: fx.Node) -> None:
        """A convolution's images and weight to channels-last, so that its kernel cannot take them for anything else.

        Strides of dimensions of size one are free, and at run time not always those announced. Where the image leaves the
        layout open, the weight is copied to say it; where that cannot either (one channel, one pixel), a copy of the image.
        """
        image, weight = _SLOTS[node.target][-2:]
        for slot in _SLOTS[node.target]:
            tensor = tensor_of(node.args[slot])
            if tensor is not None and not tensor.is_contiguous(memory_format=_FORMAT):
                node.update_arg(slot, self._turned(node.args[slot], node, of_weight=slot == weight))
        if _is_turned(node.args[image]) or self._says_layout(node.args[weight]):
            return
        speaks = _can_say_layout(tensor_of(node.args[weight]))
        slot = weight if speaks else image
        if _can_say_layout(tensor_of(node.args[slot])):
            node.update_arg(slot, self._turned(node.args[slot], node, of_weight=speaks))

    def _says_layout(self, value: Any) -> bool:
        """Whether its strides are those of channels-last to the last, because a copy or a cast was told to write them."""
        return value.kwargs.get("memory_format") is _FORMAT and _can_say_layout(tensor_of(value))

    def _turn_images(self, node: fx.Node) -> None:
        """All images that a node reads to channels-last."""
        for value in node.all_input_nodes:
            tensor = tensor_of(value)
            if tensor is not None and tensor.dim() == 4 and not tensor.is_contiguous(memory_format=_FORMAT):
                node.replace_input_with(value, self._turned(value, node))

    def _settle_channels(self, node: fx.Node) -> None:
        """A concatenation asks its arguments for their layout: those of one channel are copied to say theirs."""
        for value in node.all_input_nodes if _has_layout(self.captured[node]) else ():
            if not _has_layout(tensor_of(value)) and _can_say_layout(tensor_of(value)) and not self._says_layout(value):
                node.replace_input_with(value, self._turned(value, node))

    def _read_as_captured(self, node: fx.Node) -> None:
        asks = _name(node).startswith("aten::")  # may ask for the strides of dimensions of size one too
        for value in node.all_input_nodes:
            restored = self._as_captured(value, node, exactly=asks)
            if restored is not value:
                node.replace_input_with(value, restored)

    def _propagate(self, node: fx.Node) -> None:
        """Compute the value of a node anew; one that cannot take the layout of its arguments gets them as captured."""
        if node.target is operator.getitem:
            node.meta["val"] = node.args[0].meta["val"][node.args[1]]  # type: ignore[union-attr,index]
            return
        try:
            value = _computed(node)
        except _REFUSALS:
            self._read_as_captured(node)
            try:
                value = _computed(node)
            except _REFUSALS as error:
                raise GivenUp(f"{where(node)} refuses it") from error
        node.meta["val"] = _unless_equal(value, self.captured.get(node))

    def _reads_other_layout(self, node: fx.Node) -> bool:
        """Whether an argument is another value than it was captured as."""
        return any(source.meta.get("val") is not self.captured.get(source, self) for source in node.all_input_nodes)

    def _reads_plain(self, node: fx.Node) -> bool:
        """Whether all arguments that changed are contiguous, and it is no operator that looks at memory itself."""
        if _looks_at_memory(node) or node.target in _SLOTS:
            return False
        changed = [s for s in node.all_input_nodes if s.meta.get("val") is not self.captured.get(s, self)]
        return all((value := tensor_of(source)) is not None and value.is_contiguous() for source in changed)

    def _lost_layout(self, node: fx.Node) -> bool:
        """Whether one argument is channels-last and the result is not."""
        value = tensor_of(node)
        if value is None or not _has_layout(value) or value.is_contiguous(memory_format=_FORMAT):
            return False
        return any(map(_is_turned, node.all_input_nodes))

    def _is_read_by_convolutions_alone(self, node: fx.Node) -> bool:
        """Whether it is a cast that can as well write another layout."""
        if node.target is not aten._to_copy.default or node.kwargs.get("memory_format") is not None or not node.users:
            return False
        return all(user in self.turned and _places(user, node) <= set(_SLOTS[user.target]) for user in node.users)

    # ---- copies ----

    def _turned(self, value: Any, user: fx.Node, *, of_weight: bool = False) -> fx.Node:
        """The value in channels-last: itself, where it is a copy made for this reader."""
        if _is_copy_for(value, user):
            self._write_as(value, _FORMAT)
            return value
        if value not in self.turned_copies:
            made = self._insert(user, aten.clone.default, (value,), {"memory_format": _FORMAT}, user)
            (self.copies_of_weights if of_weight else self.copies_of_activations).append(made)
            self.turned_copies[value] = made
        return self.turned_copies[value]

    def _as_captured(self, value: Any, user: fx.Node, *, exactly: bool = False) -> Any:
        """The value with the strides it was captured with."""
        before, now = self.captured.get(value) if isinstance(value, fx.Node) else None, tensor_of(value)
        if now is None or not isinstance(before, torch.Tensor) or before.stride() == now.stride():
            return value
        if _strides(before) == _strides(now) and not (exactly and before.is_contiguous()):
            return value
        if before.is_contiguous() and _is_copy_for(value, user):
            self._write_as(value, torch.contiguous_format)
            return value
        if value not in self.restored:
            like = value if user.op == "output" else user
            made = self.restored[value] = self._copy_like(value, before, user, like)
            (self.copies_of_weights if value.name in self.gradients else self.copies_of_activations).append(made)
        return self.restored[value]

    def _write_as(self, node: fx.Node, layout: torch.memory_format) -> None:
        """A cast or clone writes that layout."""
        node.kwargs = {**node.kwargs, "memory_format": layout}
        node.meta["val"] = _unless_equal(_computed(node), self.captured.get(node))
        self.edits += 1

    def _copy_like(self, value: fx.Node, before: torch.Tensor, user: fx.Node, like: fx.Node) -> fx.Node:
        """A copy whose dimensions lie in memory in the order of `before`."""
        order = memory_order(before)
        dense = {"memory_format": torch.contiguous_format}
        if before.is_contiguous():
            made = self._insert(user, aten.clone.default, (value,), dense, like)
        else:
            moved = self._insert(user, aten.permute.default, (value, order), {}, like)
            copy = self._insert(user, aten.clone.default, (moved,), dense, like)
            made = self._insert(user, aten.permute.default, (copy, inverse(order)), {}, like)
        if _strides(tensor_of(made)) != _strides(before):
            raise GivenUp(f"{value.name} has strides {tuple(before.stride())} for shape {tuple(before.shape)}")
        self.captured[made] = made.meta["val"]
        return made

    def _restore_gradient(self, node: fx.Node) -> None:
        """Whoever reads a gradient reads it as captured; a cast writes it so."""
        before, now = self.captured.get(node), tensor_of(node)
        if now is None or not isinstance(before, torch.Tensor) or _strides(before) == _strides(now):
            return
        if node.target is aten._to_copy.default and before.is_contiguous():
            self._write_as(node, torch.contiguous_format)
            return
        users = list(node.users)
        made = self._as_captured(node, node.next)
        made.meta["custom"] = dict(node.meta.get("custom") or {})
        for user in users:
            user.replace_input_with(node, made)
        table = self.graph.gradients
        table.update({name: made.name for name, held in table.items() if held == node.name})

    def _insert(
        self, before: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node
    ) -> fx.Node:
        """A node with the phase, module and source of `like`."""
        with self.graph.graph.inserting_before(before):
            node = self.graph.graph.call_function(target, args, kwargs)
        node.meta["custom"] = dict(like.meta.get("custom") or {"phase": "forward"})
        node.meta["val"] = _computed(node)
        self.edits += 1
        return node


# ---- operators and tensors ----


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else schema.name


def _is_elementwise(node: fx.Node) -> bool:
    return record_of(node).layout == "elements" or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _follows(node: fx.Node) -> bool:
    """Whether the node may read a layout it was not captured with. Random numbers are drawn in the order of memory."""
    if node.target is operator.getitem:
        return True
    if _looks_at_memory(node) or node.target in _SLOTS:  # a convolution that was not chosen
        return False
    return shares_memory(node.target) or _is_elementwise(node) or record_of(node).layout in ("two", "any")


def _looks_at_memory(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags:
        return True
    return record_of(node).layout == "memory"


def _computed(node: fx.Node) -> Any:
    fakes = [tensor for source in node.all_input_nodes for tensor in tensors_in(source.meta.get("val"))]
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda a: a.meta["val"])
    function: Callable[..., Any] = node.target  # type: ignore[assignment]
    with fakes[0].fake_mode:  # type: ignore[attr-defined]
        return function(*args, **kwargs)


def _unless_equal(value: Any, before: Any) -> Any:
    """What was captured, where the new value lies in memory as it did: whoever reads it has nothing to do then."""
    if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor):
        if same_sizes(value.stride(), before.stride()):
            return before
        # The dtype is what was captured: a capture for another device than this one knows it better.
        return value if value.dtype == before.dtype else value.to(before.dtype)
    if isinstance(value, list | tuple) and isinstance(before, list | tuple):
        return type(value)(_unless_equal(new, old) for new, old in zip(value, before, strict=True))
    return value


def _is_copy_for(value: fx.Node, user: fx.Node) -> bool:
    """Whether it is a cast or clone that nobody else reads: it can as well be written in another layout."""
    return value.target in (aten._to_copy.default, aten.clone.default) and set(value.users) == {user}


def _places(user: fx.Node, value: fx.Node) -> set[int]:
    return {place for place, argument in enumerate(user.args) if argument is value}


def _strides(tensor: torch.Tensor | None) -> list[int] | None:
    """Strides of the dimensions with more than one entry; the others decide nothing."""
    return None if tensor is None else [s for size, s in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _has_layout(tensor: torch.Tensor | None) -> bool:
    """Whether it has several channels and several pixels: otherwise both layouts are the same memory."""
    return tensor is not None and tensor.dim() == 4 and tensor.shape[1] > 1 and tensor.shape[2] * tensor.shape[3] > 1


def _is_turned(node: fx.Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and _has_layout(tensor) and tensor.is_contiguous(memory_format=_FORMAT)


def _can_say_layout(tensor: torch.Tensor | None) -> bool:
    """Whether the strides of channels-last are other ones: not for one channel with one pixel."""
    return tensor is not None and tensor.dim() == 4 and tensor.shape[1] * tensor.shape[2] * tensor.shape[3] > 1
