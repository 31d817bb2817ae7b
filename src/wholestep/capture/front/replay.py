"""Dynamo's graph run again, node by node, on other tensors: fakes, while a step is traced.

Every operation is annotated with its module and its line of the user's code. The marks tell which value is the loss; Python
numbers that are values of the graph (`loss.item()`, or an input that varies) are tensors of no dimensions, which promote types
as numbers do.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import fx
from torch._dynamo import utils as dynamo
from torch._ops import HigherOrderOperator
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves, tree_map

from wholestep import compat
from wholestep.capture.front import traced as marks
from wholestep.capture.front.checkpoints import Checkpointed
from wholestep.capture.front.modes_left import about_derivatives, default_dtype_put_back, modes_put_back
from wholestep.capture.front.numbers import ON_HOST
from wholestep.capture.front.quiet import quiet
from wholestep.capture.modes import is_user_file
from wholestep.capture.sites import TooFewKeys
from wholestep.errors import CaptureRefused, WholestepError
from wholestep.graph.mesh import FORKED, LAYOUT

MATCHED = "matched"
"""In the facts of a node: the line of a recipe whose pattern it is part of."""
MARKS = (MATCHED, LAYOUT, FORKED)
"""What a rewrite says of a node, for all that is made of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Assumed:
    """Something about data that the graph takes for granted."""

    holds: torch.Tensor
    """A 0-d bool."""
    where: str | None = None
    """The line of the user's code."""
    fact: Any = None
    """For one about sizes: the expression."""


