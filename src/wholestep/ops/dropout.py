"""ws::dropout(x, p, key): dropout whose mask is a function of (index, key), never stored.

In: x, the probability p of dropping, a 0-d int64 key of this site. Out: x / (1 - p) where kept, else 0, in x's dtype
and dense layout. Why: `aten.bernoulli` draws other bits when recomputed or reordered; these bits are the same in eager,
in Inductor, on CPU and CUDA. The backward is ws::dropout of the gradient with the same key (the operator is linear), so
any order of derivative works.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from wholestep.ops.aten.elementwise import RANDOM_BITS, per_output_element
from wholestep.ops.random_bits import bits, drop_threshold
from wholestep.ops.record import Precision, record

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define("dropout(Tensor x, float p, Tensor key) -> Tensor")


def reference(x: Tensor, p: float, key: Tensor) -> Tensor:
    """The specification, purely functional: also the decomposition that Inductor fuses."""
    if p == 0.0:
        return x.clone()
    if p == 1.0:
        return torch.zeros_like(x)
    dropped = (bits(x.shape, key, x.device) & 0x7FFFFFFF) < drop_threshold(p)
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        dropped = dropped.contiguous(memory_format=torch.channels_last)  # the result takes the layout of the mask
    # A choice rather than a product with the mask: a dropped inf or NaN gives 0. (`masked_fill` would write it contiguous.)
    return torch.where(dropped, 0.0, x * (1.0 / (1.0 - p)))


def launch(x: Tensor, p: float, key: Tensor) -> Tensor:
    """The same bits as `reference`, written into exactly the strides that the fake announces."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability must be between 0 and 1, got {p}")
    out = torch.empty_like(x)
    if p == 0.0:
        return out.copy_(x)
    if p == 1.0:
        return out.zero_()
    dropped = (bits(x.shape, key, x.device) & 0x7FFFFFFF) < drop_threshold(p)
    torch.mul(x, 1.0 / (1.0 - p), out=out)
    return out.masked_fill_(dropped, 0.0)


@torch.library.register_fake("ws::dropout", lib=LIBRARY)
def _fake(x: Tensor, p: float, key: Tensor) -> Tensor:
    return torch.empty_like(x)


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
    _, p, key = inputs
    ctx.p = p
    ctx.save_for_backward(key)


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
    (key,) = ctx.saved_tensors
    return torch.ops.ws.dropout(grad, ctx.p, key), None, None


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("dropout", launch, _device)
torch.library.register_autograd("ws::dropout", _backward, setup_context=_setup_context, lib=LIBRARY)


def _cases() -> Iterator[tuple[Tensor, float, Tensor]]:
    key = torch.tensor(0x1234_5678_9ABC)
    for shape in ((7, 5), (1,), (0, 3), (2, 3, 4, 5)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            yield from ((torch.randn(shape).to(dtype), p, key) for p in (0.0, 0.3, 1.0))
    yield torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), 0.5, key


record(
    "ws::dropout",
    reference=reference,
    cases=_cases,
    kind="elementwise",
    flops=per_output_element(RANDOM_BITS + 3),
    precision=Precision("dropout", "follow"),
    fuses=True,
    layout="elements",
    decomposition=reference,
)
