"""What an implementation of ws::attention is: its signature, its record, and the head reshaping that several share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wholestep.ops.wide import wide_dtype

Forward = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""out, logsumexp, and the state of random numbers where some were drawn."""
Grads = tuple[Tensor, Tensor, Tensor]


class Asked(NamedTuple):
    """The arguments of a call, as in reference.py."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    causal: bool = False
    scale: float = 1.0
    dropout_p: float = 0.0
    key: Tensor | None = None


class Kept(NamedTuple):
    """What the backward reads of the forward."""

    out: Tensor
    logsumexp: Tensor
    seed: Tensor
    offset: Tensor


def asked_and_kept(arguments: Sequence[Any]) -> tuple[Asked, Kept]:
    """Of the arguments of ws::attention_backward behind the gradient: what the forward keeps stands between."""
    return Asked(*arguments[:4], *arguments[8:]), Kept(*arguments[4:8])


@dataclass(frozen=True, slots=True)
class Signature:
    """What a choice may depend on. Strides are left out on purpose: forward and backward must choose alike, and a pass
    in between may change the layout of a saved tensor."""

    device: str
    dtype: torch.dtype
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    mask_dtype: torch.dtype | None
    mask_shape: tuple[int, ...] | None
    causal: bool
    dropout: bool

    def __str__(self) -> str:
        flags = {"a mask": self.mask_shape is not None, "causal": self.causal, "dropout": self.dropout}
        said = ", ".join(name for name, given in flags.items() if given)
        return f"of {self.q_shape} to {self.k_shape} in {str(self.dtype).removeprefix('torch.')}" + (
            f" ({said})" if said else ""
        )


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute attention."""

    name: str
    device_type: str  # "cpu", "cuda" or "any"
    supports: Callable[[Signature], str | None]
    forward: Callable[[Asked], Forward]
    backward: Callable[[Tensor, Asked, Kept], Grads]


def last_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The kernels read rows: the last dimension must have stride 1."""
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def expand_groups(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat each key head for its query heads, for kernels without grouped heads."""
    repeat = q.shape[1] // k.shape[1]
    if repeat == 1:
        return k, v
    return k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)


def sum_groups(grad: Tensor, groups: int) -> Tensor:
    """The transpose of `expand_groups`, summed in float32 (float64 for float64)."""
    if grad.shape[1] == groups:
        return grad
    parts = grad.unflatten(1, (groups, -1))
    return parts.sum(dim=2, dtype=wide_dtype(grad.dtype)).to(grad.dtype)
