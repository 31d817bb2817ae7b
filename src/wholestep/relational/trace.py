"""A message function as a graph of operators over edges, each with the line of the user's that made it.

In: graphs of torch functions, as Dynamo followed it (`follow.py`), for two numbers of edges. Out: `Traced`. The number of edges is
a prime that divides no other size, so that the dimension of edges is known wherever it is. What a trace cannot hold is refused:
numbers that depend on how many edges there are (the second graph shows them), `torch.no_grad`, decisions by data.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from wholestep.errors import UnsupportedModel, WholestepError
from wholestep.relational.messages import softmax_mark

Shapes = tuple[tuple[str, str, tuple[int, ...], torch.dtype], ...]
"""(nodes, edges or params; name; sizes, without that of nodes or edges; dtype)"""
PRIMES = (10_007, 20_011, 30_011, 40_009, 50_021, 60_013, 70_001, 80_021)
IDS = ("relation", "target", "source type", "destination type")
"""Of an edge, in the order in which the function is given them."""
_SOURCES = (("src", "nodes"), ("dst", "nodes"), ("edge", "edges"), ("param", "params"))


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    graph: fx.Graph
    edges: int
    """The number of edges that stands for any."""
    inputs: tuple[tuple[str, str], ...]
    """For every placeholder (what it is: src, dst, edge, param, or one of IDS; its name)."""


def free_primes(shapes: Shapes) -> tuple[int, int]:
    """Two numbers of edges."""
    sizes = {size for *_, shape, _ in shapes for size in shape if size}
    first, second, *_ = (prime for prime in PRIMES if all(size % prime for size in sizes))
    return first, second


def trace(graphs: Sequence[fx.GraphModule], shapes: Shapes, numbers: Sequence[int]) -> Traced:
    """`graphs`: the function with as many edges as `numbers` says, over (src, dst, edge, param, ids) one after the other."""
    first, second = (_graph(graph, shapes, count) for graph, count in zip(graphs, numbers, strict=True))
    _refuse_counted(first, second, *numbers)
    inputs = [(what, name) for what, home in _SOURCES for kind, name, *_ in shapes if kind == home]
    return Traced(first, numbers[0], (*inputs, *((name, "") for name in IDS)))


def _arguments(shapes: Shapes, edges: int) -> list[Tensor]:
    given = [
        torch.empty(shape if home == "params" else (edges, *shape), dtype=dtype, device="cpu")
        for _, home in _SOURCES
        for kind, _, shape, dtype in shapes
        if kind == home
    ]
    return given + [torch.empty(edges, dtype=torch.int64, device="cpu") for _ in IDS]


def _graph(followed: fx.GraphModule, shapes: Shapes, edges: int) -> fx.Graph:
    def noted(*args: Any) -> Any:
        relation, target = args[-len(IDS) : 2 - len(IDS)]
        with _Lines(), _Whole(edges), softmax_mark(target, relation):
            return _Again(followed).run(*args)

    try:
        with torch.inference_mode(False), torch.enable_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            # written in place is only what the function made itself, which is replaced by new values
            made = make_fx(torch.func.functionalize(noted), _TAKEN_APART, tracing_mode="fake")
            traced = made(*_arguments(shapes, edges))
    except WholestepError:
        raise
    except Exception as error:  # torch's own
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UnsupportedModel(
            f"the message function cannot be traced: {type(error).__name__}: {reason}", where=_now.line,
            hint="write it in plain PyTorch, over all edges at once",
        ) from error  # fmt: skip
    traced.graph.eliminate_dead_code()
    _write_anew(traced.graph)
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            node.meta["constant"] = getattr(traced, node.target)
    return traced.graph


_TAKEN_APART = get_decompositions([torch.ops.aten.baddbmm.default, torch.ops.aten.native_group_norm.default])
"""Into operators that are followed: a product by relation; rows apart from the number of them."""


class _Again(fx.Interpreter):
    """Runs what Dynamo followed; knows the user's line at every node."""

    def run_node(self, node: fx.Node) -> Any:
        _now.line = node.meta.get("line")
        return super().run_node(node)


