"""A run of equal layers of which four were traced is written out: copies of the third one's nodes, forward and backward.

In: the record of a step in which values of a run's third layer stood for those of the layers between it and the last
(`repeats.py`), and which has no parameters of those (`absent.py`). Out: the record that tracing all of them would have given,
node by node, name by name. What makes that certain is looked at: the second and the third layer were traced, and their nodes
must be equal but for what belongs to each (parameters, keys, the value that comes in and the gradient that does); anything
else, and the step is traced in full.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from wholestep import compat
from wholestep.capture.absent import Absent, Listed, of_another, owner
from wholestep.capture.optimizers import UpdatePlan
from wholestep.capture.repeats import KEPT, Run
from wholestep.capture.sites import Sites
from wholestep.graph.equality import describe_value
from wholestep.graph.training_graph import Input, Output, OutputKind, Role

_DETACH = torch.ops.aten.detach.default
_LAST = KEPT - 1
"""The layer that is copied."""


class NotAlike(Exception):
    """The run cannot be written out: the step is to be traced in full."""


def _must(condition: bool) -> None:
    if not condition:
        raise NotAlike


class Watch:
    """Notes where layers begin and end in the record while a step is traced."""

    def __init__(self, run: Run, places: Mapping[fx.Node, Input], paths: Mapping[int, str]) -> None:
        """`places`: of the loss graph's inputs. `paths`: of modules, by id."""
        self.run, self.places = run, places
        self.twins: Mapping[fx.Node, fx.Node] = run.twins()
        self.paths = [paths[layer.module] for layer in run.layers]
        self.first = {layer.nodes[0]: i for i, layer in enumerate(run.layers[:KEPT])}
        self.last = {layer.nodes[-1]: i for i, layer in enumerate(run.layers[:KEPT])}
        self.began: dict[int, fx.Node] = {}
        self.ended: dict[int, fx.Node] = {}
        self.outs: dict[int, fx.Node] = {}
        self.keys: dict[int, tuple[int, int]] = {}
        self.reached: dict[int, tuple[fx.Node, fx.Node]] = {}
        """Layer -> the last node before its backward, and the gradient that it gets."""
        self.stand_ins: dict[fx.Node, tuple[int, fx.Node]] = {}
        """In the place of a gradient of a layer that is left out -> which, and the gradient in the layer that was traced."""
        self.absent = Absent({})
        self.assumed = 0
        self.graph: fx.Graph | None = None
        self.sites: Sites | None = None

    def leave_out(self, plans: Sequence[UpdatePlan], trained: Sequence[str]) -> Absent:
        """From now on the parameters of layers that are left out are absent, as far as one node updates them and their twins."""
        plan_of = {name: i for i, plan in enumerate(plans) for name in plan.names}
        twins, known = {}, set(trained)
        for layer in range(KEPT, len(self.run.layers) - 1):
            for old, new in zip(self._own(_LAST), self._own(layer), strict=False):
                alike = (old.name in known) == (new.name in known) and plan_of.get(old.name) == plan_of.get(new.name)
                if old.role is new.role is Role.PARAMETER and alike:
                    twins[new.name] = (old.name, layer)
        self.absent = Absent(twins, trained)
        return self.absent

    def before(self, node: fx.Node) -> None:
        i = self.first.get(node)
        if i is not None:
            assert self.sites is not None
            self.graph = compat.recorded_graph()
            self.began[i] = _last_node(self.graph)
            self.keys[i] = (self.sites.used, -1)
            self.assumed = len(self.sites.assumed)

    def after(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> None:
        i = self.last.get(node)
        if i is None:
            return
        assert self.graph is not None and self.sites is not None
        out = env[self.run.layers[i].out]
        _must(out.requires_grad and out.grad_fn is not None and len(self.sites.assumed) == self.assumed)
        self.ended[i], self.outs[i] = _last_node(self.graph), compat.recorded_node(out)
        self.keys[i] = (self.keys[i][0], self.sites.used)
        out.register_hook(lambda gradient: self._reach(i, gradient))

    def _reach(self, layer: int, gradient: torch.Tensor) -> None:
        assert self.graph is not None
        self.reached[layer] = (_last_node(self.graph), compat.recorded_node(gradient))

    def add_gradients(self, gradients: dict[str, torch.Tensor], trained: Sequence[str]) -> dict[str, torch.Tensor]:
        """Gradients for the layers that were left out: aliases of those of the traced one."""
        found = dict(gradients)
        kept = self._own(_LAST)
        for j in range(KEPT, len(self.run.layers) - 1):
            own = self._own(j)
            _must([e.role for e in kept] == [e.role for e in own])
            for old, new in zip(kept, own, strict=True):
                if old.role is Role.PARAMETER and new.name not in self.absent.twins:
                    _must((old.name in trained) == (new.name in trained) and new.name not in gradients)
                    if old.name in gradients:
                        alias = gradients[old.name].detach()
                        found[new.name] = alias
                        self.stand_ins[compat.recorded_node(alias)] = (j, compat.recorded_node(gradients[old.name]))
        return {name: found[name] for name in trained if name in found}

    def _own(self, layer: int) -> list[Input]:
        return [self.places[node] for node in self.run.layers[layer].own]

    @property
    def keys_per_layer(self) -> int:
        begin, end = self.keys[_LAST]
        return end - begin

    @property
    def more_keys(self) -> int:
        """That the layers draw which are left out."""
        return self.keys_per_layer * len(self.run.left_out)


def _last_node(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


def write_out(recorded: fx.GraphModule, watch: Watch, order: Sequence[Input], meanings: list[Output]) -> fx.GraphModule:
    """The record with all layers, and `meanings` with those of their results; raises NotAlike."""
    return compat.GraphModule(recorded, _Writing(recorded.graph, watch, order, meanings).graph())


class _Writing:
    def __init__(self, old: fx.Graph, watch: Watch, order: Sequence[Input], meanings: list[Output]) -> None:
        self.old, self.watch, self.order, self.meanings = old, watch, order, meanings
        self.absent, self.place = watch.absent, {entry: i for i, entry in enumerate(order)}
        self.nodes = list(old.nodes)
        self.at = {node: i for i, node in enumerate(self.nodes)}
        _must(set(watch.reached) >= set(range(KEPT)) and set(watch.ended) == set(range(KEPT)))
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        traced = [entry for entry in order if self.absent.twin(entry) is None]
        self.inputs = dict(zip(traced, placeholders, strict=True))
        self.entries = {node: entry for entry, node in self.inputs.items()}
        self.added: dict[Input, fx.Node] = {}
        """Inputs that the record has not, in the new graph."""
        self.keys = [node for entry, node in self.inputs.items() if entry.role is Role.KEY]
        self.key_number = {node: i for i, node in enumerate(self.keys)}
        self.forward = [self._between(watch.began[i], watch.ended[i]) for i in range(KEPT)]
        self.backward = [[], *(self._between(watch.reached[i][0], watch.reached[i - 1][0]) for i in range(1, KEPT))]
        self.leaves = {node: self._leaf(node) for node in placeholders}
        self.body = set(self.forward[_LAST]) | set(self.backward[_LAST])
        self.gradient = watch.reached[_LAST][1]
        self._compare()

    def _between(self, after: fx.Node, last: fx.Node) -> list[fx.Node]:
        return self.nodes[self.at[after] + 1 : self.at[last] + 1]

    def _leaf(self, placeholder: fx.Node) -> fx.Node:
        """A parameter is differentiated by a detached alias of it, made before the loss."""
        begin = self.at[self.watch.began[0]]
        found = [user for user in placeholder.users if user.target is _DETACH and self.at[user] <= begin]
        return found[0] if found else placeholder

    # ---- what the layer's nodes read besides each other ----

    def _image(self, layer: int, comes_in: fx.Node, gradient: Any, keys: int) -> dict[fx.Node, Any]:
        """What the copied layer reads -> what another layer reads in its place."""
        found: dict[fx.Node, Any] = {self.watch.outs[_LAST - 1]: comes_in, self.gradient: gradient}
        for old, new in zip(self.watch._own(_LAST), self.watch._own(layer), strict=True):
            a = self.inputs[old]
            if new in self.added:
                found[a] = found[self.leaves[a]] = self.added[new]
            else:
                found[a], found[self.leaves[a]] = self.inputs[new], self.leaves[self.inputs[new]]
        begin, end = self.watch.keys[_LAST]
        for number in range(begin, end):
            found[self.keys[number]] = self.keys[keys + number - begin]
        return found

    def _compare(self) -> None:
        """The second layer, and the third."""
        one, two = _LAST - 1, _LAST
        _must(len(self.forward[one]) == len(self.forward[two]) and len(self.backward[one]) == len(self.backward[two]))
        _must(self.watch.keys[one][1] == self.watch.keys[two][0])
        image = self._image(one, self.watch.outs[one - 1], self.watch.reached[one][1], self.watch.keys[one][0])
        image |= dict(zip(self.forward[two], self.forward[one], strict=True))
        image |= dict(zip(self.backward[two], self.backward[one], strict=True))
        begin = self.at[self.watch.began[0]]
        for new, old in (*zip(self.forward[two], self.forward[one]), *zip(self.backward[two], self.backward[one])):
            for read in new.all_input_nodes:
                _must(read in image or self.at[read] <= begin or read.op == "placeholder")
            args = fx.map_arg((new.args, new.kwargs), lambda n: image.get(n, n))
            same = new.op == old.op == "call_function" and new.target is old.target and args == (old.args, old.kwargs)
            _must(same and describe_value(new.meta.get("val")) == describe_value(old.meta.get("val")))
            schema = getattr(new.target, "_schema", None)
            _must(schema is None or not schema.is_mutable)
        _must(image[self.watch.outs[two]] is self.watch.outs[one])
        _must(image.get(self.watch.reached[one][1]) is self.watch.reached[one - 1][1])

    # ---- the new graph ----

    def graph(self) -> fx.Graph:
        self.new = fx.Graph(tracer_cls=self.old._tracer_cls)
        self.copies: dict[fx.Node, fx.Node] = {}
        self.written: dict[int, dict[fx.Node, fx.Node]] = {}
        self.news: dict[tuple[str, fx.Node], fx.Node] = {}
        """Parameter that is absent, what its twin or a state of that becomes -> what it becomes."""
        layers = len(self.watch.run.layers)
        end, turn = self.at[self.watch.ended[_LAST]], self.at[self.watch.reached[_LAST][0]]
        self._write_inputs()
        for i, node in enumerate(self.nodes):
            if node in self.copies:
                continue
            if node in self.watch.stand_ins:
                layer, gradient = self.watch.stand_ins[node]
                _must(gradient in self.written[layer])
                self.copies[node] = self.written[layer][gradient]
            elif node.op == "output":
                self._write_results(node.args[0])
            elif node in self.absent.lists:
                _must(i > turn)
                self._write_listed(node, self.absent.lists[node])
            else:
                self._emit(node, self._reader(end < i <= turn))
            if i == end:
                for layer in range(KEPT, layers - 1):
                    self._write_forward(layer)
            if i == turn:
                for layer in reversed(range(KEPT, layers - 1)):
                    self._write_backward(layer)
        return self.new

    def _reader(self, later: bool) -> Any:
        """How arguments are looked up; `later`: behind the copied layer, before its backward."""
        out, final = self.watch.outs[_LAST], len(self.watch.run.layers) - 2
        end = self.watch.keys[_LAST][1]

        def read(node: fx.Node) -> fx.Node:
            if later and node is out:
                return self.written[final][out]
            _must(not later or node not in self.body)
            if later and self.key_number.get(node, -1) >= end:
                node = self.keys[self.key_number[node] + self.watch.more_keys]
            return self.copies[node]

        return read

    def _emit(self, node: fx.Node, read: Any, prefix: tuple[str, str] | None = None) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), read)
        made = self.new.create_node(node.op, node.target, args, kwargs, _NUMBER.sub("", node.name), node.type)
        made.meta = dict(node.meta)
        if prefix is None:
            self.copies[node] = made
            return made
        custom = made.meta.get("custom") or {}
        old, new = prefix
        module = custom.get("module", "")
        if module == old or module.startswith(f"{old}."):
            made.meta["custom"] = {**custom, "module": new + module.removeprefix(old)}
        return made

    def _write(self, layer: int, body: list[fx.Node], image: Mapping[fx.Node, Any]) -> None:
        made = self.written.setdefault(layer, {})
        prefix = (self.watch.paths[_LAST], self.watch.paths[layer])

        def read(node: fx.Node) -> fx.Node:
            if node in made:
                return made[node]
            found = image.get(node, node)
            return self.copies.get(found, found)

        for node in body:
            made[node] = self._emit(node, read, prefix)

    def _write_forward(self, layer: int) -> None:
        out = self.watch.outs[_LAST]
        comes_in = self.copies[out] if layer == KEPT else self.written[layer - 1][out]
        keys = self.watch.keys[_LAST][1] + (layer - KEPT) * self.watch.keys_per_layer
        self.images = getattr(self, "images", {})
        self.images[layer] = self._image(layer, comes_in, None, keys)
        self._write(layer, self.forward[_LAST], self.images[layer])

    def _write_backward(self, layer: int) -> None:
        """From the last to the first: each makes the gradient that the one before it gets."""
        self.images[layer][self.gradient] = self.copies[self.gradient]
        self._write(layer, self.backward[_LAST], self.images[layer])
        self.copies[self.gradient] = self.written[layer][self.watch.reached[_LAST - 1][1]]

    # ---- inputs, updates and results of parameters that the record has not ----

    def _write_inputs(self) -> None:
        for i, entry in enumerate(self.order):
            twin = self.absent.twin(entry)
            node = self.inputs[twin or entry]
            name = f"arg{i}_1"  # as make_fx calls them
            made = self.new.create_node("placeholder", name, (), {}, name, node.type)
            made.meta = dict(node.meta)
            if twin is None:
                self.copies[node] = made
            else:
                self.added[entry] = made

    def _write_listed(self, node: fx.Node, listed: Listed) -> None:
        """An operator on lists of all parameters, and what it gives for each."""
        at = {name: i for i, name in enumerate(listed.traced)}
        count = len(at)

        def whole(argument: Any) -> Any:
            of_all = isinstance(argument, list | tuple) and all(isinstance(entry, fx.Node) for entry in argument)
            if not of_all or len(argument) != count:
                return fx.map_arg(argument, self.copies.__getitem__)
            return [self._of(name, argument[at[self._traced(name)]]) for name in listed.names]

        made = self.new.create_node(
            node.op, node.target, tuple(map(whole, node.args)), {}, _NUMBER.sub("", node.name), node.type
        )
        made.meta = dict(node.meta)
        self.copies[node] = made
        _must(not node.kwargs)
        if isinstance(node.meta["val"], list):
            self._write_given(node, made, [at[self._traced(name)] for name in listed.names], listed)

    def _write_given(self, node: fx.Node, made: fx.Node, places: Sequence[int], listed: Listed) -> None:
        """The lists that an update gives, one after the other: new parameters, and new states."""
        count, values = len(listed.traced), node.meta["val"]
        given = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        _must(len(given) == len(node.users) == len(values) and len(values) % count == 0)
        chosen = [first + place for first in range(0, len(values), count) for place in places]
        made.meta["val"] = [values[i] for i in chosen]
        for index, i in enumerate(chosen):
            new = self.new.create_node(
                "call_function", operator.getitem, (made, index), {}, _NUMBER.sub("", given[i].name)
            )
            new.meta = dict(given[i].meta)
            name = listed.names[index % len(places)]
            if name in self.absent.twins:
                self.news[name, given[i]] = new
            else:
                self.copies[given[i]] = new

    def _traced(self, name: str) -> str:
        return self.absent.twins[name][0] if name in self.absent.twins else name

    def _of(self, name: str, node: fx.Node) -> fx.Node:
        """What a node of the record, which belongs to a parameter or to its twin, is for the parameter."""
        if name not in self.absent.twins:
            return self.copies[node]
        if node in self.entries:
            return self.added[of_another(self.entries[node], name)]
        if (name, node) in self.news:
            return self.news[name, node]
        written = self.written[self.absent.twins[name][1]]
        _must(node in written)
        return written[node]

    def _write_results(self, values: Sequence[Any]) -> None:
        """All that the record returns, and in their places the same for parameters that it has not."""
        members: dict[tuple, dict[str, list[int]]] = {}
        groups = [self._group(value, meaning) for value, meaning in zip(values, self.meanings, strict=True)]
        for i, group in enumerate(groups):
            if group is not None:
                members.setdefault(group[0], {}).setdefault(group[1], []).append(i)
        found: list[tuple[Any, Output]] = []
        for i, group in enumerate(groups):
            if group is None:
                found.append((self._result(values[i], self.meanings[i]), self.meanings[i]))
            elif group[0] in members:
                mine = members.pop(group[0])
                order = group[0][1].names if isinstance(group[0][1], Listed) else self.absent.trained
                for name in self.absent.with_absent(order, mine):
                    for j in mine[self._traced(name)]:
                        found.append((self._of(name, values[j]), self._meaning(name, self.meanings[j])))
        self.meanings[:] = [meaning for _, meaning in found]
        self.new.output(tuple(value for value, _ in found))

    def _group(self, value: Any, meaning: Output) -> tuple[tuple, str] | None:
        """The results among which those of absent parameters have their places, and the parameter that this one is of."""
        if not isinstance(value, fx.Node) or not self.absent.twins:
            return None
        if meaning.kind is OutputKind.GRADIENT:
            return ("gradients", meaning.kind), meaning.name
        if meaning.kind is OutputKind.KEPT and meaning.name.startswith("gradient/"):
            return ("gradients", meaning.kind), meaning.name.removeprefix("gradient/")
        listed = self.absent.lists.get(value.args[0]) if value.target is operator.getitem else None  # type: ignore[arg-type]
        name = owner(self.order[meaning.target]) if meaning.target is not None else None
        return None if listed is None or name is None else (("update", listed), name)

    def _meaning(self, name: str, meaning: Output) -> Output:
        if name not in self.absent.twins:
            return meaning
        if meaning.target is None:
            return Output(meaning.kind, meaning.name.removesuffix(self._traced(name)) + name)
        entry = of_another(self.order[meaning.target], name)
        return Output(meaning.kind, str(entry), self.place[entry])

    def _result(self, value: Any, meaning: Output) -> Any:
        if not isinstance(value, fx.Node):
            return value
        if meaning.kind is OutputKind.KEPT and meaning.name.startswith("boundary/"):
            layer = self._layer_of(meaning.name.removeprefix("boundary/"))
            if layer is not None:
                while value.target is _DETACH:
                    value = value.args[0]
                _must(value in self.written[layer])
                return self.written[layer][value]
        return self.copies[value]

    def _layer_of(self, path: str) -> int | None:
        for layer in range(KEPT, len(self.watch.run.layers) - 1):
            own = self.watch.paths[layer]
            if path == own or path.startswith((f"{own}.", f"{own}#")):
                return layer
        return None


_NUMBER = re.compile(r"_\d+$")
