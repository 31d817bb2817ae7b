"""Functions of torch's that Dynamo does not trace: others run in their place.

In: a call that Dynamo meets while it captures for us. Out: the same call of a function of ours, which Dynamo then follows
and which computes the same by operators of `ws`. Elsewhere nothing is replaced.
"""

from __future__ import annotations

import bisect
import contextlib
import operator
from collections.abc import Callable, Hashable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import (
    BuiltinVariable,
    SkipFunctionVariable,
    SymNodeVariable,
    TensorVariable,
    UserFunctionVariable,
    user_defined,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.distributions import constraints
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint_sequential

from wholestep.capture.front import traced as marks
from wholestep.capture.front.assumed import assuming
from wholestep.capture.front.number_arguments import COMPOSED, composed
from wholestep.capture.front.packed import pack_padded, pad_packed
from wholestep.capture.front.sparse import make_coo
from wholestep.ops.ctc import ctc_loss

_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def _ctc_by_name(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> torch.Tensor:  # fmt: skip
    """F.ctc_loss, whose reduction has a name."""
    return ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, _REDUCTIONS[reduction], zero_infinity)


def _is_dependent(constraint: Any) -> bool:
    return isinstance(constraint, constraints._Dependent)


def _assert(condition: Any, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _bisect_right(a: Any, x: Any, lo: int = 0, hi: int | None = None) -> int:
    """In the place of the one that is written in C: milestones of schedules."""
    first, last = lo, len(a) if hi is None else hi
    while first < last:
        middle = (first + last) // 2
        if x < a[middle]:
            last = middle
        else:
            first = middle + 1
    return first


def _bisect_left(a: Any, x: Any, lo: int = 0, hi: int | None = None) -> int:
    first, last = lo, len(a) if hi is None else hi
    while first < last:
        middle = (first + last) // 2
        if a[middle] < x:
            first = middle + 1
        else:
            last = middle
    return first


def _checkpoint_sequential(
    functions: Any, segments: int, input: Any, use_reentrant: bool | None = None, preserve_rng_state: bool = True
) -> Any:
    """torch's own, whose checkpoints are set aside for a whole step anyway."""
    for function in functions:
        input = function(input)
    return input


def _cov(
    input: torch.Tensor, *, correction: int = 1, fweights: torch.Tensor | None = None, aweights: torch.Tensor | None = None
) -> torch.Tensor:  # fmt: skip
    """torch.cov, without its warning about too few observations, for which it looks at a tensor."""
    rows = input.view(1, -1) if input.dim() < 2 else input
    if (weights := _product(fweights, aweights)) is None:
        centred = rows - (rows.sum(1) / rows.shape[1]).unsqueeze(1)
        return (centred @ centred.t().conj() / max(rows.shape[1] - correction, 0)).squeeze()
    total = weights.sum()
    taken = correction * (weights * aweights).sum() / total if aweights is not None and correction != 0 else correction
    centred = rows - ((rows * weights).sum(1) / total).unsqueeze(1)
    return (centred @ (centred * weights).t().conj() / (total - taken).clamp_min(0)).squeeze()


def _product(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return a if b is None else b if a is None else a * b


def _corrcoef(input: torch.Tensor) -> torch.Tensor:
    found = _cov(input)
    if found.dim() == 0:
        return found / found
    diagonal = found.diagonal()
    deviation = (diagonal.real if found.is_complex() else diagonal).sqrt()
    found = found / deviation.unsqueeze(1) / deviation
    return torch.complex(found.real.clip(-1, 1), found.imag.clip(-1, 1)) if found.is_complex() else found.clip(-1, 1)


IN_GRAPH: dict[Any, Callable[..., Any]] = {
    F.ctc_loss: _ctc_by_name, torch.ctc_loss: ctc_loss, torch._assert: _assert, F.gaussian_nll_loss: F.gaussian_nll_loss,
    torch.cov: _cov, torch.corrcoef: _corrcoef, torch._C._infer_size: torch.broadcast_shapes,
}  # fmt: skip
"""What Dynamo would put into its graph as it is. Data tells the size of what CTC keeps, so that cannot be traced further; and
whether the loss of a Gaussian raises, so its own Python is followed (`assumed.py`); torch.cov reads whether it is to warn."""
SKIPPED: dict[Any, Callable[..., Any]] = {
    constraints.is_dependent: _is_dependent, torch.sparse_coo_tensor: make_coo,
    rnn.pack_padded_sequence: pack_padded, rnn.pad_packed_sequence: pad_packed, checkpoint_sequential: _checkpoint_sequential,
    bisect.bisect_right: _bisect_right, bisect.bisect_left: _bisect_left,
}  # fmt: skip
"""What Dynamo refuses, in one version or in all."""


def _handler(ours: Callable[..., Any]) -> Callable[..., Any]:
    def handle(function: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        """Dynamo's; None leaves the call to the default."""
        if not getattr(assuming, "on", False):
            return None
        return tx.inline_user_function_return(UserFunctionVariable(ours), list(args), kwargs)

    return handle


for _function, _ours in IN_GRAPH.items():
    TorchInGraphFunctionVariable._get_handlers()[_function] = _handler(_ours)


def _by_numbers(plain: Callable[..., Any] | None) -> Callable[..., Any]:
    def handle(function: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        """Dynamo's, of a function that would take a number for a constant."""
        known = getattr(assuming, "on", False)
        varies = lambda value: isinstance(value, SymNodeVariable)  # noqa: E731
        constant = lambda value: value.as_python_constant() if value.is_python_constant() else None  # noqa: E731
        ours = composed(function.value, args, kwargs, varies, constant) if known else None
        if ours is not None:
            return _handler(ours)(function, tx, *args, **kwargs)
        return None if plain is None else plain(function, tx, *args, **kwargs)

    return handle


for _function in COMPOSED:
    _known = TorchInGraphFunctionVariable._get_handlers()
    _known[_function] = _by_numbers(_known.get(_function))


def _one_hot(x: torch.Tensor, num_classes: int) -> torch.Tensor:
    """F.one_hot with the checks that eager makes."""
    torch._assert_async((x >= 0).all(), "one_hot: Class values must be non-negative.")
    torch._assert_async((x < num_classes).all(), "one_hot: Class values must be smaller than num_classes.")
    return (x.unsqueeze(-1) == torch.arange(num_classes, dtype=x.dtype, device=x.device)).to(torch.int64)


def _checked_one_hot(plain: Callable[..., Any]) -> Callable[..., Any]:
    def handle(function: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        answer = plain(function, tx, *args, **kwargs)  # refuses a size that data tells
        named = {"tensor": "x", "input": "x"}
        given = {named.get(name, name): value for name, value in kwargs.items()}
        return answer if answer is not None else _handler(_one_hot)(function, tx, *args, **given)

    return handle


if (
    torch._C.DispatchKey.CompositeImplicitAutograd not in torch.ops.aten.one_hot.default.py_kernels
):  # torch 2.11 checks nothing
    _handlers = TorchInGraphFunctionVariable._get_handlers()
    _handlers[F.one_hot] = _checked_one_hot(_handlers[F.one_hot])


def _bincount(input: torch.Tensor, minlength: int) -> torch.Tensor:
    """torch.bincount of as many numbers as are counted for: a step with more of them is not this one."""
    counts: torch.Tensor = torch.ops.aten.bincount.default(input, None, minlength)
    torch._check(counts.shape[0] == minlength)
    return counts


def _counts_for(function: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.bincount(chosen, minlength=experts)`, without weights."""
    given = dict(zip(("input", "weights", "minlength"), args)) | kwargs
    wanted, found = given.get("minlength"), given.get("input")
    if "weights" in given or wanted is None or not isinstance(found, TensorVariable) or found.ndim != 1:
        return None
    if not wanted.is_python_constant() or wanted.as_python_constant() < 1:
        return None
    return _handler(_bincount)(function, tx, **given)


TorchInGraphFunctionVariable._get_handlers()[torch.bincount] = _counts_for
TensorVariable.method_bincount = lambda self, tx, *args, **kwargs: _counts_for(None, tx, self, *args, **kwargs)


def _plain_data(plain: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: Any, tx: Any, name: str) -> Any:
        """Of `weight.data` Dynamo would tell later code to look at the weight: which may have other memory by then."""
        found = plain(self, tx, name)
        if name == "data" and getattr(assuming, "on", False):
            found.source = None
        return found

    return read


TensorVariable.var_getattr = _plain_data(TensorVariable.var_getattr)


def _replacing(plain: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if getattr(assuming, "on", False):
            asked = getattr(self, name)
            ours = SKIPPED.get(asked) if isinstance(asked, Hashable) else None
            if ours is not None:
                return tx.inline_user_function_return(UserFunctionVariable(ours), list(args), kwargs)
        return plain(self, tx, args, kwargs)

    return call


SkipFunctionVariable.call_function = _replacing(SkipFunctionVariable.call_function, "value")
UserFunctionVariable.call_function = _replacing(
    UserFunctionVariable.call_function, "fn"
)  # torch 2.11 follows some of them


@contextlib.contextmanager
def _cudnn_enabled(enabled: bool = False) -> Iterator[None]:
    """In the place of torch.backends.cudnn.flags, of which only `enabled` is given."""
    marks.mark_cudnn(enabled)
    try:
        yield
    finally:
        marks.mark_cudnn(None)


def _cudnn_flags(function: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    if not getattr(assuming, "on", False) or len(args) > 1 or set(kwargs) - {"enabled"}:
        return None
    return VariableTracker.build(tx, _cudnn_enabled).call_function(tx, list(args), kwargs)


TorchInGraphFunctionVariable._get_handlers()[torch.backends.cudnn.flags] = _cudnn_flags


def _also(plain: Callable[[Any], bool], ours: Any) -> Callable[[Any], bool]:
    return lambda asked: plain(asked) or (asked is ours and getattr(assuming, "on", False))


# `state.steps += 1`: a SimpleNamespace keeps attributes as any object does, by slots that Dynamo does not know
user_defined.is_standard_setattr = _also(user_defined.is_standard_setattr, SimpleNamespace.__setattr__)
SideEffects.cls_supports_mutation_side_effects = staticmethod(
    _also(SideEffects.cls_supports_mutation_side_effects, SimpleNamespace)
)


def _first_by(better: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    def choose(*items: Any, key: Callable[[Any], Any]) -> Any:
        found, *others = items if len(items) > 1 else items[0]
        rank = key(found)
        for item in others:
            if better(key(item), rank):
                found, rank = item, key(item)
        return found

    return choose


_CHOOSERS = {max: _first_by(operator.gt), min: _first_by(operator.lt)}


def _choosing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`max(items, key=...)`, of which Dynamo knows no key."""

    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if getattr(assuming, "on", False) and self.fn in (max, min) and set(kwargs) == {"key"}:
            return tx.inline_user_function_return(VariableTracker.build(tx, _CHOOSERS[self.fn]), list(args), kwargs)
        return plain(self, tx, args, kwargs)

    return call


BuiltinVariable.call_function = _choosing(BuiltinVariable.call_function)
