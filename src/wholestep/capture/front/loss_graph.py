"""Dynamo's graph of one loss, read: where its inputs come from, which values are the loss and aux, what it also returns.

In: the graph that Dynamo hands to its backend. Out: a `LossGraph`, which can be run again on other tensors (fakes, while a
step is traced), node by node, so that every operation knows its module and its line of the user's code.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from wholestep import compat
from wholestep.capture.front import traced as marks
from wholestep.capture.front.checkpoints import RANDOM, is_checkpoint
from wholestep.capture.front.empty_parts import copy_in_place_of_cat
from wholestep.capture.front.numbers import OF_ONES_OWN, Argument, HostPart, split_numbers, write_powers
from wholestep.capture.front.opaque import derivatives, refuse_opaque, replaced, written
from wholestep.capture.front.replay import MARKS, Assumed, Replay, Watcher, target_name, user_line
from wholestep.capture.front.shared import copy_in_place_of_set, live_views
from wholestep.errors import BadLoss, CaptureRefused
from wholestep.graph.mesh import RANKS, Ranks

LOSS, AUX, KEPT, NUMBER, NOTHING = "loss", "aux", "kept", "number", "nothing"


@dataclasses.dataclass(frozen=True, slots=True)
class Returned:
    """One result of Dynamo's graph: the loss, `aux[name]`, a tensor that the Python keeps somewhere, or a number."""

    kind: str
    name: Any = ""
    """The key in aux, whatever it is."""
    number: bool = False
    """Python holds it as a number: read from the device at every call, as in eager."""


@dataclasses.dataclass(slots=True)
class Replayed:
    """What one run of a LossGraph gave."""

    loss: torch.Tensor
    aux: dict[str, torch.Tensor]
    kept: dict[str, torch.Tensor]
    gradients: list[torch.Tensor] | None
    """Of the trained parameters, where hooks had their say."""
    outputs: dict[str, torch.Tensor]
    """Module path -> a value it returned."""
    assumed: list[Assumed]


