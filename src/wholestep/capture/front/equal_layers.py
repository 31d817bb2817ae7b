"""Equal layers are traced once: where a layer fulfils every guard of one that was traced, its part of the graph is a copy.

In: a call of a layer (a module in a numbered place: `h.3`) that Dynamo meets while it captures for us. Out: what the call
returns. The first of a kind is traced as ever. Guards say what the trace has read; when the next layer is met, each guard of
the first is asked of the same place in the next (`h.0.attn.scale` -> `h.1.attn.scale`). If all hold, Dynamo would see the same
things again and write the same nodes: they are copied, with the next layer's parameters, and so are the guards.

A layer that does more than compute (it changes an object, it looks at who it is, it is given more than tensors and constants)
is traced. So is every layer of a graph with symbolic sizes.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.guards import _get_closure_vars, install_guard
from torch._dynamo.variables import (
    ConstantVariable,
    LazyVariableTracker,
    TensorVariable,
    TupleVariable,
    UnspecializedNNModuleVariable,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._guards import Guard, Source

from wholestep import compat
from wholestep.capture.front.assumed import assuming
from wholestep.capture.front.identities import looked
from wholestep.capture.front.layer_effects import effects_of, surroundings
from wholestep.capture.front.layer_guards import (
    Pairs,
    Unlike,
    constant,
    equal,
    is_under,
    kind_of,
    moved,
    of_class,
    places_of,
    readable,
    seen_by,
    sources_of,
    unwrapped,
)

_MOST_KINDS = 4
"""Layers of one class that are kept to copy from: local and global attention by turns are two."""
_NUMBERED = re.compile(r"_modules\['\d+'\]$")


@dataclasses.dataclass(slots=True)
class Known:
    """What is known in one capture."""

    layers: dict[type, list[Traced]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    guards: dict[tuple, Guard] = dataclasses.field(default_factory=dict)
    """Those of the capture so far, by place and kind."""
    counted: int = 0

    def update(self, guards: Sequence[Guard]) -> None:
        for guard in guards[self.counted :]:
            self.guards.setdefault(kind_of(guard), guard)
        self.counted = len(guards)


_here = threading.local()
"""`_here.known`: what is known in the capture that is at work, whose output graph is `_here.output`."""


def forget_layers() -> None:
    """The capture is over."""
    _here.output = _here.known = None


forget_layers()


def _known_of(tx: Any) -> Known:
    if getattr(_here, "output", None) is not tx.output:  # Dynamo begins anew at times
        _here.output, _here.known = tx.output, Known()
    return _here.known


@dataclasses.dataclass(slots=True)
class Call:
    """A call of a layer, as far as the trace of it depends on it."""

    module: nn.Module
    source: Source
    leaves: list[Any]
    """Tensors and constants that it is given, flat, with the structure."""
    around: tuple
    """What torch is set to, the modules around, and objects that were changed."""

    @property
    def tensors(self) -> list[TensorVariable]:
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorVariable)]


@dataclasses.dataclass(slots=True)
class Traced:
    """A layer that was traced."""

    call: Call
    facts: list[Any]
    """Of the tensors that it was given: their kind."""
    nodes: list[fx.Node]
    inputs: list[tuple[fx.Node, Source]]
    """Tensors of the layer itself, in the order of the graph."""
    result: Any
    calls: dict[str, int]
    guards: list[tuple[Guard, Any]] | None = None
    """With the values that they saw; found when the next layer comes."""
    places: list[tuple[Source, Any]] = dataclasses.field(default_factory=list)
    """All that the trace has looked at in the layer, with what was there; found with the guards."""


def _call(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's call of a module, and ours before it."""

    def call(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        def trace() -> Any:
            return plain(self, tx, args, kwargs)

        if not getattr(assuming, "on", False) or self.source is None or not _NUMBERED.search(self.source.name):
            return trace()
        if tx.output.current_tracer.parent is not None or compat.has_symbols(tx.output.shape_env):
            return trace()
        known = _known_of(tx)
        try:
            made = Call(self.value, unwrapped(self.source), list(_leaves([args, kwargs])), surroundings(tx))
        except Unlike:
            return trace()
        alike = known.layers[type(self.value)]
        for layer in reversed(alike):
            copy = Copy(tx, known, layer, made)
            if copy.is_like():
                return copy.write()
        return trace() if len(alike) >= _MOST_KINDS else _record(tx, known, made, trace)

    return call


# ---- tracing a layer that may be copied ----


def _record(tx: Any, known: Known, call: Call, trace: Callable[[], Any]) -> Any:
    graph = tx.output.graph
    last = next(iter(reversed(graph.nodes)), None)
    versions, facts = _versions(graph, call), [_fact(_example(t)) for t in call.tensors]
    effects, calls, looks = effects_of(tx), dict(tx.num_calls), looked.times
    result = trace()
    if effects != effects_of(tx) or looks != looked.times or _written(versions) or call.around != surroundings(tx):
        return result
    nodes = list(_after(graph, last))
    given = ((node, _source_of(node)) for node in graph.find_nodes(op="placeholder"))
    inputs = [(node, source) for node, source in given if source is not None and is_under(source, call.source)]
    made = {name: count for name, count in tx.num_calls.items() if calls.get(name) != count}
    layer = Traced(call, facts, nodes, inputs, result, made)
    if _can_be_copied(layer, tx):
        known.layers[type(call.module)].append(layer)
    return result


def _after(graph: fx.Graph, last: fx.Node | None) -> Iterator[fx.Node]:
    for node in reversed(graph.nodes):
        if node is last:
            break
        if node.op != "placeholder":
            yield node


def _can_be_copied(layer: Traced, tx: Any) -> bool:
    """Nothing but its own inputs, the graph's and its arguments goes in, and tensors come out that lie in memory as they will."""
    layer.nodes.reverse()
    own = set(layer.nodes)
    given = {_node(t) for t in layer.call.tensors}
    for node in layer.nodes:
        if any(
            n not in own and n not in given and n.op not in ("placeholder", "get_attr") for n in node.all_input_nodes
        ):
            return False
    if any(type(_example_of(node)) not in (torch.Tensor, nn.Parameter, compat.FakeTensor) for node, _ in layer.inputs):
        return False
    try:
        results = list(_leaves([layer.result]))
    except Unlike:
        return False
    tensors = [leaf for leaf in results if isinstance(leaf, TensorVariable)]
    if any(_node(t) not in own or _fact(_example(t)) != _fact(_like(_example(t), tx)) for t in tensors):
        return False
    return not any(isinstance(leaf, Source) for leaf in results)


def _leaves(value: Any) -> Iterator[Any]:
    """Tensors, constants and places of arguments or results, and how they are held together; Unlike for anything else."""
    if isinstance(value, LazyVariableTracker) and value.is_realized():
        value = value.realize()
    if isinstance(value, ConstantVariable):
        yield constant(value.value)
    elif isinstance(value, VariableTracker) and value.source is not None:  # what is read of it is guarded
        yield value.source
    elif type(value) is TensorVariable:
        yield value
    elif type(value) is TupleVariable:
        yield ("tuple", len(value.items))
        for item in value.items:
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        yield len(value)
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield tuple(value)
        for item in value.values():
            yield from _leaves(item)
    else:
        raise Unlike


def _versions(graph: fx.Graph, call: Call) -> dict[fx.Node, int]:
    """Of all that a layer could write into, but for what is its own."""
    given = (*graph.find_nodes(op="placeholder"), *map(_node, call.tensors))
    tensors = {node: _example_of(node) for node in given if not is_under(_source_of(node), call.source)}
    return {node: tensor._version for node, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}


def _written(versions: Mapping[fx.Node, int]) -> bool:
    return any(_example_of(node)._version != version for node, version in versions.items())


def _source_of(node: fx.Node) -> Source | None:
    return node.meta["grapharg"].source if node.op == "placeholder" else None


def _fact(tensor: torch.Tensor) -> tuple:
    """All that a trace may ask a tensor."""
    layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()) if tensor.layout is torch.strided else ()
    return (
        type(tensor), tensor.layout, *layout, tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf, tensor.is_conj(),
        tensor.is_neg(), sorted(vars(tensor)) if type(tensor) in (torch.Tensor, nn.Parameter) else (),
    )  # fmt: skip


