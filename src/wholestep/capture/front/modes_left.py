"""What a graph of Dynamo's switches on in one line and off in another stays on where it fails in between."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._C import _functorch as levels

from wholestep.errors import CaptureRefused

_LEAVE = {
    levels.TransformType.Vmap: levels._vmap_decrement_nesting,
    levels.TransformType.Grad: levels._grad_decrement_nesting,
    levels.TransformType.Jvp: levels._jvp_decrement_nesting,
    levels.TransformType.Functionalize: levels._func_decrement_nesting,
}


@contextlib.contextmanager
def modes_put_back() -> Iterator[None]:
    """Grad mode, levels of torch.func and cuDNN afterwards as before."""
    grad, cudnn = torch.is_grad_enabled(), torch._C._get_cudnn_enabled()
    depth = levels.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        while levels.get_dynamic_layer_stack_depth() > depth:
            _LEAVE[levels.peek_interpreter_stack().key()]()
        torch._C._set_cudnn_enabled(cudnn)
        torch.set_grad_enabled(grad)


@contextlib.contextmanager
def functions_put_back() -> Iterator[None]:
    """Dynamo switches function modes off while it asks guards, and leaves them off where one raises."""
    before = torch._C._get_torch_function_state()
    try:
        yield
    except BaseException:
        torch._C._set_torch_function_state(before)
        raise


@contextlib.contextmanager
def default_dtype_put_back() -> Iterator[None]:
    """A loss that sets it and does not set it back leaves it so at every step, which a captured one would not."""
    before = torch.get_default_dtype()
    try:
        yield
        if torch.get_default_dtype() != before:
            raise CaptureRefused(
                "the loss leaves another default dtype behind (torch.set_default_dtype); set it outside"
            )
    finally:
        torch.set_default_dtype(before)