class _Now(threading.local):
    line: str | None = None


_now = _Now()


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
        constants = [node.meta.get("constant") for node in (one, two)]
        alike = one.target == two.target and same((one.args, one.kwargs), (two.args, two.kwargs))
        if not alike or (constants[0] is not None and not _equal(*constants)):
            raise refused(one, "it depends on the number of edges", "no number of theirs is known before a graph is")
        twins[one] = two
    if len(first.nodes) != len(second.nodes):
        raise UnsupportedModel(
            "the message function depends on the number of edges", hint="it has to work edge by edge"
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


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
                "the message function switches gradients off", where=_now.line, hint="detach what has none"
            )
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is torch.einsum:
            return self._einsum(*args)
        if func is F.bilinear and len(args) in (3, 4) and not kwargs and all(t.dim() == 2 for t in args[:2]):
            one, other, weight, *bias = _as_autocast_has_it(func, *args)
            with torch.autocast("cpu", enabled=False):
                out = self._einsum("ai,oij,aj->ao", one, weight, other)
            return out if not bias or bias[0] is None else out + bias[0]
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and len(args) == 2 and not kwargs:
            return self._matmul(*args)
        return func(*args, **kwargs)

    def _rowed(self, t: Tensor) -> bool:
        return t.dim() > 0 and t.shape[0] == self.edges

    def _matmul(self, left: Tensor, right: Tensor) -> Tensor:
        three = left.dim() == right.dim() == 3 and self._rowed(left) and self._rowed(right)
        if max(left.dim(), right.dim()) < 3 or three or not (self._rowed(left) or self._rowed(right)):
            return torch.matmul(left, right)
        left, right = _as_autocast_has_it(torch.matmul, left, right)
        return torch.ops.ws.row_matmul(left, right)  # type: ignore[no-any-return]

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dim() < 3 or not self._rowed(x) or weight.dim() != 2:
            return F.linear(x, weight, bias)
        out = self._matmul(x, weight.t())
        return out if bias is None else out + bias.to(out.dtype)

    def _einsum(self, equation: Any, *operands: Any) -> Tensor:
        if len(operands) == 1 and isinstance(operands[0], list | tuple):
            operands = tuple(operands[0])
        if not isinstance(equation, str) or not any(map(self._rowed, operands)):
            return torch.einsum(equation, *operands)
        product = self._known_product(equation.replace(" ", ""), operands)
        if product is not None:
            return product
        cast = _as_autocast_has_it(torch.einsum, equation, *operands)
        return torch.ops.ws.row_einsum(equation, cast[1:])  # type: ignore[no-any-return]

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


def _as_autocast_has_it(function: Any, *args: Any) -> list[Any]:
    """Arguments in the dtype in which autocast gives the result. It does not know operators of ours; what is computed here to see
    its dtype is read by nobody."""
    if not torch.is_autocast_enabled("cpu"):
        return list(args)
    wanted = function(*args).dtype
    return [t.to(wanted) if isinstance(t, Tensor) and t.is_floating_point() else t for t in args]


_NUMBERS = (torch.int64, torch.int32)
_OF_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Lines(TorchDispatchMode):
    """Every traced node gets the line of the user's that made it; what reads values is refused by its line."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_numbers = func is torch.ops.aten.index.Tensor and all(t is None or t.dtype in _NUMBERS for t in args[1])
        if not by_numbers and _OF_DATA & set(func.tags):
            raise UnsupportedModel(
                f"{func} in the message function: what comes of it depends on values", where=_now.line,
                hint="use torch.where, which computes for every edge",
            )  # fmt: skip
        out, mode = func(*args, **(kwargs or {})), get_proxy_mode()
        if mode is not None:
            for node in reversed(
                mode.tracer.graph.nodes
            ):  # of several results each is a node behind the operator's own
                if "line" in node.meta or node.op == "placeholder":
                    break
                node.meta["line"] = _now.line
        return out
