"""What a loss sees while it runs for us: the same torch, with keyed randomness and our attention.

Two modes, used alike when a step is traced and when eager PyTorch runs as its reference, so that both draw the same bits:

- `FunctionLevel` works above autograd. It swaps dropout and scaled-dot-product attention for the `ws` operators. When a step
  is traced it also finds losses that are better computed in chunks.
- `DispatchLevel` works below autograd. It swaps every other random operator for keyed arithmetic, and refuses those it does
  not know.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from wholestep import compat
from wholestep.capture.chunked_loss import ChunkedLoss
from wholestep.capture.keyed_draws import KEYED
from wholestep.capture.sites import Sites
from wholestep.errors import CaptureRefused
from wholestep.ops import recurrent
from wholestep.ops.attention import scaled_dot_product_attention
from wholestep.ops.record import arguments_of, record_of

ws = torch.ops.ws

_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
# not `train/` or `nn/`: models live there, and their lines are what a reader wants to see
_OURS = tuple(
    _PACKAGE + part
    for part in (
        "api.py",
        "capture",
        "compat.py",
        "graph",
        "lower",
        "ops",
        "passes",
        "relational",
        "runtime",
        "schedule",
        "verify",
    )
)


def is_user_file(name: str) -> bool:
    """Neither torch's, nor ours, nor Python's own, nor generated."""
    return not name.startswith((_TORCH_FOLDER, *_OURS, "<")) and not _is_of_python(name)


def _is_of_python(name: str) -> bool:
    return name.startswith(_STANDARD_LIBRARY) and not _is_installed(name)


def _is_installed(name: str) -> bool:
    return "site-packages" in name or "dist-packages" in name


def is_own_file(name: str) -> bool:
    """Written by the user: neither Python's own nor an installed library's."""
    return is_user_file(name) and not _is_installed(name)


def user_source() -> str | None:
    """`file.py:line` of the innermost frame of the user's code (or of the library that holds the model)."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_user_file(name):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


class ScalarDraw:
    """`torch.rand([])`, not drawn yet: HF compares one with `layerdrop` for every layer, which is decidable when that is 0.

    Anything else done with it draws for real.
    """

    def __init__(self, draw: Callable[[], torch.Tensor]) -> None:
        self._draw = draw
        self._value: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        if self._value is None:
            self._value = self._draw()
        return self._value

    def __lt__(self, probability: Any) -> Any:
        decided = self._decided(probability)
        return self.tensor() < probability if decided is None else not decided

    def __ge__(self, probability: Any) -> Any:
        decided = self._decided(probability)
        return self.tensor() >= probability if decided is None else decided

    def _decided(self, probability: Any) -> bool | None:
        """Whether the draw is certainly not below `probability`; refused when it is a number and left to chance."""
        if not isinstance(probability, int | float):
            return None
        if probability <= 0:
            return True
        raise CaptureRefused(
            f"a layer is skipped at random (probability {probability}): which layers run is decided in Python",
            where=compat.noted_source() or user_source(),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        def real(value: Any) -> Any:
            return value.tensor() if isinstance(value, ScalarDraw) else value

        return func(*map(real, args), **{k: real(v) for k, v in (kwargs or {}).items()})


def _forward_operator(name: str) -> None:
    """Python looks operators up on the class, where `__getattr__` is not asked."""

    def operator(self: ScalarDraw, *others: Any) -> Any:
        return getattr(self.tensor(), name)(*(o.tensor() if isinstance(o, ScalarDraw) else o for o in others))

    setattr(ScalarDraw, name, operator)


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "pow", "rpow", "neg", "abs", "gt", "le",
    "bool", "float", "int",
):  # fmt: skip
    _forward_operator(f"__{_name}__")


