"""The program of one rank, call by call: a graph of the whole model in, the same graph over local parts out.

A call whose arguments are whole stays as it is; any other goes to its rule. Shapes, types and whether a gradient flows are compared
with the model's, so that a rule that is wrong about them stops the capture.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from wholestep.errors import BadOption, WholestepError
from wholestep.graph import mesh
from wholestep.schedule.operators import call_to
from wholestep.schedule.sharding.layout import WHOLE, parameter_cut
from wholestep.schedule.sharding.registry import Rule, rule_for
from wholestep.schedule.sharding.values import Called, Value, mapped, plain_shape
from wholestep.schedule.sharding.writer import Recut, Writer


class Borders(Protocol):
    """What happens to values at the borders of modules."""

    def leaving(self, program: Program, node: fx.Node, result: Any) -> Any: ...

    def entering(self, program: Program, node: fx.Node, value: Any) -> Any: ...

    def summed(self, program: Program, value: Value) -> Value: ...


class Program(Writer):
    """Writes a rank's graph."""

    def __init__(
        self, module: fx.GraphModule, axis: str, parts: int, cuts: Mapping[fx.Node, tuple[str, mesh.Cut]],
        kept: Mapping[fx.Node, str], paths: Mapping[int, str], borders: Borders,
    ) -> None:  # fmt: skip
        """`kept`: parameters that were asked to be cut and stay whole."""
        super().__init__(module, axis, parts, paths)
        self.cuts, self.kept, self.borders = cuts, kept, borders
        self.env: dict[fx.Node, Any] = {}
        self._states: dict[fx.Node, Any] = {}
        """What calls that switch gradients or autocast on and off returned."""

    def write(self) -> fx.Graph:
        """The whole graph."""
        with _modes_restored():
            for node in self.module.graph.nodes:
                self.at = node
                self.env[node] = self._written(node)
        return self.graph

    # ---- nodes of the model ----

    def _written(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._input(node)
        if node.op == "output":
            found = mapped(self._given(node.args), lambda value: self.gathered(value, "what the loss returns is whole"))
            copy = self.graph.node_copy(node, lambda old: old)
            copy.args = mapped(found, lambda value: value.node)
            return None
        if node.op not in ("call_function", "call_method"):
            return self._copied(node)
        given, named = self._given(node.args), self._given(node.kwargs)
        call = call_to(node.target, given, named)
        example = node.meta.get("example_value")
        shape = plain_shape(example) if isinstance(example, torch.Tensor) else None
        if call.sets_state and callable(node.target):
            args = fx.map_arg((node.args, dict(node.kwargs)), lambda old: self._states.get(old, old))
            self._states[node] = node.target(*args[0], **args[1])
        varies = shape is not None and any(not isinstance(size, int) for size in example.shape)
        called = Called(node.target, given, named, call.name, call.arguments, call.writes, shape, varies)
        result = self._dispatched(called, node)
        self._check(result, example, any(value.learns for value in called.values) and torch.is_grad_enabled())
        return self._once(self.borders.leaving(self, node, result), node)

    def _given(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, lambda old: self.borders.entering(self, old, self.env[old]))

    def _input(self, node: fx.Node) -> Any:
        copy, given = self.graph.node_copy(node), self.cuts.get(node)
        if given is None:
            return self._value(copy, frozenset((self.kept[node],) if node in self.kept else ()))
        name, how = given
        example = node.meta["example_value"]
        cut = parameter_cut(how, example.shape)
        if not cut.divides(self.parts):
            inner = "" if cut.plain else f", {len(cut.blocks)} blocks of {' and '.join(map(str, cut.sizes))}"
            where = f"dimension {cut.dim} of {name}, of size {example.shape[cut.dim]}{inner}"
            hint = mesh.fitting_parts(cut.sizes, self.parts)
            raise BadOption(f"{where}, cannot be cut into {self.parts} equal parts", hint=hint)
        shape = list(example.shape)
        shape[cut.dim] //= self.parts
        with example.fake_mode, torch.enable_grad():
            local = torch.empty(shape, dtype=example.dtype, device=example.device)
            copy.meta["example_value"] = local.requires_grad_(example.requires_grad)
        return Value(copy, cut, plain_shape(example), frozenset((name,)))

    def _copied(self, node: fx.Node) -> Value:
        """The call as it is: all that it reads is whole."""
        return self._value(self.graph.node_copy(node, lambda old: self._whole_node(self.env[old])))

    def _whole_node(self, value: Any) -> Any:
        return mapped(value, lambda one: one.node)

    def _value(self, node: fx.Node, kept: frozenset[str] = frozenset()) -> Value:
        example = node.meta.get("example_value")
        shape = plain_shape(example) if isinstance(example, torch.Tensor) else ()
        return Value(node, WHOLE, shape, kept=kept)

    def _dispatched(self, call: Called, node: fx.Node | None) -> Any:
        """What a rule makes of a call; without a rule, arguments have to be whole."""
        if call.target is operator.getitem and isinstance(call.args[0], tuple):
            return call.args[0][call.args[1]]  # of several results, each of which has a layout of its own
        if call.writes:
            self.made.clear()
        found = call.values
        if all(value.is_whole for value in found):
            return self._as_it_is(call, node)
        rule = rule_for(call.name)
        if rule is not None:
            return self._ruled(rule, call)
        for value in found:
            if value.cut is not None:
                self.refuse_cut(call.name, value)
        return self._as_it_is(self.with_values(call, self.reduced), None)

    def _ruled(self, rule: Rule, call: Called) -> Any:
        try:
            return rule(self, call)
        except (WholestepError, Recut):
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0][:160]
            self.refuse(f"it cannot be followed: {type(error).__name__}: {reason}", "please report this")

    def _as_it_is(self, call: Called, node: fx.Node | None) -> Any:
        if node is not None:
            found = self._copied(node)
            found.kept = frozenset[str]().union(*(value.kept for value in call.values))
            return found
        return self.emit(call.target, *call.args, layout=WHOLE, **call.kwargs)

    def _once(self, result: Any, node: fx.Node) -> Any:
        """A partial value that several calls read is summed up at once, so that it is once."""
        if isinstance(result, Value) and result.is_partial and len(node.users) != 1:
            return self.reduced(result)
        return result

    def _check(self, result: Any, example: Any, learns: bool) -> None:
        """Compare with what the model has there; `learns`: whether a gradient comes in."""
        if not isinstance(result, Value) or not isinstance(example, torch.Tensor):
            return
        shape, local = plain_shape(example), plain_shape(result.example)
        cut, wanted = result.cut, list(shape)
        if cut is not None:
            wanted[cut.dim] = cut.size // self.parts
        lost = learns and example.requires_grad and not result.learns
        same = result.shape == shape and local == tuple(wanted) and result.example.dtype == example.dtype
        if cut is not None and cut.size != shape[cut.dim]:
            same = False
        if not same or lost:
            what = "a gradient is lost" if lost else f"{local} {result.example.dtype} for {shape} {example.dtype}"
            self.refuse(f"its part of a rank is not what it should be: {what}", "please report this")

    def inlined(self, body: fx.GraphModule, values: Sequence[Any]) -> Any:
        """The calls of a graph inside of this one, written here; what it returns."""
        here, given = self.at, iter(values)
        for node in body.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = next(given)
            elif node.op == "output":
                break
            elif node.op == "get_attr":
                self.refuse("a graph inside of the loss has tensors of its own", "pass them as arguments")
            else:
                self.at = node
                self.env[node] = self._written(node)
        self.at = here
        return fx.map_arg(node.args[0], self.env.__getitem__)

    def summed(self, value: Value) -> Value:
        """A partial value summed up, in the way in which it leaves its module."""
        return self.reduced(self.borders.summed(self, value))

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A call that a rule is composed of, by its own rule."""
        call = call_to(function, args, kwargs)
        return self._dispatched(Called(function, args, kwargs, call.name, call.arguments, call.writes, None), None)


@contextlib.contextmanager
def _modes_restored() -> Iterator[None]:
    """The graph switches gradients and autocast on and off while it is followed."""
    grad = torch.is_grad_enabled()
    devices = ("cpu", "cuda")
    autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.set_grad_enabled(grad)
        for device, enabled, dtype in autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
