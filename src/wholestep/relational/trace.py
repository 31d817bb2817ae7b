"""A message function as a graph of operators over edges, each with the line of the user's that made it.

In: the function and tensors like those it will be given. Out: `Traced`. The number of edges is a prime that divides no other size,
so that the dimension of edges is known wherever it is. What a trace cannot hold is refused: numbers that depend on how many edges
there are (a second trace with another number shows them), `torch.no_grad`, derivatives of the user's own, decisions by data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from wholestep.errors import UnsupportedModel

Like = Mapping[str, Mapping[str, Tensor]]
Run = Callable[..., Tensor]
PRIMES = (10_007, 20_011, 30_011, 40_009, 50_021, 60_013, 70_001, 80_021)
IDS = ("relation", "target", "source type", "destination type")
"""Of an edge, in the order in which the function is given them."""
_SOURCES = (("src", "nodes"), ("dst", "nodes"), ("edge", "edges"))


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    graph: fx.Graph
    edges: int
    """The number of edges that stands for any."""
    inputs: tuple[tuple[str, str], ...]
    """For every placeholder (what it is: src, dst, edge, param, or one of IDS; its name)."""


def trace(run: Run, like: Like) -> Traced:
    """`run(src, dst, edge, params, *ids)` calls the message function; `like` holds nodes, edges and params by name."""
    edges, other = _free_primes(like)
    first, second = (_graph(run, like, count) for count in (edges, other))
    _refuse_counted(first, second, edges, other)
    inputs = [(kind, name) for kind, home in _SOURCES for name in like[home]]
    inputs += [("param", name) for name in like["params"]] + [(name, "") for name in IDS]
    return Traced(first, edges, tuple(inputs))


def _free_primes(like: Like) -> tuple[int, int]:
    sizes = {size for tensors in like.values() for t in tensors.values() for size in t.shape if size}
    first, second, *_ = (prime for prime in PRIMES if all(size % prime for size in sizes))
    return first, second


def _arguments(like: Like, edges: int) -> tuple[Any, ...]:
    rowed = [
        {name: torch.empty(edges, *t.shape[1:], dtype=t.dtype) for name, t in like[home].items()}
        for _, home in _SOURCES
    ]
    params = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in like["params"].items()}
    return *rowed, params, *(torch.empty(edges, dtype=torch.int64) for _ in IDS)


def _graph(run: Run, like: Like, edges: int) -> fx.Graph:
    def noted(*args: Any) -> Tensor:
        with _Lines(), _Whole(edges):
            return run(*args)

    with torch.inference_mode(False), torch.enable_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        # written in place is only what the function made itself, which is replaced by new values
        traced = make_fx(torch.func.functionalize(noted), tracing_mode="fake")(*_arguments(like, edges))
    traced.graph.eliminate_dead_code()
    _write_anew(traced.graph)
    return traced.graph


def _write_anew(graph: fx.Graph) -> None:
    """torch's own code writes in place to what it has just made (rms_norm): nobody else reads that."""
    for node in graph.nodes:
        before: Any = next(iter(node.args), None)
        if not getattr(getattr(node.target, "_schema", None), "is_mutable", False) or not isinstance(before, fx.Node):
            continue
        name = str(node.target._schema.name).removeprefix("aten::")
        returns: Any = getattr(getattr(before.target, "_schema", None), "returns", ())
        fresh = len(returns) == 1 and returns[0].alias_info is None and set(before.users) == {node}
        if fresh and name.endswith("_") and hasattr(torch.ops.aten, name[:-1]):
            node.target = getattr(getattr(torch.ops.aten, name[:-1]), node.target._overloadname)


# ---- what a trace does not hold ----


def refuse_own_derivatives(run: Run, like: Like) -> None:
    """Of a torch.autograd.Function a trace holds the forward only: its own derivative would be lost."""
    edges = _free_primes(like)[0]
    with torch.inference_mode(False), torch.enable_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        arguments = _arguments(like, edges)
        for tensors in arguments[:4]:
            for t in tensors.values():
                t.requires_grad_(t.is_floating_point())
        with _Lines():
            out = run(*({n: t.clone() for n, t in given.items()} for given in arguments[:4]), *arguments[4:])
    seen, front = set(), [getattr(out, "grad_fn", None)]
    while front:
        node = front.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            raise UnsupportedModel(
                f"the message function calls {type(node).__name__.removesuffix('Backward')}, a torch.autograd.Function",
                hint="write it in plain PyTorch, whose derivative is known",
            )
        front += [before for before, _ in node.next_functions]