def _like(tensor: torch.Tensor, tx: Any) -> torch.Tensor:
    with tx.fake_mode, torch.set_grad_enabled(tensor.requires_grad):
        return tensor.clone()


def _node(variable: TensorVariable) -> fx.Node:
    return variable.as_proxy().node


def _example(variable: TensorVariable) -> torch.Tensor:
    return _example_of(_node(variable))


def _example_of(node: fx.Node) -> Any:
    return node.meta["example_value"]


# ---- copying it ----


class Copy:
    """One attempt: nothing is done before everything has been looked at."""

    def __init__(self, tx: Any, known: Known, layer: Traced, call: Call) -> None:
        self.tx, self.known, self.layer, self.call = tx, known, layer, call
        self.scope = {**_get_closure_vars(), "L": tx.output.root_tx.f_locals, "G": tx.output.root_tx.f_globals}
        self.values: dict[Source, Any] = {}
        self.places: dict[Source, Source] = {layer.call.source: call.source}

    def is_like(self) -> bool:
        try:
            self._compare_arguments()
            self.modules = self._same_modules()
            self.guards = self._fulfilled_guards()
            self.inputs = [
                (place, self._value(place)) for place in (self._place(source) for _, source in self.layer.inputs)
            ]
            old = [self._value(source) for _, source in self.layer.inputs]
            return all(
                isinstance(b, torch.Tensor) and _fact(a) == _fact(b) for a, (_, b) in zip(old, self.inputs, strict=True)
            )
        except Exception:  # of the user's objects, which may do anything when they are asked
            return False

    def _compare_arguments(self) -> None:
        old, new = self.layer.call, self.call
        if old.around != new.around or len(old.leaves) != len(new.leaves):
            raise Unlike
        for a, b in zip(old.leaves, new.leaves, strict=True):
            if isinstance(a, TensorVariable) != isinstance(b, TensorVariable):
                raise Unlike
            if not isinstance(a, TensorVariable) and not equal(self._place(a), b):
                raise Unlike
        if [_fact(_example(t)) for t in new.tensors] != self.layer.facts:
            raise Unlike
        pairs = {(_node(a), _node(b)) for a, b in zip(old.tensors, new.tensors, strict=True)}
        if len({a for a, _ in pairs}) != len(pairs) or len({b for _, b in pairs}) != len(pairs):
            raise Unlike  # two arguments were one tensor, and are not now

    def _same_modules(self) -> dict[str, nn.Module]:
        """Module of the traced layer, by the id that Dynamo writes -> the one in its place here, which was not called yet."""
        old, new = self.layer.call.module, self.call.module
        pairs = list(zip(old.named_modules(), new.named_modules()))
        if len(pairs) != sum(1 for _ in old.modules()) or any(
            a != b or type(m) is not type(n) for (a, m), (b, n) in pairs
        ):
            raise Unlike
        if any(self._renamed(name) in self.tx.num_calls or count != 1 for name, count in self.layer.calls.items()):
            raise Unlike
        return {str(id(m)): n for (_, m), (_, n) in pairs}

    @functools.cached_property
    def _names(self) -> tuple[str, str]:
        return readable(self.layer.call.source.name), readable(self.call.source.name)

    def _renamed(self, name: str) -> str:
        old, new = self._names
        return new + name.removeprefix(old) if name == old or name.startswith(f"{old}.") else name

    def _value(self, source: Source) -> Any:
        try:
            return source.get_value(self.scope, {}, self.values)
        except Exception as error:  # there is no such attribute here
            raise Unlike from error

    def _place(self, source: Any) -> Any:
        """The same place in the new layer; the source itself where it is none of the layer's."""
        if not isinstance(source, Source):
            return source
        if source not in self.places:
            changed = {
                field.name: self._place(value)
                for field in dataclasses.fields(source)
                if field.init and isinstance(value := getattr(source, field.name), Source)
            }
            same = all(getattr(source, name) is value for name, value in changed.items())
            self.places[source] = source if same else dataclasses.replace(source, **changed)
        return self.places[source]

    def _fulfilled_guards(self) -> list[Guard]:
        """The layer's guards, for the new one; raises Unlike if one would not hold."""
        guards = list(self.tx.output.guards)
        self.known.update(guards)
        if self.layer.guards is None:
            own = self.layer.call.source
            mine = [guard for guard in guards if any(is_under(source, own) for source in sources_of(guard))]
            kinds = {guard.originating_source for guard in mine if guard.create_fn_name() == "TYPE_MATCH"}
            # of equal classes all is equal, which is guarded once
            mine = [g for g in mine if not any(of_class(source, kinds) for source in sources_of(g))]
            self.layer.guards = [(guard, seen_by(guard, self._value)) for guard in mine]
            read = [
                *(source for guard in mine for source in sources_of(guard)),
                *(source for _, source in self.layer.inputs),
            ]
            self.layer.places = [(place, self._value(place)) for place in places_of(read, own)]
        self._compare_objects()
        tensors = {source for _, source in self.layer.inputs}
        fresh: list[Guard] = []
        for guard, seen in self.layer.guards:
            there = moved(guard, self._place)
            if guard.create_fn_name() == "TENSOR_MATCH":  # comes with the tensor
                if guard.originating_source not in tensors:
                    raise Unlike
                continue
            if not equal(seen_by(there, self._value), seen):
                raise Unlike
            if kind_of(there) not in self.known.guards:
                fresh.append(there)
        return fresh

    def _compare_objects(self) -> None:
        """What is one object there is one here; what the trace knows from elsewhere is the same here."""
        pairs = Pairs()
        for source, old in self.layer.places:
            new = self._value(self._place(source))
            if pairs.add(old, new) and (self._is_elsewhere(old, self.layer.call) or self._is_elsewhere(new, self.call)):
                raise Unlike

    def _is_elsewhere(self, value: Any, call: Call) -> bool:
        known = self.tx.output.side_effects.id_to_variable.get(id(value))
        return known is not None and known.source is not None and not is_under(known.source, call.source)

    def write(self) -> Any:
        tx, layer, modules = self.tx, self.layer, self.modules
        copies = {_node(a): _node(b) for a, b in zip(layer.call.tensors, self.call.tensors, strict=True)}
        for (node, _), (source, tensor) in zip(layer.inputs, self.inputs, strict=True):
            copies[node] = VariableBuilder(tx, source)(tensor).as_proxy().node
            if "nn_module_stack" in node.meta:
                copies[node].meta["nn_module_stack"] = self._stack(node.meta["nn_module_stack"], modules)
        install_guard(*self.guards)
        tx.output.guard_on_key_order |= {self._place(source) for source in tx.output.guard_on_key_order}
        results = {_node(leaf) for leaf in _leaves([layer.result]) if isinstance(leaf, TensorVariable)}
        stacks: dict[int, Any] = {}
        for node in layer.nodes:
            copy = tx.output.graph.node_copy(node, lambda n: copies.get(n, n))
            stack = node.meta.get("nn_module_stack")
            if stack is not None:
                if id(stack) not in stacks:
                    stacks[id(stack)] = self._stack(stack, modules)
                copy.meta["nn_module_stack"] = stacks[id(stack)]
            if node in results:
                copy.meta["example_value"] = _like(_example_of(node), tx)
            copies[node] = copy
        tx.num_calls.update({self._renamed(name): count for name, count in layer.calls.items()})
        return self._result(layer.result, copies)

    def _stack(self, stack: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> dict[str, Any]:
        found = {}
        for key, (name, kind) in stack.items():
            head, at, call = key.partition("@")
            own = f"{id(modules[head])}{at}{call}" if head in modules else key
            found[own] = (self._renamed(name), kind)
        return found

    def _result(self, value: Any, copies: Mapping[fx.Node, fx.Node]) -> Any:
        if isinstance(value, LazyVariableTracker):
            value = value.realize()
        if isinstance(value, TensorVariable):
            return value.clone(proxy=self.tx.output.current_tracer.proxy(copies[_node(value)]))
        if isinstance(value, TupleVariable):
            return value.clone(items=[self._result(item, copies) for item in value.items])
        return value


UnspecializedNNModuleVariable.call_function = _call(UnspecializedNNModuleVariable.call_function)
