"""ws::sgd: one functional multi-tensor node for SGD (momentum, dampening, Nesterov, weight decay) over a parameter
group.

In: params, grads (of their parameters' dtypes, or narrower ones that are widened as they are read), momentum_buffers
(empty without momentum), hyper = float64 [lr, momentum, dampening, weight_decay], scale (0-d clipping factor or None;
below zero: nothing changes). Out: new params and new buffers, concatenated. `update_in_place` is its twin without
copies. The first step of torch (buffer = gradient) is a zero buffer with dampening 0, which the caller passes: there is
no branch on the step here.

On CPU this is torch.optim's own code for the `implementation` asked, hence bitwise torch's; on CUDA one Triton launch
per dtype group.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd as torch_sgd

from wholestep.ops import multi_tensor

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define(
    "sgd(Tensor[] params, Tensor[] grads, Tensor[] momentum_buffers, Tensor hyper, Tensor? scale, bool nesterov, "
    "bool maximize, str implementation) -> Tensor[]"
)


@torch.no_grad()
def reference_in_place(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    hyper: Tensor,
    scale: Tensor | None,
    nesterov: bool,
    maximize: bool,
    implementation: str,
) -> None:
    """torch.optim's functional code: the specification, on any device (hyper.tolist() waits for a GPU)."""
    if multi_tensor.skipped(scale):
        return
    scale = multi_tensor.factor(scale)
    lr, momentum, dampening, weight_decay = hyper.tolist()
    if implementation == "fused":
        states = [momentum_buffers] if momentum_buffers else []
        implementation = "single" if _fused_is_broken(params) else multi_tensor.fused_or_single(params, states)
    copies = scale is None and nesterov and implementation == "foreach"
    for part in multi_tensor.parts_to_copy(params, grads, scale):
        scaled = [multi_tensor.scaled_grad(g, p, scale) for g, p in zip(grads[part], params[part], strict=True)]
        if copies:  # torch's foreach code adds the momentum into the gradients themselves
            scaled = [new.clone() if new is old else new for new, old in zip(scaled, grads[part], strict=True)]
        torch_sgd(
            params[part],
            scaled,
            list(momentum_buffers[part]) if momentum_buffers else [None] * len(scaled),
            weight_decay=weight_decay,
            momentum=momentum if momentum_buffers else 0.0,
            lr=lr,
            dampening=dampening,
            nesterov=nesterov,
            maximize=maximize,
            **multi_tensor.implementation_flags(implementation),
        )


def _fused_is_broken(params: list[Tensor]) -> bool:
    """torch's fused CPU kernel is wrong for bf16 and fp16 (2.11 and 2.13): parameters are off by a whole step, with and without
    momentum, and momentum buffers differ from run to run."""
    return any(not p.is_cuda and p.dtype in (torch.bfloat16, torch.float16) for p in params)


def update_in_place(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    hyper: Tensor,
    scale: Tensor | None,
    nesterov: bool,
    maximize: bool,
    implementation: str,
) -> None:
    """Update params and buffers where they are; the in-place twin of ws::sgd."""
    if not params:
        return
    if params[0].is_cuda and multi_tensor.triton_reason() is None:
        from wholestep.ops import sgd_triton

        states = [momentum_buffers] if momentum_buffers else []
        sgd_triton.launch(params, grads, states, hyper, scale, nesterov=nesterov, maximize=maximize)
        return
    reference_in_place(params, grads, momentum_buffers, hyper, scale, nesterov, maximize, implementation)


def update(*args: Any) -> list[Tensor]:
    """The functional form, with the arguments of `update_in_place`."""
    return multi_tensor.on_copies(update_in_place, 1, *args)


@torch.library.register_fake("ws::sgd", lib=LIBRARY)
def _fake(params: list[Tensor], grads: list[Tensor], momentum_buffers: list[Tensor], *others: Any) -> list[Tensor]:
    multi_tensor.check_lengths(params, {"grads": grads}, "ws::sgd")
    multi_tensor.check_lengths(params if momentum_buffers else [], {"momentum_buffers": momentum_buffers}, "ws::sgd")
    return [torch.empty_like(t) for t in (*params, *momentum_buffers)]


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("sgd", update, _device)