class LossGraph:
    """One graph of Dynamo's, independent of Dynamo from here on."""

    def __init__(
        self,
        module: fx.GraphModule,
        paths: Mapping[int, str],
        rewrite: Callable[[fx.GraphModule], None] = lambda module: None,
    ) -> None:
        """`paths`: of the model's modules, by id, as they are while Dynamo traces: others may come in their places later."""
        self.paths = paths
        self.module = _copied(module)  # Dynamo reads its own graph again after the backend
        copy_in_place_of_cat(self.module)
        write_powers(self.module)
        rewrite(self.module)
        self.ranks: Ranks | None = self.module.meta.get(RANKS)
        """Who runs it, where a rewrite has made it the program of one rank."""
        placeholders = [n for n in self.module.graph.nodes if n.op == "placeholder"]
        self.arguments = _arguments(placeholders)
        self.loss_shape = _check_marks(self.module)
        """As the user's code returns it: a loss of one place may have dimensions."""
        _check_backward(self.module)
        _check_replaced(self.module)
        _check_nested(self.module)
        refuse_opaque(self.module)
        copy_in_place_of_set(self.module)
        self.derivatives = derivatives(self.module)
        self.live = live_views(self.module)
        """Results that share memory with arguments: made from those, after the step."""
        _take_out(self.module, self.live)
        self.host: HostPart = split_numbers(self.module, self.arguments)
        self.returned = _returned(self.module, self.host)
        self.copied_in: set[int] = set()
        """Arguments that are another tensor at every call: inputs like those of the batch."""
        self.surroundings = [torch.get_default_dtype(), torch.is_grad_enabled()]
        """What torch's operators depend on besides their arguments."""
        for device in ("cpu", "cuda"):
            self.surroundings += [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]
        self.enters_autocast = sum(_is_autocast(n) for n in self.module.graph.nodes)
        self.checkpoints = any(is_checkpoint(n) for n in module.graph.nodes)

    def detaches(self, argument: int) -> bool:
        """Whether nothing but `detach` is done with a tensor: then its history does not matter."""
        users = [n for n in self.module.graph.nodes if n.op == "placeholder"][argument].users
        return all(user.target in ("detach", torch.detach) for user in users)

    @property
    def has_sizes(self) -> bool:
        """Whether it holds for other sizes than those it was made with."""
        return any(argument.kind == "size" for argument in self.arguments)

    @property
    def tensors(self) -> list[int]:
        return [i for i, argument in enumerate(self.arguments) if argument.kind == "tensor"]

    @property
    def holds(self) -> bool:
        """Whether the operators that it calls are what they were."""
        return not (self.derivatives and replaced(self.derivatives))

    @property
    def aux_names(self) -> tuple[Any, ...]:
        """The keys of aux, in its order."""
        return tuple(n.args[0] for n in self.module.graph.nodes if n.target is marks.mark_aux)

    def live_aux(self, args: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Entries of aux that share memory with arguments."""
        return {self.returned[i].name: view(args) for i, view in self.live.items() if self.returned[i].kind == AUX}

    def results(self, values: Mapping[str, Any], numbers: Mapping[int, Any], args: Sequence[Any]) -> tuple:
        """What Dynamo's code expects of its graph; `values` by the names of a capture's outputs."""
        found: list[Any] = []
        for i, returned in enumerate(self.returned):
            if i in self.live:
                found.append(self.live[i](args))
            elif returned.kind == NUMBER:
                found.append(numbers[i])
            elif returned.kind == NOTHING:
                found.append(None)
            else:
                value = values[AUX][returned.name] if returned.kind == AUX else values[returned.name or LOSS]
                if returned.kind == LOSS:
                    value = value.reshape(self.loss_shape)
                found.append(value.item() if returned.number else value)
        return tuple(found)

    def random_calls(self) -> int:
        """About how many random numbers a run may draw; a recurrent layer draws once per layer."""
        graphs = [m.graph for m in self.module.modules() if isinstance(m, fx.GraphModule)]
        names = [target_name(n.target) for g in graphs for n in g.nodes if n.op in ("call_function", "call_method")]
        return sum(
            16 if _RECURRENT.search(name) else 1 for name in names if RANDOM.search(name) or _RECURRENT.search(name)
        )

    @functools.cached_property
    def digest(self) -> str:
        """A hash of all that a trace of this graph depends on, but for its inputs' sizes and types."""
        found = hashlib.sha256()
        for line in _described(self.module):
            found.update(line.encode() + b"\n")
        for line in (line for _, *both in self.derivatives for f in both for line in written(f)):
            found.update(line.encode() + b"\n")
        found.update(repr((self.arguments, self.returned, self.host.integer, self.surroundings)).encode())
        return found.hexdigest()

    def run(
        self,
        args: Sequence[Any],
        numbers: Sequence[torch.Tensor],
        device: torch.device,
        watch: Watcher | None = None,
    ) -> Replayed:
        """Run the graph on `args` (sizes are read off their tensors), under whatever modes are in force."""
        given = list(args)
        for i, argument in enumerate(self.arguments):
            if argument.size_of is not None:
                tensor, what, dim = argument.size_of
                given[i] = _PROPERTIES[what](given[tensor], dim)
        replay = Replay(self.module, self.paths, device, watch)
        found = replay.run(*given, *numbers)
        if replay.loss is None:
            raise CaptureRefused("the loss was not found in Dynamo's graph")
        kept = {r.name: _as_tensor(value) for r, value in zip(self.returned, found, strict=True) if r.kind == KEPT}
        return Replayed(replay.loss, replay.aux, kept, replay.gradients, replay.boundaries(), replay.assumed)


def _as_tensor(value: Any) -> torch.Tensor:
    """A result of a graph is a tensor; a size that the Python keeps is a number again when it is handed over."""
    return torch.scalar_tensor(value, dtype=torch.int64) if isinstance(value, int | torch.SymInt) else value


_PROPERTIES: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "SIZE": lambda t, dim: t.shape[dim],
    "STRIDE": lambda t, dim: t.stride(dim),
    "STORAGE_OFFSET": lambda t, dim: t.storage_offset(),
}

_RECURRENT = re.compile(r"^(lstm|gru|rnn_tanh|rnn_relu)$")


def _is_autocast(node: fx.Node) -> bool:
    if node.op != "call_function" or target_name(node.target) != "_enter_autocast":
        return False
    return (
        len(node.args) < 3 or node.args[2] is not False
    )  # (device, dtype, enabled, cache): switched off is no conflict


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return compat.GraphModule(module, graph)


def _arguments(placeholders: Sequence[fx.Node]) -> list[Argument]:
    """Read off `grapharg`, which Dynamo takes away after the backend has run."""
    sources = [node.meta["grapharg"].source for node in placeholders]
    place = {_name(source): i for i, source in enumerate(sources)}
    found = []
    for node, source in zip(placeholders, sources, strict=True):
        value, kind = node.meta.get("example_value"), type(source).__name__
        name = _name(source)
        if kind == "TensorPropertySource" and _name(source.base) in place:
            found.append(Argument("size", name, size_of=(place[_name(source.base)], source.prop.name, source.idx or 0)))
            continue
        wrapped = bool(node.meta["grapharg"].pass_arg_as_tensor)
        number = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)
        read = {user.target for user in node.users} - (set() if kind == "NumpyTensorSource" else {OF_ONES_OWN})
        if number or (wrapped and read <= {"item"}):
            found.append(Argument("number", name, as_tensor=wrapped))
            continue
        if not isinstance(value, torch.Tensor):
            raise CaptureRefused(f"{name}, a {type(value).__name__}, is an input of the graph")
        in_module = "_parameters[" in name or "_buffers[" in name
        kind = f"{value.dtype} {value.device} {value.dim()} {value.requires_grad}"
        found.append(Argument("tensor", name, in_module, of=kind))
    return found


def _name(source: Any) -> str:
    return source.name() if callable(source.name) else source.name  # a method in older versions


