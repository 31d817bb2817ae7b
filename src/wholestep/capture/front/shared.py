"""Memory that Dynamo's graph shares with its caller: results that are views of arguments, and tensors given other memory.

A captured step works on values. In eager PyTorch `self.anchor = self.weight.detach()` shows every later weight, so such a result
is made from the live argument, after the step. `weight.data = x` gives a tensor other memory, which no graph of values can.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from wholestep.capture.front.replay import user_line
from wholestep.errors import CaptureRefused

View = Callable[[Sequence[Any]], torch.Tensor]
"""From the arguments of a call to a result of it."""


def live_views(module: fx.GraphModule) -> dict[int, View]:
    """Result -> how to make it, for every one that shares memory with an argument."""
    output = next(n for n in module.graph.nodes if n.op == "output")
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    memory = {_memory(n): n for n in inputs if _memory(n) is not None}
    found: dict[int, View] = {}
    for i, result in enumerate(output.args[0]):
        if isinstance(result, fx.Node) and _memory(result) in memory:
            found[i] = _view(inputs, result)
    return found


def _memory(node: fx.Node) -> int | None:
    """A name for the memory in which a value lies."""
    value = node.meta.get("example_value")
    if isinstance(value, list | tuple) and value:
        value = value[0]
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()._cdata


def _view(inputs: list[fx.Node], result: fx.Node) -> View:
    graph = fx.Graph()
    copies = {n: graph.placeholder(n.name) for n in inputs}
    memory = _memory(result)

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            written = _written(node)
            if written is not None:  # which it returns
                copies[node] = copied(written)
            elif _memory(node) in (memory, None) and node.op in ("call_function", "call_method"):  # a view, or a number
                for before in node.all_input_nodes:
                    copied(before)
                copies[node] = graph.node_copy(node, copies.__getitem__)
            else:
                where = user_line(result.meta.get("stack_trace") or "")
                raise CaptureRefused(
                    "a view of a tensor that data decides is kept or returned; clone it", where=where, compiled=False
                )
        return copies[node]

    found = copied(result)
    if found.op == "placeholder":  # `weight += x`: the very tensor that was written to
        place = next(i for i, node in enumerate(inputs) if copies[node] is found)
        return lambda args: args[place]
    graph.output(found)
    function = fx.GraphModule(torch.nn.Module(), graph)

    def view(args: Sequence[Any]) -> torch.Tensor:
        with torch.no_grad():
            return function(*args[: len(inputs)]).detach()

    return view


_IN_PLACE = {
    getattr(operator, f"i{name}")
    for name in (
        "add",
        "sub",
        "mul",
        "matmul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
    )
}


def _written(node: fx.Node) -> fx.Node | None:
    """What a node writes into and returns: the first argument of `add_` and `operator.iadd`, or `out=`."""
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return out
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    in_place |= node.target in _IN_PLACE
    first = node.args[0] if node.args else None
    return first if in_place and isinstance(first, fx.Node) else None


def copy_in_place_of_set(module: fx.GraphModule) -> None:
    """`weight.data = x` as a copy into the weight, where nothing can tell the two apart; refused elsewhere.

    Views from before (`old = weight.data`) stay what they are: they become views of a copy. What autograd kept of the tensor
    itself would have its new memory in the backward.
    """
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    inputs = [node for node in order if node.op == "placeholder"]
    latest: dict[fx.Node, fx.Node] = {}
    for node in order:
        if node.target not in (torch.Tensor.set_, "set_"):
            continue
        owner, value = node.args[0], node.args[1] if len(node.args) == 2 else None
        kinds = [n.meta.get("example_value") for n in (owner, value) if isinstance(n, fx.Node)]
        alike = (
            owner in inputs and len(kinds) == 2 and len({(k.shape, k.stride(), k.dtype, k.device) for k in kinds}) == 1
        )
        since = latest.get(owner, inputs[-1]) if alike else owner
        before = [user for user in owner.users if order[since] < order.get(user, -1) < order[node]]
        learns = any(not _is_data(user) and _is_kept(user) for user in before)
        tied = [n for n in inputs if n is not owner and _memory(n) == _memory(owner)]
        if not alike or learns or tied:
            where = user_line(node.meta.get("stack_trace") or "")
            told = (
                "a tensor is given other memory inside of the loss (.data = ...); write into it under torch.no_grad()"
            )
            raise CaptureRefused(told, where=where)
        if before:
            with module.graph.inserting_after(since):
                data = module.graph.call_method("detach", (owner,))
            with module.graph.inserting_after(data):
                old = module.graph.call_method("clone", (data,))
            data.meta["example_value"] = kinds[0].detach()
            old.meta["example_value"] = kinds[0].detach().clone()
            for user in before:
                user.replace_input_with(owner, old)
            _part_memory(old, _memory(owner))
        node.op, node.target, latest[owner] = "call_method", "copy_", node


def _part_memory(node: fx.Node, memory: int | None) -> None:
    """Views of a tensor are views of its copy now: for `live_views` they have other memory."""
    for user in node.users:
        if _memory(user) == memory and isinstance(user.meta["example_value"], torch.Tensor):
            user.meta["example_value"] = user.meta["example_value"].clone()
            _part_memory(user, memory)


def _is_data(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", node.target) in ("_get_data_attr", "detach")


def _is_kept(node: fx.Node) -> bool:
    """Whether autograd may have kept what a node reads, or there is no telling."""
    value = node.meta.get("example_value")
    return not isinstance(value, torch.Tensor) or value.requires_grad


def bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor and the one after its last."""
    first = tensor.data_ptr()
    if tensor.numel() == 0:
        return first, first
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    return first, first + (last + 1) * tensor.element_size()


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]
