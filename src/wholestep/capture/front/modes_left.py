"""What a graph of Dynamo's switches on in one line and off in another stays on where it fails in between."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._C import _functorch as levels

_LEAVE = {
    levels.TransformType.Vmap: levels._vmap_decrement_nesting,
    levels.TransformType.Grad: levels._grad_decrement_nesting,
    levels.TransformType.Jvp: levels._jvp_decrement_nesting,
    levels.TransformType.Functionalize: levels._func_decrement_nesting,
}


def _autocasts() -> int:
    """How many are entered here."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@contextlib.contextmanager
def modes_put_back() -> Iterator[None]:
    """Grad mode, autocast, levels of torch.func and cuDNN afterwards as before."""
    grad, cudnn = torch.is_grad_enabled(), torch._C._get_cudnn_enabled()
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    cached, entered, depth = torch.is_autocast_cache_enabled(), _autocasts(), levels.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        while levels.get_dynamic_layer_stack_depth() > depth:
            _LEAVE[levels.peek_interpreter_stack().key()]()
        for _ in range(_autocasts() - entered):
            torch.autocast_decrement_nesting()
        for kind, enabled, dtype in autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cached)
        torch._C._set_cudnn_enabled(cudnn)
        torch.set_grad_enabled(grad)
