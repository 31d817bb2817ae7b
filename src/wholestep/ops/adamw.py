"""ws::adamw: one functional multi-tensor node for Adam and AdamW over a parameter group.

In: params, grads (of their parameters' dtypes, or narrower ones that are widened as they are read), exp_avgs,
exp_avg_sqs, max_exp_avg_sqs (empty unless amsgrad), hyper = float64 [step, lr, beta1, beta2, eps, weight_decay] (step
is 1 on the first update), scale (0-d clipping factor or None; below zero: nothing changes). Out: new params, exp_avgs,
exp_avg_sqs and max_exp_avg_sqs, concatenated. `update_in_place` is its twin without copies. Why: one node keeps the
graph small, every number that may change between steps is an input, and the update can be placed, donated or fused as a
unit.

On CPU this is torch.optim's own code for the `implementation` asked ("single", "foreach", "fused"), hence bitwise
torch's. On CUDA it is one Triton launch per dtype group in float32 math (float64 for float64 parameters), see
multi_tensor.py.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam
from torch.optim.adamw import adamw as torch_adamw

from wholestep.ops import multi_tensor

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define(
    "adamw(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[] max_exp_avg_sqs, "
    "Tensor hyper, Tensor? scale, bool amsgrad, bool maximize, bool decoupled, str implementation) -> Tensor[]"
)


@torch.no_grad()
def reference_in_place(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    hyper: Tensor,
    scale: Tensor | None,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
    implementation: str,
) -> None:
    """torch.optim's functional code: the specification, on any device (hyper.tolist() waits for a GPU)."""
    if multi_tensor.skipped(scale):
        return
    scale = multi_tensor.factor(scale)
    step, lr, beta1, beta2, eps, weight_decay = hyper.tolist()
    if implementation == "fused":
        states = [exp_avgs, exp_avg_sqs, *([max_exp_avg_sqs] if amsgrad else [])]
        implementation = multi_tensor.fused_or_single(params, states)
    flags = multi_tensor.implementation_flags(implementation)
    # torch increments the counters itself, hence step - 1; fused kernels want them beside the parameters.
    device = params[0].device if implementation == "fused" else torch.device("cpu")
    steps = list(torch.full((len(params),), step - 1, dtype=torch.float32, device=device).unbind())
    update = torch_adamw if decoupled else torch_adam
    for part in multi_tensor.parts_to_copy(params, grads, scale):
        scaled = [multi_tensor.scaled_grad(g, p, scale) for g, p in zip(grads[part], params[part], strict=True)]
        update(
            params[part],
            scaled,
            exp_avgs[part],
            exp_avg_sqs[part],
            max_exp_avg_sqs[part],
            steps[part],
            amsgrad=amsgrad,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=maximize,
            **flags,
        )


def update_in_place(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    hyper: Tensor,
    scale: Tensor | None,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
    implementation: str,
) -> None:
    """Update params and states where they are; the in-place twin of ws::adamw."""
    if not params:
        return
    if params[0].is_cuda and multi_tensor.triton_reason() is None:
        from wholestep.ops import adamw_triton

        states = [exp_avgs, exp_avg_sqs, *([max_exp_avg_sqs] if amsgrad else [])]
        adamw_triton.launch(params, grads, states, hyper, scale, maximize=maximize, decoupled=decoupled)
        return
    states = [exp_avgs, exp_avg_sqs, max_exp_avg_sqs]
    reference_in_place(params, grads, *states, hyper, scale, amsgrad, maximize, decoupled, implementation)


def update(*args: Any) -> list[Tensor]:
    """The functional form, with the arguments of `update_in_place`."""
    return multi_tensor.on_copies(update_in_place, 3, *args)


@torch.library.register_fake("ws::adamw", lib=LIBRARY)
def _fake(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    hyper: Tensor,
    scale: Tensor | None,
    amsgrad: bool,
    *others: Any,
) -> list[Tensor]:
    multi_tensor.check_lengths(params, {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}, "ws::adamw")
    multi_tensor.check_lengths(params if amsgrad else [], {"max_exp_avg_sqs": max_exp_avg_sqs}, "ws::adamw")
    return [torch.empty_like(t) for t in (*params, *exp_avgs, *exp_avg_sqs, *max_exp_avg_sqs)]


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("adamw", update, _device)
