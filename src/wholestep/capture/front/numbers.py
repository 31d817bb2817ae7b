"""Python numbers in Dynamo's graph: what is computed from them alone runs on the host, the rest gets them as inputs.

A Python number that was seen to change (an annealed weight, a counter, a learning rate that the loss reads) is an input of
Dynamo's graph, and so is arithmetic on it. In: that graph. Out: a `HostPart` that computes every number at each call, in
Python and so exactly, without waiting for a device; and the graph without that part, with one input for each number that a
tensor operator takes.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """One argument of Dynamo's graph."""

    kind: str
    """`tensor`; `size`, the size of a tensor; or `number`."""
    source: str
    """Where the value was read, as Dynamo writes it: `L['batch']['x']`."""
    in_module: bool = False
    """A parameter or buffer of some module."""
    size_of: tuple[int, str, int] | None = None
    """(argument, SIZE or STRIDE or STORAGE_OFFSET, dimension) of a size."""
    as_tensor: bool = False
    """A number that comes as a tensor of no dimensions (Dynamo does so with floats)."""
    of: str = ""
    """The kind of a tensor: its type, device and number of dimensions."""


@dataclasses.dataclass(slots=True)
class HostPart:
    """Numbers at work, once per call."""

    function: fx.GraphModule | None
    """From all arguments to (numbers for the graph, numbers that are results)."""
    integer: tuple[bool, ...]
    """Of each number for the graph: whether it is a whole one."""
    returned: tuple[int, ...]
    """Which results of the graph are numbers."""

    def __call__(self, args: Sequence[Any]) -> tuple[list[Any], dict[int, Any]]:
        if self.function is None:
            return [], {}
        numbers, results = self.function.forward(*args)  # where it raises, calling the module would print its code
        return numbers, dict(zip(self.returned, results, strict=True))


def write_powers(module: fx.GraphModule) -> None:
    """`(-1) ** n` as the call of a function: torch writes it as `-1 ** n` into the code of a graph, which is -1 for every n."""
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            powers = inner.graph.find_nodes(op="call_function", target=operator.pow)
            of_numbers = [node for node in powers if isinstance(node.args[0], int | float | complex)]
            for node in of_numbers:
                node.target = power
            if of_numbers:
                inner.recompile()


def power(base: Any, exponent: Any) -> Any:
    return base**exponent


def split_numbers(module: fx.GraphModule, arguments: Sequence[Argument]) -> HostPart:
    """Take the part that computes with numbers alone out of `module`; its new inputs follow the others."""
    graph = module.graph
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    host, wrapped = set(), set()
    for node, argument in zip(inputs, arguments, strict=True):
        if argument.kind == "number":
            host.add(node)
            if argument.as_tensor:
                wrapped.add(node)
    if not host:
        return HostPart(None, (), ())
    for node in graph.nodes:
        before = set(node.all_input_nodes)
        makes_tensor = isinstance(node.meta.get("example_value"), torch.Tensor)  # torch.tensor([1, number])
        if (
            node.op in ("call_function", "call_method")
            and before
            and before <= host
            and not makes_tensor
            and not _acts(node)
        ):
            if node.target == "item" or not before & wrapped:
                host.add(node)
    output = next(n for n in graph.nodes if n.op == "output")
    results = list(output.args[0])
    returned = tuple(i for i, result in enumerate(results) if isinstance(result, fx.Node) and result in host)
    crossing = [n for n in graph.nodes if n in host and any(u not in host and u is not output for u in n.users)]
    function = _host_function(module, host, crossing, [results[i] for i in returned])
    last = inputs[-1]
    for number, node in enumerate(crossing):
        with graph.inserting_after(last):
            last = graph.placeholder(f"number{number}")
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in host and user is not output)
    output.args = (tuple(None if i in returned else result for i, result in enumerate(results)),)
    for node in reversed([n for n in graph.nodes if n in host and n.op != "placeholder"]):
        graph.erase_node(node)
    return HostPart(function, tuple(_is_integer(node) for node in crossing), returned)


def _acts(node: fx.Node) -> bool:
    """Whether a call switches something for what follows it in the graph: `vmap` of chunks whose size varies enters a level."""
    return str(getattr(node.target, "__module__", "")).startswith(_SWITCHES)


_SWITCHES = ("torch._functorch", "torch._C", "torch.autograd", "torch.amp")
"""Modules whose functions do so."""


def _host_function(
    module: fx.GraphModule, host: set[fx.Node], crossing: list[fx.Node], results: list[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder" or node in host:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    for node in module.graph.find_nodes(op="call_function", target=OF_ONES_OWN):
        _copy_inner(module, node, copies, graph)
    graph.output(([copies[n] for n in crossing], [copies[n] for n in results]))
    return fx.GraphModule(module, graph)


OF_ONES_OWN = torch.ops.higher_order.autograd_function_apply
ON_HOST = "on the host too"
"""Marks arithmetic of inner graphs (`Node.meta`) that the host does as well: where Python raises, eager takes the step."""


def _copy_inner(module: fx.GraphModule, call: fx.Node, copies: dict[fx.Node, fx.Node], graph: fx.Graph) -> None:
    """Arithmetic on numbers in the two graphs of an autograd.Function: done on tensors there, and here for what it raises."""
    bodies = [getattr(module, str(arg.target)) for arg in call.args[:2] if isinstance(arg, fx.Node)]
    if len(bodies) != 2:
        return
    given: list[Any] = list(call.args[2:])
    for body in bodies:
        inputs = body.graph.find_nodes(op="placeholder")
        known = {a: copies[b] for a, b in zip(inputs[-len(given) :], given) if b in copies} if given else {}
        for node in body.graph.nodes:
            read = node.all_input_nodes
            number = isinstance(node.meta.get("example_value"), torch.SymFloat | torch.SymInt)
            if number and read and all(other in known for other in read):
                known[node] = graph.node_copy(node, known.__getitem__)
                node.meta[ON_HOST] = True
        results = next(iter(body.graph.find_nodes(op="output"))).args[0]
        saved = results[1] if len(results) == 2 and isinstance(results[1], tuple | list) else ()
        given = list(saved)
        copies.update(known)


def _is_integer(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point()
    return isinstance(value, int | torch.SymInt)