class FunctionLevel(TorchFunctionMode):
    """Dropout, attention and recurrent layers become `ws` operators."""

    def __init__(self, sites: Sites, *, on_gpu: bool = False, chunked: ChunkedLoss | None = None) -> None:
        super().__init__()
        self.sites, self.on_gpu, self.chunked = sites, on_gpu, chunked
        self.unrolled = False
        """Whether a recurrent layer was met, which tracing unrolls over its time steps."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        # vmap knows torch's operators, and which of them draw anew for every row; ours it would call row by row
        if compat.in_vmap():
            return func(*args, **kwargs)
        if func is F.dropout or func is torch.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            # its body runs with this mode switched off, so the two functions it calls are swapped by name
            with _patched(F, "dropout", self._dropout), _patched(F, "scaled_dot_product_attention", self._attention):
                return func(*args, **kwargs)
        if getattr(func, "__name__", "") in _RECURRENT and not kwargs:
            # oneDNN's whole-layer LSTM keeps a workspace for its backward only while autograd runs: not replayable
            with compat.without_onednn():
                return self._recurrent(func, args)
        if func is F.ctc_loss or func is torch.ctc_loss:
            args, kwargs = _lengths_beside(args, kwargs)
        if func is torch.rand and _is_scalar_size(args, kwargs):
            options = {k: v for k, v in kwargs.items() if k != "size"}
            return ScalarDraw(lambda: func([1], **options).reshape(()))  # not of size [], which would come back here
        return func(*args, **kwargs) if self.chunked is None else self.chunked.call(func, args, kwargs)

    def _dropout(
        self,
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        train: bool | None = None,
    ) -> torch.Tensor:
        if not (training if train is None else train) or p == 0.0:
            return input
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        dropped = ws.dropout(input, float(p), self.sites.next_key(input.device, input.shape))
        return input.copy_(dropped) if inplace else dropped

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        device = query.device.type
        if torch.is_autocast_enabled(device):  # autocast lowers attention's inputs; it does not know our operator
            dtype = torch.get_autocast_dtype(device)
            query, key, value = (t.to(dtype) if t.dtype == torch.float32 else t for t in (query, key, value))
            if attn_mask is not None and attn_mask.dtype == torch.float32:
                attn_mask = attn_mask.to(dtype)
        drawn = (*query.shape[:-1], key.shape[-2])
        if not 0.0 <= dropout_p <= 1.0:
            raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
        site = self.sites.next_key(query.device, drawn) if dropout_p > 0.0 else None
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, key=site, on_gpu=self.on_gpu
        )

    def _recurrent(self, func: Callable, args: tuple) -> Any:
        """nn.LSTM and its kin, layer by layer, with keyed dropout between them; each by cuDNN on a GPU.

        Elsewhere torch's tracing decomposes these functions in Python over time. It forgets their dropout (seen in 2.13: its
        condition is never true), so the layers are taken apart before it gets to that.
        """
        packed = isinstance(args[1], torch.Tensor) and args[1].dtype == torch.int64 and args[1].dim() == 1
        # packed: (data, sizes, hx, weights, biases, layers, dropout, train, bidirectional); else the same without sizes,
        # and with batch_first at the end
        at = 2 if packed else 1
        hidden, weights, biases, layers, dropout, train, both = args[at : at + 7]
        states = tuple(hidden) if isinstance(hidden, tuple | list) else (hidden,)
        whole = self.on_gpu and not packed and recurrent.applies(args[0], states, train=train)
        self.unrolled |= not whole
        if not whole and (dropout == 0.0 or not train or layers == 1):
            return func(*args)
        ways, per_layer = (2 if both else 1), len(weights) // layers
        turned = whole and args[at + 7]  # batch_first, which the operator does not know
        value, finals = args[0], []
        for layer in range(layers):
            mine = tuple(s[layer * ways : (layer + 1) * ways] for s in states)
            chosen = list(weights[layer * per_layer : (layer + 1) * per_layer])
            if whole:
                value = value.transpose(0, 1) if turned else value
                value, *final = recurrent.layer(func.__name__, *_in_one_dtype(value, mine, chosen), both)
                value = value.transpose(0, 1) if turned else value
            else:
                hx = mine if isinstance(hidden, tuple | list) else mine[0]
                head = (value, args[1]) if packed else (value,)
                value, *final = func(*head, hx, chosen, biases, 1, 0.0, train, both, *args[at + 7 :])
            finals.append(final)
            if layer < layers - 1 and train:
                value = self._dropout(value, dropout)
        return (value, *(torch.cat(parts) for parts in zip(*finals, strict=True)))


def _in_one_dtype(x: torch.Tensor, states: tuple, weights: list) -> tuple[torch.Tensor, list, list]:
    """As autocast has it, which does not know our operator: all in its dtype."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, list(states), weights
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), [s.to(dtype) for s in states], [w.to(dtype) for w in weights]


def _lengths_beside(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """CTC's lengths on the device of what they measure: eager takes them from anywhere, but not while a mode is in force."""
    names = ("log_probs", "targets", "input_lengths", "target_lengths")
    given = dict(zip(names, args)) | kwargs
    device = given["log_probs"].device
    moved = {n: given[n].to(device) for n in names[1:] if isinstance(given[n], torch.Tensor)}
    return tuple(moved.get(n, v) for n, v in zip(names, args)) + args[len(names) :], {
        n: moved.get(n, v) for n, v in kwargs.items()
    }


_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


def _is_scalar_size(args: tuple, kwargs: dict) -> bool:
    if len(args) == 1 and isinstance(args[0], list | tuple) and len(args[0]) == 0:
        return not set(kwargs) - {"device", "dtype"}
    return not args and "size" in kwargs and len(kwargs["size"]) == 0


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


class DispatchLevel(TorchDispatchMode):
    """Random operators draw from the step's keys; the fingerprint tells whether two runs did the same."""

    supports_higher_order_operators = True

    def __init__(self, sites: Sites) -> None:
        super().__init__()
        self.sites = sites

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and not _draws_nothing(func, args, kwargs):
            return self._random(func, args, kwargs)
        return func(*args, **kwargs)

    def _random(self, func: Any, args: tuple, kwargs: dict) -> Any:
        handler = KEYED.get(func)
        own = any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))
        if handler is None or own:
            reason = "with its own generator" if own else "that has no keyed form yet"
            raise CaptureRefused(
                f"the model draws random numbers by {func} {reason}", where=compat.noted_source() or user_source()
            )
        return handler(self.sites, *args, **kwargs)


def _draws_nothing(func: Any, args: tuple, kwargs: dict) -> bool:
    draws = record_of(func).draws
    return draws is not None and not draws(arguments_of(func, args, kwargs))


@contextlib.contextmanager
def keyed(sites: Sites, *, on_gpu: bool = False, chunked: ChunkedLoss | None = None) -> Iterator[FunctionLevel]:
    """Run a loss with keyed randomness and our attention; yields the upper mode."""
    upper = FunctionLevel(sites, on_gpu=on_gpu, chunked=chunked)
    with DispatchLevel(sites), upper:
        yield upper
