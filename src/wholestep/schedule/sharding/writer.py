"""What rules write with: calls of the rank's program, exchanges between ranks, and errors that name their place in the model.

A rule (`rules/`) is given a call with the layouts of its arguments and writes what one rank does, by the means below. They keep
what layouts promise about gradients: a whole value that ranks use differently is `entered`, a part of a whole value is taken by
`part`, a sum that is due is made by `reduced`. Every call is run on tensors without data, so that shapes and types are known.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import fx

from wholestep.capture.front.replay import MATCHED, path_of, target_name, user_line
from wholestep.errors import BadOption, WholestepError
from wholestep.graph import mesh
from wholestep.schedule.sharding.layout import WHOLE, Cut, Layout, Partial
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
    """The layout can be followed if parameters are cut otherwise: in these blocks, in so many equal ones, or (None) not at all."""

    def __init__(self, names: Iterable[str], blocks: tuple[int, ...] | int | None, why: WholestepError) -> None:
        self.names, self.blocks, self.why = frozenset(names), blocks, why
        super().__init__(str(why))


class Writer:
    """A graph that grows call by call, at a node of the model."""

    def __init__(self, module: fx.GraphModule, axis: str, parts: int, paths: Mapping[int, str]) -> None:
        """`module`: the model's graph; `paths`: id of a module -> its path."""
        self.module, self.axis, self.parts, self.paths = module, axis, parts, paths
        self.graph = fx.Graph()
        self.at: fx.Node = next(iter(module.graph.nodes))
        self.collectives: dict[fx.Node, Collective] = {}
        self.made: dict[Any, Value] = {}
        """What was entered or cut of a value already, per mode of gradients."""

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
            if not isinstance(example.shape[layout.dim], int):
                self.refuse("a size that varies is cut", "compile for one size: dynamic=False")
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
        examples = (node.meta.get("example_value") for node in self.module.graph.nodes)
        device = next(value.device for value in examples if isinstance(value, torch.Tensor))
        return self._kept(("rank",), lambda: self.emit(ws.axis_index, self.axis, self.parts, device, layout=WHOLE))

    def _kept(self, key: tuple[Any, ...], make: Callable[[], Value]) -> Value:
        key = (*key, torch.is_grad_enabled())
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

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
        if value.node.op == "placeholder":
            return "leave that parameter whole"
        dim = "" if cut is None else f", axis={cut.dim - value.dim if cut.dim == value.dim - 1 else cut.dim}"
        return (
            f'leave that parameter whole, or make the value whole where it leaves its module: sync("all_gather"{dim})'
        )

    def because(self, value: Value) -> str:
        """Whose cut it is."""
        return f" ({', '.join(sorted(value.by)[:3])} is cut)" if value.by else ""

    def recut(self, value: Value, blocks: tuple[int, ...] | int | None, text: str, hint: str) -> NoReturn:
        """Begin again with the parameters behind a value cut in blocks, or whole; where that cannot be, it is an error."""
        why = self.error(text + self.because(value), hint)
        fits = not isinstance(blocks, tuple) or all(size % self.parts == 0 for size in blocks)
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
