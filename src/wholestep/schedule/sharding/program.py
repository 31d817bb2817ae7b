"""The program of one rank, written call by call: a graph of the whole model in, the same graph over local parts out.

A rule (`rules/`) is given a call with the layouts of its arguments and writes what one rank does, by the means below. They keep what
layouts promise about gradients: a whole value that ranks use differently is `entered`, a part of a whole value is taken by `part`, a
sum that is due is made by `reduced`. Every call is run on tensors without data: shapes, types and whether a gradient flows are
compared with the model's, so that a rule that is wrong about them stops the capture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

import torch
from torch import fx

from wholestep.capture.front.replay import MATCHED, path_of, target_name, user_line
from wholestep.errors import BadOption, WholestepError
from wholestep.graph import mesh
from wholestep.schedule.operators import call_to
from wholestep.schedule.sharding.layout import WHOLE, Cut, Layout, Partial, parameter_cut
from wholestep.schedule.sharding.registry import rule_for
from wholestep.schedule.sharding.values import Called, Value, mapped, plain_shape, values_in

ws = torch.ops.ws
_CARRIED = ("nn_module_stack", "stack_trace", MATCHED, mesh.FORKED)


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One exchange between ranks that follows from a layout."""

    module: str
    name: str
    """all_reduce, all_gather, reduce_scatter, own_part or enter (which is an all_reduce in the backward pass)."""
    bytes: int
    """Of what one rank hands over."""
    reason: str
    readers: tuple[str, ...] = ()
    """Modules that read an `enter`."""

    def __str__(self) -> str:
        return f"{self.module or '(the model)'}: {self.name} of {self.bytes} bytes, {self.reason}"


class Recut(Exception):
    """The layout can be followed if parameters are cut otherwise: in these blocks, or (None) not at all."""

    def __init__(self, names: Iterable[str], blocks: tuple[int, ...] | None, why: WholestepError) -> None:
        self.names, self.blocks, self.why = frozenset(names), blocks, why
        super().__init__(str(why))


class Borders(Protocol):
    """What happens to values at the borders of modules."""

    def leaving(self, program: Program, node: fx.Node, result: Any) -> Any: ...

    def entering(self, program: Program, node: fx.Node, value: Any) -> Any: ...