def _take_out(module: fx.GraphModule, results: Iterable[int]) -> None:
    """Results that the graph does not have to make; those of aux it makes all the same, for checks."""
    output = next(n for n in module.graph.nodes if n.op == "output")
    kept = list(output.args[0])
    for i in results:
        kept[i] = kept[i] if kept[i].target is marks.mark_aux else None
    output.args = (tuple(kept),)


def _check_marks(module: fx.GraphModule) -> tuple[int, ...]:
    """The shape of the loss; errors about it, as early as its graph is known."""
    losses = []
    for node in module.graph.nodes:
        if node.target is marks.mark_bad_loss:
            raise BadLoss(
                f"loss_fn returned a {node.args[0]}",
                hint="return a scalar tensor, or (loss, aux) with aux a dict of tensors",
            )
        if node.target is marks.mark_bad_aux:
            raise BadLoss(f"aux[{node.args[0]!r}] is a {node.args[1]}", hint="aux must hold tensors")
        if node.target is marks.mark_loss:
            losses.append(node)
    if len(losses) != 1:
        raise CaptureRefused(f"Dynamo's graph has {len(losses)} losses")
    value = losses[0].meta.get("example_value")
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise BadLoss(
                f"the loss has shape {tuple(value.shape)}", hint="reduce it to a scalar, for example with .mean()"
            )
        if not value.is_floating_point():
            raise BadLoss(f"the loss has dtype {value.dtype}", hint="a loss must be a floating-point scalar")
        return tuple(value.shape)
    return ()


def _check_nested(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.is_nested:
            help = "pad it and pass a mask, or compute with its values and offsets"
            raise CaptureRefused(f"the loss computes with a nested tensor; {help}", where=_where(node), compiled=True)


def _check_replaced(module: fx.GraphModule) -> None:
    """A function of torch's that somebody put another in the place of: torch itself would call that one from inside."""
    for node in module.graph.nodes:
        function = node.target
        if (
            node.op == "call_function"
            and isinstance(function, types.FunctionType)
            and function.__module__.startswith("torch.")
        ):
            here = getattr(sys.modules.get(function.__module__), function.__name__, function)
            if here is not function:
                raise CaptureRefused(f"{function.__module__}.{function.__name__} was replaced", where=_where(node))


def _check_backward(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if (node.op == "call_method" and node.target == "backward") or node.target is torch.autograd.backward:
            raise CaptureRefused("loss.backward() is called inside of the loss, which fills p.grad", where=_where(node))


def _where(node: fx.Node) -> str | None:
    return user_line(node.meta.get("stack_trace") or "")


def _returned(module: fx.GraphModule, host: HostPart) -> list[Returned]:
    output = next(n for n in module.graph.nodes if n.op == "output")
    hooked = {u for n in module.graph.nodes if n.target is marks.mark_gradients for u in n.users}
    found: list[Returned] = []
    for i, node in enumerate(output.args[0]):
        if i in host.returned:
            found.append(Returned(NUMBER))
        elif not isinstance(node, fx.Node):
            found.append(Returned(NOTHING))
        elif node.target is marks.mark_loss or node in hooked:
            found.append(Returned(LOSS))
        elif node.target is marks.mark_aux:
            found.append(Returned(AUX, node.args[0]))
        else:
            number = isinstance(node.meta.get("example_value"), torch.SymInt | torch.SymFloat | torch.SymBool)
            found.append(Returned(KEPT, f"~kept{i}", number))
    return found


def _described(module: fx.GraphModule) -> Iterator[str]:
    """The graph, line by line, without names or addresses that differ between processes."""
    number = {node: i for i, node in enumerate(module.graph.nodes)}

    def one(value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{number[value]}"
        if isinstance(value, list | tuple):
            return f"{type(value).__name__}({', '.join(map(one, value))})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {one(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({one(value.start)}, {one(value.stop)}, {one(value.step)})"
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
            return f"{value.__module__}.{value.__qualname__}"
        return repr(value)

    for node in module.graph.nodes:
        target = _described_target(module, node)
        paths = [entry[0] for entry in (node.meta.get("nn_module_stack") or {}).values()]
        marks = [node.meta[fact] for fact in MARKS if fact in node.meta]
        yield f"{node.op} {target} {one(node.args)} {one(node.kwargs)} {paths[-1:]}{marks or ''}"


def _described_target(module: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "get_attr":
        value: Any = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, fx.GraphModule):
            return "\n".join(_described(value))
        if isinstance(value, torch.Tensor):
            raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8) if value.numel() else torch.empty(0)
            return f"{tuple(value.shape)} {value.dtype} {hashlib.sha256(raw.numpy().tobytes()).hexdigest()}"
        return repr(value)
    if node.op in ("placeholder", "output"):
        return ""
    function = node.target
    if isinstance(function, types.FunctionType) and not function.__module__.startswith("torch."):
        return f"{function.__module__}.{function.__qualname__} {' '.join(written(function))}"
    if isinstance(function, str | torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return str(function)
    return f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', function)}"
