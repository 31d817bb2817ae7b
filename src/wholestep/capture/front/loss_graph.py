"""Dynamo's graph of one loss, read: where its inputs come from, which values are the loss and aux, what it also returns.

In: the graph that Dynamo hands to its backend. Out: a `LossGraph`, which can be run again on other tensors (fakes, while a
step is traced), node by node, so that every operation knows its module and its line of the user's code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import operator
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from wholestep import compat
from wholestep.capture.front import traced as marks
from wholestep.capture.front.numbers import Argument, HostPart, split_numbers
from wholestep.capture.modes import is_user_file
from wholestep.capture.sites import TooFewKeys
from wholestep.errors import BadLoss, CaptureRefused, WholestepError

LOSS, AUX, KEPT, NUMBER, NOTHING = "loss", "aux", "kept", "number", "nothing"


@dataclasses.dataclass(frozen=True, slots=True)
class Returned:
    """One result of Dynamo's graph: the loss, `aux[name]`, a tensor that the Python keeps somewhere, or a number."""

    kind: str
    name: str = ""
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


class LossGraph:
    """One graph of Dynamo's, independent of Dynamo from here on."""

    def __init__(self, module: fx.GraphModule) -> None:
        with compat.no_python_code():  # it is interpreted, node by node
            self.module = _copied(module)  # Dynamo reads its own graph again after the backend
        placeholders = [n for n in self.module.graph.nodes if n.op == "placeholder"]
        self.arguments = _arguments(placeholders)
        self.notes: list[str] = []
        _check_marks(self.module)
        _check_asserts(self.module)
        _check_backward(self.module)
        _check_replaced(self.module)
        self.host: HostPart = split_numbers(self.module, self.arguments)
        self.returned = _returned(self.module, self.host)
        self.copied_in: set[int] = set()
        """Arguments that are another tensor at every call: inputs like those of the batch."""
        self.surroundings = [torch.get_default_dtype(), torch.is_grad_enabled()]
        """What torch's operators depend on besides their arguments."""
        for device in ("cpu", "cuda"):
            self.surroundings += [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]
        self.enters_autocast = sum(_is_autocast(n) for n in self.module.graph.nodes)
        self.checkpoints = any(_is_checkpoint(n) for n in self.module.graph.nodes)

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

    def results(self, values: Mapping[str, Any], numbers: Mapping[int, Any]) -> tuple:
        """What Dynamo's code expects of its graph; `values` by the names of a capture's outputs."""
        found: list[Any] = []
        for i, returned in enumerate(self.returned):
            if returned.kind == NUMBER:
                found.append(numbers[i])
            elif returned.kind == NOTHING:
                found.append(None)
            else:
                value = values[LOSS] if returned.kind == LOSS else values[returned.name]
                found.append(value.item() if returned.number else value)
        return tuple(found)

    def random_calls(self) -> int:
        """About how many random numbers a run may draw; a recurrent layer draws once per layer."""
        graphs = [m.graph for m in self.module.modules() if isinstance(m, fx.GraphModule)]
        names = [_target_name(n.target) for g in graphs for n in g.nodes if n.op in ("call_function", "call_method")]
        return sum(16 if _RECURRENT.search(name) else 1 for name in names if _RANDOM.search(name) or _RECURRENT.search(name))

    @functools.cached_property
    def digest(self) -> str:
        """A hash of all that a trace of this graph depends on, but for its inputs' sizes and types."""
        found = hashlib.sha256()
        for line in _described(self.module):
            found.update(line.encode() + b"\n")
        found.update(repr((self.arguments, self.returned, self.host.integer, self.surroundings)).encode())
        return found.hexdigest()

    def run(self, args: Sequence[Any], numbers: Sequence[torch.Tensor], paths: Mapping[int, str]) -> Replayed:
        """Run the graph on `args` (sizes are read off their tensors), under whatever modes are in force."""
        given = list(args)
        for i, argument in enumerate(self.arguments):
            if argument.size_of is not None:
                tensor, what, dim = argument.size_of
                given[i] = _PROPERTIES[what](given[tensor], dim)
        replay = _Replay(self.module, paths)
        found = replay.run(*given, *numbers)
        if replay.loss is None:
            raise CaptureRefused("the loss was not found in Dynamo's graph")
        kept = {r.name: value for r, value in zip(self.returned, found, strict=True) if r.kind == KEPT}
        return Replayed(replay.loss, replay.aux, kept, replay.gradients, replay.boundaries())


