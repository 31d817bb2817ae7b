"""What a graph of Dynamo's switches on in one line and off in another stays on where it fails in between."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

import torch
from torch._C import _functorch as levels
from torch.autograd import forward_ad

from wholestep.errors import CaptureRefused

_LEAVE = {
    levels.TransformType.Vmap: levels._vmap_decrement_nesting,
    levels.TransformType.Grad: levels._grad_decrement_nesting,
    levels.TransformType.Jvp: levels._jvp_decrement_nesting,
    levels.TransformType.Functionalize: levels._func_decrement_nesting,
}


@contextlib.contextmanager
def modes_put_back() -> Iterator[None]:
    """Grad mode, levels of torch.func, cuDNN and the dispatcher's keys afterwards as before."""
    grad, cudnn = torch.is_grad_enabled(), torch._C._get_cudnn_enabled()
    depth = levels.get_dynamic_layer_stack_depth()
    try:
        with dispatcher_put_back():
            yield
    finally:
        while levels.get_dynamic_layer_stack_depth() > depth:
            _LEAVE[levels.peek_interpreter_stack().key()]()
        torch._C._set_cudnn_enabled(cudnn)
        torch.set_grad_enabled(grad)


@contextlib.contextmanager
def dispatcher_put_back() -> Iterator[None]:
    """Derivatives that are taken forwards within `vmap`, where tracing them fails, leave most of torch's dispatcher off for the
    thread, autograd too: frames of the error hold guards of torch's that put back, once they go, what held within it. The level of
    such derivatives stays entered, and hooks of saved tensors stay forbidden."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    refused = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        try:
            yield
        except BaseException as error:
            chained = [error]
            for one in chained:
                traceback.clear_frames(one.__traceback__)
                chained += [other for other in (one.__cause__, one.__context__) if other and other not in chained]
            if forward_ad._current_level < 0:
                with contextlib.suppress(RuntimeError):  # where none was entered
                    torch._C._exit_dual_level(level=0)
            if refused is None:
                torch._C._autograd._saved_tensors_hooks_enable()
            raise


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


def about_derivatives(error: str) -> str | None:
    """An error of torch's about derivatives within derivatives, in words that a user can do something about."""
    if "GradTrackingTensor" not in error and "has_fw_view" not in error:
        return None
    return (
        "torch cannot trace derivatives that are taken forwards of others (torch.func.hessian, jacfwd of jacrev); "
        "jacrev(jacrev(f)) is captured"
    )