class Watcher(Protocol):
    """Told before and after nodes run; nodes with a twin take its value instead."""

    twins: Mapping[fx.Node, fx.Node]

    def before(self, node: fx.Node) -> None: ...

    def after(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> None: ...


class Replay(fx.Interpreter):
    """Runs the graph node by node; every operation is annotated with its module and source line."""

    def __init__(
        self, module: fx.GraphModule, paths: Mapping[int, str], device: torch.device, watch: Watcher | None = None
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.paths, self.device, self.watch = paths, device, watch
        self.loss: torch.Tensor | None = None
        self.aux: dict[str, torch.Tensor] = {}
        self.gradients: list[torch.Tensor] | None = None
        self.assumed: list[Assumed] = []
        self.cudnn: list[bool] = []
        """Whether it was used, outside of each block of torch.backends.cudnn.flags."""
        self.entered: list[Any] = []
        """Autocasts and inference modes that are not left yet."""
        self.checkpointed = Checkpointed()
        self.sources: dict[str, str | None] = {}
        self.calls: dict[str, fx.Node] = {}
        self.ways: dict[str, list[Any]] = {}
        """Module path -> its calls: Dynamo numbers those of a shared module apart for each of its names."""
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
        if self.watch is None:
            return self._run_noted(n, stack)
        twin = self.watch.twins.get(n)
        if twin is not None:
            self._note_calls(n, stack)
            return self.env[twin]
        self.watch.before(n)
        value = self.env[n] = self._run_noted(n, stack)
        self.watch.after(n, self.env)
        return value

    def _run_noted(self, n: fx.Node, stack: Mapping[str, Any]) -> Any:
        path = self._path(stack)
        source = self._source(n.meta.get("stack_trace"))
        marked = ((fact, n.meta.get(fact)) for fact in MARKS)
        named = (("module", path), ("source", source), *marked)
        facts = {k: v for k, v in named if v}
        with compat.annotate(**facts) if facts else contextlib.nullcontext():
            try:
                value = self._as_traced(n, super().run_node(n))
            except (WholestepError, CaptureRefused, TooFewKeys):
                raise
            except compat.SizeFromData as error:
                raise CaptureRefused(compat.about_picked_places(error), where=source) from error
            except Exception as error:
                lines = str(error).strip().splitlines() or [""]
                told = about_derivatives(str(error)) or f"{type(error).__name__}: {lines[0][:200]}"
                raise CaptureRefused(told, where=source) from error
        self._note_calls(n, stack)
        return value

    def _as_traced(self, n: fx.Node, value: Any) -> Any:
        """A tensor that is made of numbers alone is no number, and has the type that Dynamo saw: numbers are doubles here."""
        known = n.meta.get("example_value")
        if isinstance(
            n.target, HigherOrderOperator
        ):  # numbers that a function within the graph reads are doubles there
            return tree_map(_of_type, value, known)
        made = id(value) in self.numbers or n.target is torch._refs.tensor
        if not made or not isinstance(known, torch.Tensor) or isinstance(n.target, _NUMPY_CALLS):
            return value
        return value.to(known.dtype, copy=True)

    def _note_calls(self, n: fx.Node, stack: Mapping[str, Any]) -> None:
        for key, way in stack.items():
            inner = self.paths.get(_module_id(key))
            if inner:
                ways = self.ways.setdefault(inner, [])
                if (key, way) not in ways:
                    ways.append((key, way))
                number = ways.index((key, way)) + 1
                self.calls[inner if number == 1 else f"{inner}#{number}"] = n

    def _path(self, stack: Mapping[str, Any]) -> str:
        return path_of(stack, self.paths)

    def _source(self, trace: str | None) -> str | None:
        if not trace:
            return None
        if trace not in self.sources:
            self.sources[trace] = user_line(trace)
        return self.sources[trace]

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        only = _makes_numpy_number(target)
        if self.numbers:
            if target in (operator.getitem, operator.setitem):
                args = (args[0], self._cut(args[1]), *args[2:])
            args, kwargs, numbers_alone = self._operands(args, kwargs)
            only |= numbers_alone
        value = self._function(target, args, kwargs)
        return self._number(value) if only else value

    def _cut(self, index: Any) -> Any:
        """An index with numbers as ends of slices: sizes follow from them, so that they are read on the host."""
        if isinstance(index, tuple):
            return tuple(map(self._cut, index))
        if not isinstance(index, slice):
            return index
        return slice(*(v.item() if id(v) in self.numbers else v for v in (index.start, index.stop, index.step)))

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
        elif target is marks.mark_assumed:
            self._assume(*args)
            return None
        elif target is marks.mark_cudnn:
            self._use_cudnn(args[0])
            return None
        elif target in _ASSERTS:
            self._assume(args[0], True)
            return None
        elif target in _FACTS:
            self._note_fact(*args)
            return None
        elif target is torch._check_is_size:
            return None
        elif target in _ENTERS:
            self.entered.append(target(*args, **kwargs))
            return self.entered[-1]
        elif target in _EXITS and args[0] in self.entered:
            self.entered.remove(args[0])
        elif str(target).startswith("transformers.grouped_mm_fallback"):
            return torch.ops.ws.grouped_mm(*args, *kwargs.values())
        elif target_name(target) == "tag_activation_checkpoint":
            return self.checkpointed.run(args[0], args[1:])
        elif target is torch.scalar_tensor and isinstance(args[0], torch.Tensor):
            # a result that Python reads as a number: not one that promotes types any more
            return args[0].detach().to(kwargs.get("dtype") or torch.get_default_dtype()).clone()
        elif target is torch._refs.tensor and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args[0])):
            return _tensor_of(args[0]).to(**kwargs)
        elif target in _NUMBERS and any(isinstance(a, torch.Tensor) for a in args):
            return _NUMBERS[target](*args)
        return super().call_function(target, tuple(map(_reading_tensors, args)), kwargs)

    def _use_cudnn(self, enabled: bool | None) -> None:
        """Which layers cuDNN takes is decided while tracing."""
        if enabled is not None:
            self.cudnn.append(torch._C._get_cudnn_enabled())
        torch._C._set_cudnn_enabled(self.cudnn.pop() if enabled is None else enabled)

    def run(self, *args: Any, **options: Any) -> Any:
        with modes_put_back(), default_dtype_put_back(), quiet():
            try:
                result = super().run(*args, **options)
                self.checkpointed.write_again()
                return result
            finally:
                while self.entered:
                    self.entered.pop().__exit__(None, None, None)

    def _note_fact(self, condition: Any, message: Any = "", *_: Any) -> None:
        if isinstance(condition, torch.Tensor):  # about a number that was read from a tensor
            if not _OF_COURSE.search(str(message)):
                self._assume(condition, True)
        elif isinstance(condition, torch.SymBool) and not statically_known_true(condition):
            self._assume(condition, True)

    def _assume(self, condition: Any, truth: bool) -> None:
        if isinstance(condition, torch.SymBool | torch.SymInt):  # about a size that a mask decides
            told = condition if isinstance(condition, torch.SymBool) else condition != 0
            holds = torch.ops.ws.require(torch.sym_ite(told, int(truth), int(not truth)), self.device)
            self.assumed.append(Assumed(holds, compat.noted_source(), told.node.expr))
            return
        if not isinstance(condition, torch.Tensor):  # known while tracing: it is as assumed, or Dynamo had raised
            condition = torch.full((), bool(condition))
        holds = condition.detach().reshape(()) != 0
        self.assumed.append(Assumed(holds if truth else holds.logical_not(), compat.noted_source()))

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
            if isinstance(value, torch.Tensor) and not compat.of_a_transform(value):
                found[path] = value
        return found


def _of_type(value: Any, known: Any) -> Any:
    both = isinstance(value, torch.Tensor) and isinstance(known, torch.Tensor)
    return value.to(known.dtype) if both and value.dtype != known.dtype else value


_ENTERS = (torch.amp.autocast_mode._enter_autocast, torch.autograd.grad_mode._enter_inference_mode)
_EXITS = (torch.amp.autocast_mode._exit_autocast, torch.autograd.grad_mode._exit_inference_mode)


def _makes_numpy_number(target: Any) -> bool:
    """Whether what numpy returns without dimensions is a number of its own, which promotes types as Python's do."""
    return isinstance(target, _NUMPY_CALLS) and target.__name__ not in _NUMPY_ARRAYS