class _Replay(fx.Interpreter):
    """Runs the graph node by node; every operation is annotated with its module and source line."""

    def __init__(self, module: fx.GraphModule, paths: Mapping[int, str]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.paths = paths
        self.loss: torch.Tensor | None = None
        self.aux: dict[str, torch.Tensor] = {}
        self.gradients: list[torch.Tensor] | None = None
        self.sources: dict[str, str | None] = {}
        self.calls: dict[str, fx.Node] = {}
        self.numbers: dict[int, torch.Tensor] = {}
        """Values that stand for Python numbers, by id."""

    @contextlib.contextmanager
    def _set_current_node(self, node: fx.Node) -> Iterator[None]:
        """fx would put the node's own facts in place of ours."""
        yield

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_method", "call_module"):
            return super().run_node(n)
        stack = n.meta.get("nn_module_stack") or {}
        path = self._path(stack)
        source = self._source(n.meta.get("stack_trace"))
        facts = {k: v for k, v in (("module", path), ("source", source)) if v}
        with compat.annotate(**facts) if facts else contextlib.nullcontext():
            try:
                value = super().run_node(n)
            except (WholestepError, CaptureRefused, TooFewKeys):
                raise
            except Exception as error:
                lines = str(error).strip().splitlines() or [""]
                raise CaptureRefused(f"{type(error).__name__}: {lines[0][:200]}", where=source) from error
        for key in stack:
            inner = self.paths.get(_module_id(key))
            if inner:
                self.calls[inner + _call_suffix(key)] = n
        return value

    def _path(self, stack: Mapping[str, Any]) -> str:
        for key in reversed(list(stack)):
            path = self.paths.get(_module_id(key))
            if path is not None:
                return path
        return ""

    def _source(self, trace: str | None) -> str | None:
        if not trace:
            return None
        if trace not in self.sources:
            self.sources[trace] = user_line(trace)
        return self.sources[trace]

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if self.numbers:
            args, kwargs, only = self._operands(args, kwargs)
            if only:
                return self._number(self._function(target, args, kwargs))
        return self._function(target, args, kwargs)

    def _operands(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, bool]:
        """Numbers beside tensors promote types as Python's do; the last says whether there are numbers alone."""
        tensors = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        numbers = [t for t in tensors if id(t) in self.numbers]
        others = [t for t in tensors if id(t) not in self.numbers]
        if not numbers or not others:
            return args, kwargs, bool(numbers)

        def as_operand(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or id(value) not in self.numbers or not value.is_floating_point():
                return value
            floating = [t for t in others if t.is_floating_point() or t.is_complex()]
            if not floating:
                return value.to(torch.get_default_dtype())
            if any(t.dim() > 0 for t in floating):  # a tensor of no dimensions gives way to it
                return value
            dtype = functools.reduce(torch.promote_types, [t.dtype for t in floating])
            return value.to(dtype)

        args, kwargs = tree_map(as_operand, (args, kwargs))
        return args, kwargs, False

    def _number(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            self.numbers[id(value)] = value
        return value

    def placeholder(self, target: Any, args: tuple, kwargs: dict) -> Any:
        value = super().placeholder(target, args, kwargs)
        return self._number(value) if str(target).startswith("number") else value

    def _function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if target is marks.mark_loss:
            self.loss = args[0].reshape(())
        elif target is marks.mark_aux:
            self.aux[args[0]] = args[1]
        elif target is marks.mark_gradients:
            self.gradients = list(args)
        elif target in _ASSERTIONS:
            return None
        elif str(target).startswith("transformers.grouped_mm_fallback"):
            return torch.ops.ws.grouped_mm(*args, *kwargs.values())
        elif _target_name(target) == "tag_activation_checkpoint":
            return args[0](*args[1:])
        elif target is torch.scalar_tensor and isinstance(args[0], torch.Tensor):
            # a result that Python reads as a number: not one that promotes types any more
            return args[0].detach().to(kwargs.get("dtype") or torch.get_default_dtype()).clone()
        elif target in _NUMBERS and any(isinstance(a, torch.Tensor) for a in args):
            return _NUMBERS[target](*args)
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if target == "item":
            return self._number(as_number(args[0]))
        if self.numbers:
            args, kwargs, only = self._operands(args, kwargs)
            if only:
                return self._number(super().call_method(target, args, kwargs))
        return super().call_method(target, args, kwargs)

    def boundaries(self) -> dict[str, torch.Tensor]:
        """Module path (`path#2` at its second call) -> the last value it made, in order of completion."""
        order = {n: i for i, n in enumerate(self.module.graph.nodes)}
        found: dict[str, torch.Tensor] = {}
        for path, node in sorted(self.calls.items(), key=lambda entry: order[entry[1]]):
            value = self.env.get(node)
            if isinstance(value, torch.Tensor):
                found[path] = value
        return found


def as_number(tensor: torch.Tensor) -> torch.Tensor:
    """What stands for `tensor.item()` in a graph: a tensor of no dimensions, which promotes types as a number does."""
    value = tensor.detach().reshape(())
    if value.is_floating_point():
        return value.to(torch.float64)
    return value if value.dtype == torch.bool else value.to(torch.int64)


def _pair(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    like = a if isinstance(a, torch.Tensor) else b
    number = [v if isinstance(v, torch.Tensor) else torch.full((), v, dtype=torch.float64, device=like.device) for v in (a, b)]
    dtype = torch.promote_types(number[0].dtype, number[1].dtype)
    return number[0].to(dtype), number[1].to(dtype)


def _quotient(a: Any, b: Any) -> torch.Tensor:
    """Of two numbers: Python divides whole ones to a double; a tensor with dimensions divides as ever."""
    whole = [isinstance(v, int) or (isinstance(v, torch.Tensor) and v.dim() == 0 and not v.is_floating_point()) for v in (a, b)]
    if all(whole):
        a, b = _pair(a, b)
        return a.to(torch.float64) / b.to(torch.float64)
    return a / b


_NUMBERS: dict[Any, Callable[..., Any]] = {
    torch.sym_min: lambda a, b: torch.minimum(*_pair(a, b)),
    torch.sym_max: lambda a, b: torch.maximum(*_pair(a, b)),
    torch.sym_float: lambda a: a.to(torch.float64),
    torch.sym_int: lambda a: a.to(torch.int64),
    torch.sym_not: lambda a: a.logical_not(),
    torch.sym_ite: torch.where,
    operator.truediv: _quotient,
}
"""Arithmetic on Python numbers, where the number is a value of the graph."""

_PROPERTIES: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "SIZE": lambda t, dim: t.shape[dim],
    "STRIDE": lambda t, dim: t.stride(dim),
    "STORAGE_OFFSET": lambda t, dim: t.storage_offset(),
}

_ASSERTIONS = {
    torch._check, torch._check_is_size, torch._check_value, torch._check_type, torch._check_index,
    torch._assert, torch._assert_async, torch.ops.aten._assert_async.msg, torch.ops.aten._assert_async.default,
    torch.ops.aten._assert_scalar.default,
}  # fmt: skip
"""Assertions about data, which libraries make where they are traced; the user's own are refused (`_check_asserts`)."""

_ASSERTS_OF_PYTHON = {torch._assert, torch._assert_async, torch.ops.aten._assert_async.msg, torch.ops.aten._assert_async.default}

_RANDOM = re.compile(r"drop|rand|bernoulli|normal|uniform|exponential|multinomial|attention|poisson|rrelu|gumbel|cauchy|geometric")
_RECURRENT = re.compile(r"^(lstm|gru|rnn_tanh|rnn_relu)$")


def user_line(trace: str) -> str | None:
    """`file.py:line` of the innermost frame of the user's code in a stack trace."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
    for name, line in reversed(frames):
        if is_user_file(name):
            return f"{os.path.basename(name)}:{line}"
    return None


def _module_id(key: str) -> int:
    head = key.split("@")[0]
    return int(head) if head.isdigit() else -1


def _call_suffix(key: str) -> str:
    call = key.partition("@")[2]
    return f"#{int(call) + 1}" if call.isdigit() else ""


def _target_name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _is_autocast(node: fx.Node) -> bool:
    if node.op != "call_function" or _target_name(node.target) != "_enter_autocast":
        return False
    return len(node.args) < 3 or node.args[2] is not False  # (device, dtype, enabled, cache): switched off is no conflict


def _is_checkpoint(node: fx.Node) -> bool:
    return node.op == "call_function" and _target_name(node.target) == "tag_activation_checkpoint"


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph)


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
        if number or (wrapped and all(user.target == "item" for user in node.users)):
            found.append(Argument("number", name, as_tensor=wrapped))
            continue
        if not isinstance(value, torch.Tensor):
            raise CaptureRefused(f"{name}, a {type(value).__name__}, is an input of the graph")
        in_module = "_parameters[" in name or "_buffers[" in name
        kind = f"{value.dtype} {value.device} {value.dim()} {value.requires_grad}"
        found.append(Argument("tensor", name, _root(source) == "L['batch']", in_module, of=kind))
    return found


def _name(source: Any) -> str:
    return source.name() if callable(source.name) else source.name  # a method in older versions


def _root(source: Any) -> str:
    while getattr(source, "base", None) is not None:
        source = source.base
    return _name(source)


def _check_marks(module: fx.GraphModule) -> None:
    """Errors about the loss, as early as its graph is known."""
    losses = []
    for node in module.graph.nodes:
        if node.target is marks.mark_bad_loss:
            raise BadLoss(
                f"loss_fn returned a {node.args[0]}", hint="return a scalar tensor, or (loss, aux) with aux a dict of tensors"
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
            raise BadLoss(f"the loss has shape {tuple(value.shape)}", hint="reduce it to a scalar, for example with .mean()")
        if not value.is_floating_point():
            raise BadLoss(f"the loss has dtype {value.dtype}", hint="a loss must be a floating-point scalar")


def _check_replaced(module: fx.GraphModule) -> None:
    """A function of torch's that somebody put another in the place of: torch itself would call that one from inside."""
    for node in module.graph.nodes:
        function = node.target
        if node.op == "call_function" and isinstance(function, types.FunctionType) and function.__module__.startswith("torch."):
            here = getattr(sys.modules.get(function.__module__), function.__name__, function)
            if here is not function:
                raise CaptureRefused(f"{function.__module__}.{function.__name__} was replaced", where=_where(node))


def _check_backward(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if (node.op == "call_method" and node.target == "backward") or node.target is torch.autograd.backward:
            raise CaptureRefused("loss.backward() is called inside of the loss, which fills p.grad", where=_where(node))


def _where(node: fx.Node) -> str | None:
    return user_line(node.meta.get("stack_trace") or "")


def _check_asserts(module: fx.GraphModule) -> None:
    """`assert` on the data of a tensor in the user's own code: eager stops there, before the update."""
    for node in module.graph.nodes:
        if node.target in _ASSERTS_OF_PYTHON:
            frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
            if frames and is_user_file(frames[-1][0]) and "site-packages" not in frames[-1][0]:
                where = f"{os.path.basename(frames[-1][0])}:{frames[-1][1]}"
                raise CaptureRefused("an assert looks at the data of a tensor; a captured step would go on", where=where)


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
        yield f"{node.op} {target} {one(node.args)} {one(node.kwargs)} {paths[-1:]}"


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
        return f"{function.__module__}.{function.__qualname__} {function.__code__.co_code.hex()}"
    if isinstance(function, str | torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return str(function)
    return f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', function)}"
