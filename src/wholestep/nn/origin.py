"""How a tensor can be computed again: what a lean layer leaves on its output for the layer that follows.

In: y = f(x), made by a cheap f (a norm, an activation, dropout) whose own backward keeps x anyway. Out: an `Origin` (f and
x) that travels on y as a Python attribute. Why: an ordinary Linear keeps its input y for the gradient of its weight, so
both x and y stay in memory; a lean Linear that finds an origin keeps x, which is there already, and computes y again. The
bits of y are the same both times: it is the same function on the same values.

The attribute is a hint and nothing more. A view, a copy or a sum of y has none, and the next layer then keeps its input as
PyTorch does. The same holds where y was written to after it was made, where the two layers stand on different sides of an
activation checkpoint (which would not find the origin when it runs its part again), and under torch.compile and torch.func.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wholestep import compat
from wholestep.errors import WholestepError

ATTRIBUTE = "_wholestep_origin"


@dataclass(frozen=True, slots=True)
class Casts:
    """Autocast as it was when a function ran, to be the same when it runs again."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device_type: str) -> Casts:
        if not torch.amp.is_autocast_available(device_type):  # the meta device
            return cls("cpu", False, torch.bfloat16)
        enabled = torch.is_autocast_enabled(device_type)
        return cls(device_type, enabled, torch.get_autocast_dtype(device_type))

    def again(self) -> contextlib.AbstractContextManager[Any]:
        """Context: this state. Without autocast's cache, whose casts would not be part of the graph being built."""
        if not self.enabled and not torch.is_autocast_enabled(self.device_type):
            return contextlib.nullcontext()  # entering autocast costs more than the function that runs under it
        context: Any = torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)
        context._wholestep = True  # ours: a capture refuses the contexts that a loss function enters itself
        entered: contextlib.AbstractContextManager[Any] = context
        return entered


@dataclass(slots=True)
class Shared:
    """y, computed again for the first of the layers that read it and held for the others: q, k and v follow one another.

    A layer that takes no part in a backward leaves y here until the graph goes, which is what PyTorch's own layers do.
    """

    readers: int = 0
    left: int = 0
    y: Tensor | None = None

    def add_reader(self) -> None:
        self.readers += 1
        self.left = self.readers

    def serve(self, make: Callable[[], Tensor]) -> Tensor:
        y = make() if self.y is None else self.y
        self.left -= 1
        self.y = y if self.left > 0 else None
        if self.left <= 0:
            self.left = self.readers  # for a second backward through a retained graph
        return y


@dataclass(frozen=True, slots=True)
class Origin:
    """y = function(*tensors) under `casts`."""

    function: Callable[..., Tensor]
    tensors: tuple[Tensor | None, ...]
    casts: Casts
    copied: bool
    """Parameters were copied, so a second derivative would not see them."""
    versions: tuple[int, ...]
    """How often y, and each tensor it is made from, had been written to when y was made."""
    region: Any
    """The checkpoint (or other saved-tensor hooks) inside which y was made."""
    shared: Shared


def wanted() -> bool:
    """Whether eager autograd will run here; elsewhere lean layers are the plain ones."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return not compat.in_function_transform()


def remember(y: Tensor, function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Leave on y how to compute it; gives y back."""
    if not wanted() or not y.requires_grad or not plain(y):
        return y
    # FSDP frees the whole of a parameter between its module's forward and backward. The norm's weight is used again in
    # the backward of another module, where it may be gone; a copy of one vector is nothing beside an activation.
    copied = _distributed() and any(isinstance(t, nn.Parameter) for t in tensors)
    kept = tuple(t.detach().clone() if copied and isinstance(t, nn.Parameter) else t for t in tensors)
    casts = Casts.now(y.device.type)
    region = compat.saved_tensor_hooks()
    setattr(y, ATTRIBUTE, Origin(function, kept, casts, copied, _versions(y, kept), region, Shared()))
    return y


def origin_of(y: Tensor) -> Origin | None:
    """The origin of y, if it has one that still holds here."""
    origin: Origin | None = getattr(y, ATTRIBUTE, None)
    if origin is None or not wanted() or origin.versions != _versions(y, origin.tensors):
        return None
    return origin if origin.region is compat.saved_tensor_hooks() else None


def compute_again(
    function: Callable[..., Tensor], casts: Casts, tensors: tuple[Tensor | None, ...], copied: bool
) -> Tensor:
    """Compute y again, in a backward; differentiable when that backward is itself differentiated."""
    if copied and torch.is_grad_enabled():
        raise WholestepError(
            "a second derivative through lean layers is not available while torch.distributed is initialised",
            hint="call wholestep.nn.restore(model) before a gradient penalty in a distributed run",
        )
    with casts.again():
        return function(*tensors)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Context for a backward: the dtypes are those of its arguments, whatever surrounds the call of backward()."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.autocast(device_type, enabled=False)
    return context


def plain(*tensors: Tensor | None) -> bool:
    """Whether these are ordinary tensors: subclasses (DTensor, quantised) bring their own rules; fakes of a capture do not."""
    return all(t is None or type(t) in (Tensor, nn.Parameter) or compat.is_fake(t) for t in tensors)


def _versions(y: Tensor, tensors: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    return (y._version, *(0 if t is None else t._version for t in tensors))


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