_NUMPY_CALLS = (dynamo.numpy_to_tensor_wrapper, dynamo.numpy_method_wrapper, dynamo.numpy_operator_wrapper)
_NUMPY_ARRAYS = {
    f"wrapped_{name}" for name in ("array", "asarray", "zeros", "ones", "full", "empty", "reshape", "squeeze", "copy")
}


def as_number(tensor: torch.Tensor) -> torch.Tensor:
    """What stands for `tensor.item()` in a graph: a tensor of no dimensions, which promotes types as a number does."""
    value = tensor.detach().reshape(())
    if value.is_floating_point():
        return value.to(torch.float64)
    return value if value.dtype == torch.bool else value.to(torch.int64)


def _reading_tensors(argument: Any) -> Any:
    """A graph that an operation is given, such as a torch.autograd.Function's: where it reads a number, it has a tensor too."""
    if not isinstance(argument, fx.GraphModule) or not argument.graph.find_nodes(op="call_method", target="item"):
        return argument
    for node in argument.graph.nodes:
        number = isinstance(node.meta.get("example_value"), torch.SymFloat | torch.SymInt)
        if number and node.target not in _NEVER_RAISE and ON_HOST not in node.meta:
            raise CaptureRefused(
                "arithmetic that may raise, on a number that varies, inside of a function of one's own",
                where=user_line(node.meta.get("stack_trace") or ""),
            )
    inner = fx.GraphModule(argument, copy.deepcopy(argument.graph))
    for node in inner.graph.find_nodes(op="call_method", target="item"):
        node.op, node.target = "call_function", as_number
    for node in inner.graph.nodes:
        if node.op == "call_function" and isinstance(node.meta.get("example_value"), torch.SymFloat | torch.SymInt):
            node.target = _NUMBERS.get(node.target, _OF_TENSORS.get(getattr(node.target, "__name__", ""), node.target))
    inner.recompile()
    return inner


def _wide(function: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda number: function(number.to(torch.float64))


_OF_TENSORS = {
    f"_sym_{name}": _wide(getattr(torch, name))
    for name in ("sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "exp", "log2")
}
"""Functions of `math`, as Dynamo writes them of numbers that vary."""
_NEVER_RAISE = {
    "item", operator.add, operator.sub, operator.mul, operator.neg, operator.pos, operator.abs, abs, torch.sym_min, torch.sym_max,
    torch.sym_float, torch.sym_not, torch.sym_ite, torch._sym_sin, torch._sym_cos, torch._sym_tanh, torch._sym_atan, as_number,
}  # fmt: skip
"""Arithmetic on numbers that is the same on tensors; `1 / n` would be infinite where Python raises."""


def _pair(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    like = a if isinstance(a, torch.Tensor) else b
    number = [
        v if isinstance(v, torch.Tensor) else torch.full((), v, dtype=torch.float64, device=like.device) for v in (a, b)
    ]
    dtype = torch.promote_types(number[0].dtype, number[1].dtype)
    return number[0].to(dtype), number[1].to(dtype)


def _tensor_of(values: Any) -> torch.Tensor:
    """`torch.tensor(values)` where some are numbers of the graph; of no shape that Dynamo would not have seen."""
    if isinstance(values, list | tuple):
        return torch.stack([_tensor_of(value) for value in values])
    return values if isinstance(values, torch.Tensor) else torch.full((), values)


def _quotient(a: Any, b: Any) -> torch.Tensor:
    """Of two numbers: Python divides whole ones to a double; a tensor with dimensions divides as ever."""
    whole = [
        isinstance(v, int) or (isinstance(v, torch.Tensor) and v.dim() == 0 and not v.is_floating_point())
        for v in (a, b)
    ]
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

_ASSERTS = {torch._assert, torch._assert_async, torch.ops.aten._assert_async.msg, torch.ops.aten._assert_async.default}
_FACTS = {
    torch._check, torch._check_value, torch._check_type, torch._check_index,
    torch.ops.aten._assert_scalar.default,
}  # fmt: skip
"""Facts about numbers that Dynamo and libraries note, and that code is compiled for."""
_OF_COURSE = re.compile(r"expression u\d+ (>= -?\d+|<= \d{10,}) on node")
"""Bounds that Dynamo writes down for every number that it has seen read."""


def user_line(trace: str) -> str | None:
    """`file.py:line` of the innermost frame of the user's code in a stack trace."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
    for name, line in reversed(frames):
        if is_user_file(name):
            return f"{os.path.basename(name)}:{line}"
    return None


def path_of(stack: Mapping[str, Any], paths: Mapping[int, str]) -> str:
    """The path of the innermost module that is known, of a node's `nn_module_stack`."""
    for key in reversed(list(stack)):
        path = paths.get(_module_id(key))
        if path is not None:
            return path
    return ""


def _module_id(key: str) -> int:
    head = key.split("@")[0]
    return int(head) if head.isdigit() else -1


def target_name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))