def _refuse_counted(first: fx.Graph, second: fx.Graph, edges: int, other: int) -> None:
    """Numbers may be sizes of the dimension of edges, and depend on their number in no other way."""
    twins: dict[fx.Node, fx.Node] = {}

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, fx.Node):
            return twins.get(a) is b
        if isinstance(a, list | tuple):
            return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
        if isinstance(a, dict):
            return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        if type(a) is int and type(b) is int and a % edges == 0:
            return a * other == b * edges
        return bool(a == b) or (a != a and b != b)

    for one, two in zip(first.nodes, second.nodes, strict=False):
        if one.target != two.target or not same((one.args, one.kwargs), (two.args, two.kwargs)):
            raise refused(one, "it depends on the number of edges", "no number of theirs is known before a graph is")
        twins[one] = two
    if len(first.nodes) != len(second.nodes):
        raise UnsupportedModel(
            "the message function depends on the number of edges", hint="it has to work edge by edge"
        )


def refused(node: fx.Node, what: str, hint: str) -> UnsupportedModel:
    where = node.meta.get("line")
    if node.target is torch.ops.aten.copy_.default and isinstance(node.args[1], fx.Node):  # what was written there
        where = node.args[1].meta.get("line")
    return UnsupportedModel(f"{node.target} in the message function: {what}", where=where, hint=hint)


# ---- operators that stay whole, and lines ----


class _Whole(TorchFunctionMode):
    """What torch would take apart into operators that have edges elsewhere than in dimension 0 stays one operator: products of
    more than matrices, einsum, and dropout, whose parts write in place."""

    def __init__(self, edges: int) -> None:
        super().__init__()
        self.edges = edges

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():
            raise UnsupportedModel(
                "the message function switches gradients off", where=_users_line(), hint="detach what has none"
            )
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is torch.einsum:
            return self._einsum(*args)
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and len(args) == 2 and not kwargs:
            return self._matmul(*args)
        return func(*args, **kwargs)

    def _rowed(self, t: Tensor) -> bool:
        return t.dim() > 0 and t.shape[0] == self.edges

    def _matmul(self, left: Tensor, right: Tensor) -> Tensor:
        three = left.dim() == right.dim() == 3 and self._rowed(left) and self._rowed(right)
        if max(left.dim(), right.dim()) < 3 or three or not (self._rowed(left) or self._rowed(right)):
            return torch.matmul(left, right)
        return torch.ops.ws.row_matmul(left, right)  # type: ignore[no-any-return]

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dim() < 3 or not self._rowed(x) or weight.dim() != 2:
            return F.linear(x, weight, bias)
        out = self._matmul(x, weight.t())
        return out if bias is None else out + bias

    def _einsum(self, equation: Any, *operands: Any) -> Tensor:
        if len(operands) == 1 and isinstance(operands[0], list | tuple):
            operands = tuple(operands[0])
        if not isinstance(equation, str) or not any(map(self._rowed, operands)):
            return torch.einsum(equation, *operands)
        product = self._known_product(equation.replace(" ", ""), operands)
        return torch.ops.ws.row_einsum(equation, list(operands)) if product is None else product

    def _known_product(self, equation: str, operands: tuple[Tensor, ...]) -> Tensor | None:
        """A row, or one per head, times the matrix of its relation or type."""
        letters = dict(zip(dict.fromkeys(c for c in equation if c.isalpha()), "abcdefgh", strict=False))
        form = "".join(letters.get(c, c) for c in equation)
        if not all(map(self._rowed, operands)) or form not in ("ab,abc->ac", "abc,abcd->abd", "abc,acd->abd"):
            return None
        left, right = operands
        if form == "abc,acd->abd":
            return self._matmul(left, right)
        return self._matmul(left.unsqueeze(-2), right).squeeze(-2)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if inplace or not training or not 0 < p <= 1:
            return F.dropout(x, p, training, inplace)
        return torch.native_dropout(x, p, True)[0]


_NUMBERS = (torch.int64, torch.int32)
_OF_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Lines(TorchDispatchMode):
    """Every traced node gets the line of the user's that made it; what reads values is refused by its line."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_numbers = func is torch.ops.aten.index.Tensor and all(t is None or t.dtype in _NUMBERS for t in args[1])
        if not by_numbers and _OF_DATA & set(func.tags):
            raise UnsupportedModel(
                f"{func} in the message function: what comes of it depends on values", where=_users_line(),
                hint="use torch.where, which computes for every edge",
            )  # fmt: skip
        out, mode = func(*args, **(kwargs or {})), get_proxy_mode()
        if mode is not None:
            node = next(iter(reversed(mode.tracer.graph.nodes)))
            node.meta.setdefault("line", _users_line())
        return out


def _users_line() -> str | None:
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THEIRS):
        frame = frame.f_back
    return None if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_NOT_THEIRS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), contextlib.__file__)