class Program:
    """Writes a rank's graph."""

    def __init__(
        self, module: fx.GraphModule, axis: str, parts: int, cuts: Mapping[fx.Node, tuple[str, mesh.Cut]],
        kept: Mapping[fx.Node, str], paths: Mapping[int, str], borders: Borders,
    ) -> None:  # fmt: skip
        """`kept`: parameters that were asked to be cut and stay whole."""
        self.module, self.axis, self.parts, self.paths = module, axis, parts, paths
        self.cuts, self.kept, self.borders = cuts, kept, borders
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        self.at: fx.Node = next(iter(module.graph.nodes))
        self.collectives: dict[fx.Node, Collective] = {}
        self._made: dict[Any, Value] = {}
        """What was entered or cut of a value already, per mode of gradients."""
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
        called = Called(node.target, given, named, call.name, call.arguments, call.writes, shape)
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
            fitting = next(n for n in range(self.parts, 0, -1) if all(size % n == 0 for size in cut.sizes))
            inner = "" if cut.plain else f", {len(cut.blocks)} blocks of {' and '.join(map(str, cut.sizes))}"
            where = f"dimension {cut.dim} of {name}, of size {example.shape[cut.dim]}{inner}"
            hint = f"{fitting} ranks would do"
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
        """What a rule makes of a call. Without a cut or partial argument it stays as it is; without a rule, arguments have to be whole."""
        if call.target is operator.getitem and isinstance(call.args[0], tuple):
            return call.args[0][call.args[1]]  # of several results, each of which has a layout of its own
        if call.writes:
            self._made.clear()
        found = call.values
        if all(value.is_whole for value in found):
            return self._as_it_is(call, node)
        rule = rule_for(call.name)
        if rule is not None:
            return rule(self, call)
        for value in found:
            if value.cut is not None:
                self.refuse_cut(call.name, value)
        return self._as_it_is(self.with_values(call, self.reduced), None)

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

    # ---- what rules write with ----

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A call that a rule is composed of, by its own rule."""
        call = call_to(function, args, kwargs)
        return self._dispatched(Called(function, args, kwargs, call.name, call.arguments, call.writes, None), None)

    def emit(self, target: Any, *args: Any, layout: Layout, **kwargs: Any) -> Any:
        """Write one call; a string is the name of a method. Several results get the layout each."""
        make = self.graph.call_method if isinstance(target, str) else self.graph.call_function
        by = frozenset[str]().union(*(value.by for value in values_in((args, kwargs))))
        nodes = mapped((args, kwargs), lambda value: value.node)
        node: fx.Node = make(target, *nodes)
        node.meta = {key: self.at.meta[key] for key in _CARRIED if key in self.at.meta}
        examples = mapped((args, kwargs), lambda value: value.example)
        result = self._example(target, *examples)
        node.meta["example_value"] = result
        if isinstance(result, tuple | list):
            return tuple(self._item(node, index, one, layout, by) for index, one in enumerate(result))
        return self._local(node, layout, by)

    def _example(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [v for v in _tensors((args, kwargs)) if hasattr(v, "fake_mode")]
        mode = tensors[0].fake_mode if tensors else self.fake_mode
        try:
            with mode:
                return (
                    getattr(args[0], target)(*args[1:], **kwargs)
                    if isinstance(target, str)
                    else target(*args, **kwargs)
                )
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0][:160]
            self.refuse(f"one rank's part of it fails: {type(error).__name__}: {reason}", "please report this")

    @property
    def fake_mode(self) -> Any:
        examples = (node.meta.get("example_value") for node in self.module.graph.nodes)
        return next(value.fake_mode for value in examples if hasattr(value, "fake_mode"))

    def _item(self, node: fx.Node, index: int, example: Any, layout: Layout, by: frozenset[str]) -> Value:
        item = self.graph.call_function(operator.getitem, (node, index))
        item.meta = {**node.meta, "example_value": example}
        if isinstance(layout, Cut):
            node.meta[mesh.LAYOUT] = layout.fact(self.axis)
        return self._local(item, layout, by)

    def _local(self, node: fx.Node, layout: Layout, by: frozenset[str]) -> Value:
        example = node.meta["example_value"]
        shape = list(plain_shape(example)) if isinstance(example, torch.Tensor) else []
        node.meta.pop(mesh.LAYOUT, None)
        if isinstance(layout, Cut):
            shape[layout.dim] *= self.parts
            node.meta[mesh.LAYOUT] = layout.fact(self.axis)
        elif isinstance(layout, Partial):
            node.meta[mesh.LAYOUT] = [mesh.PARTIAL, self.axis]
        return Value(node, layout, tuple(shape), by)

    def again(self, call: Called, layout: Layout, change: Callable[[Value], Value] | None = None) -> Any:
        """The same call over other values."""
        call = call if change is None else self.with_values(call, change)
        return self.emit(call.target, *call.args, layout=layout, **call.kwargs)

    def with_values(self, call: Called, change: Callable[[Value], Any]) -> Called:
        args, kwargs, named = mapped((call.args, call.kwargs, call.arguments), _remembering(change))
        return dataclasses.replace(call, args=args, kwargs=kwargs, arguments=named)

    # ---- exchange between ranks ----

    def entered(self, value: Value) -> Value:
        """A whole value that ranks use differently: their gradients add up."""
        if not value.is_whole or not value.learns or not torch.is_grad_enabled():
            return value
        found = self._kept(
            ("enter", value), lambda: self._exchange("enter", ws.enter, value, WHOLE, "read by cut values")
        )
        known = self.collectives[found.node]
        readers = tuple(dict.fromkeys((*known.readers, self.path)))
        self.collectives[found.node] = dataclasses.replace(known, readers=readers)
        return found

    def reduced(self, value: Value) -> Value:
        """A partial value summed over ranks; any other as it is."""
        if not value.is_partial:
            return value
        return self._exchange("all_reduce", ws.all_reduce, value, WHOLE, "ranks have parts of the sum")

    def largest(self, value: Value) -> Value:
        """The largest of what ranks have; without a gradient."""
        return self._exchange("all_reduce", ws.all_reduce, value, WHOLE, "a maximum over ranks", op="max")

    def part(self, value: Value, cut: Cut) -> Value:
        """This rank's part of a whole value."""
        assert value.is_whole and value.shape[cut.dim] == cut.size, (value.shape, value.layout, cut)
        if not cut.divides(self.parts):
            self.refuse(
                f"blocks of {' and '.join(map(str, cut.sizes))} cannot be cut into {self.parts} equal parts", ""
            )
        return self._kept(("part", value, cut), lambda: self._parted(value, cut))

    def _parted(self, value: Value, cut: Cut) -> Value:
        take = lambda v, d, layout: self._exchange("own_part", ws.own_part, v, layout, "meets a cut value", d)  # noqa: E731
        if cut.plain:
            return take(value, cut.dim, cut)
        if len(cut.sizes) == 1:
            shape = value.shape
            split = self.emit(torch.unflatten, value, cut.dim, (cut.times, cut.sizes[0]), layout=WHOLE)
            own = take(split, cut.dim + 1, Cut(cut.dim + 1, cut.sizes))
            assert len(shape) == value.dim
            return self.emit(torch.flatten, own, cut.dim, cut.dim + 1, layout=cut)
        blocks = self.emit(torch.split, value, list(cut.blocks), cut.dim, layout=WHOLE)
        parts = [take(block, cut.dim, Cut(cut.dim, (block.shape[cut.dim],))) for block in blocks]
        return self.emit(torch.cat, parts, cut.dim, layout=cut)

    def gathered(self, value: Value, reason: str) -> Value:
        """A value whole on every rank, whatever it was."""
        cut = value.cut
        if cut is None:
            return self.reduced(value)
        take = lambda v, d: self._exchange("all_gather", ws.all_gather, v, WHOLE, reason, d)  # noqa: E731
        if cut.plain:
            return take(value, cut.dim)
        if len(cut.sizes) == 1:
            blocks = (cut.times, cut.sizes[0] // self.parts)
            inner = self.emit(torch.unflatten, value, cut.dim, blocks, layout=Cut(cut.dim + 1, cut.sizes))
            return self.emit(torch.flatten, take(inner, cut.dim + 1), cut.dim, cut.dim + 1, layout=WHOLE)
        sizes = [size // self.parts for size in cut.blocks]
        parts = self.emit(torch.split, value, sizes, cut.dim, layout=cut)
        return self.emit(torch.cat, [take(part, cut.dim) for part in parts], cut.dim, layout=WHOLE)

    def scattered(self, value: Value, dim: int) -> Value:
        """A partial value summed up, and cut."""
        cut = Cut(dim, (value.shape[dim],))
        reason = "ranks have parts of the sum, and go on with a part each"
        return self._exchange("reduce_scatter", ws.reduce_scatter, value, cut, reason, dim)

    def rank(self) -> Value:
        """This rank's place on the axis, a number of no dimensions."""
        device = next(
            v.device for n in self.module.graph.nodes if isinstance(v := n.meta.get("example_value"), torch.Tensor)
        )
        return self.emit(ws.axis_index, self.axis, self.parts, device, layout=WHOLE)

    def _kept(self, key: tuple[Any, ...], make: Callable[[], Value]) -> Value:
        key = (*key, torch.is_grad_enabled())
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _exchange(
        self, name: str, target: Any, value: Value, layout: Layout, reason: str, *dim: int, **how: str
    ) -> Value:
        found: Value = self.emit(target, value, *dim, self.axis, self.parts, layout=layout, **how)
        if not isinstance(layout, Cut):
            found.by = frozenset()
        stack = value.node.meta if value.is_partial else self.at.meta
        found.node.meta.update({key: stack[key] for key in _CARRIED if key in stack})
        size = value.example.numel() * value.example.element_size()
        self.collectives[found.node] = Collective(self._path_of(stack), name, size, reason)
        return found

    # ---- errors ----

    @property
    def path(self) -> str:
        """The module of the call at hand."""
        return self.path_of(self.at)

    def path_of(self, node: fx.Node) -> str:
        return self._path_of(node.meta)

    def _path_of(self, meta: Mapping[str, Any]) -> str:
        return path_of(meta.get("nn_module_stack") or {}, self.paths)

    def error(self, text: str, hint: str) -> WholestepError:
        name = target_name(self.at.target)
        where = user_line(self.at.meta.get("stack_trace") or "")
        return BadOption(f"{self.path or 'the model'}, {name}: {text}", where=where, hint=hint or None)

    def refuse(self, text: str, hint: str) -> NoReturn:
        raise self.error(text, hint)

    def refuse_cut(self, name: str, value: Value) -> NoReturn:
        """An operator that is not followed for this cut."""
        self.refuse(
            f"its input is {value.layout}, and {name} is not followed there{self.because(value)}",
            self.gather_hint(value),
        )

    def gather_hint(self, value: Value) -> str:
        cut = value.cut
        dim = "" if cut is None else f", axis={cut.dim - value.dim if cut.dim == value.dim - 1 else cut.dim}"
        return (
            f'leave that parameter whole, or make the value whole where it leaves its module: sync("all_gather"{dim})'
        )

    def because(self, value: Value) -> str:
        """Whose cut it is."""
        return f" ({', '.join(sorted(value.by)[:3])} is cut)" if value.by else ""

    def recut(self, value: Value, blocks: tuple[int, ...] | None, text: str, hint: str) -> NoReturn:
        """Begin again with the parameters behind a value cut in blocks, or whole; where that cannot be, it is an error."""
        why = self.error(text + self.because(value), hint)
        fits = blocks is None or all(size % self.parts == 0 for size in blocks)
        if fits and value.by:
            raise Recut(value.by, blocks, why)
        raise why


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _remembering(change: Callable[[Value], Any]) -> Callable[[Value], Any]:
    """Each value is changed once, however often it is an argument."""
    known: dict[int, Any] = {}

    def once(value: Value) -> Any:
        if id(value) not in known:
            known[id(value)] = change(value)
        return known[id(value)]

    return once


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
