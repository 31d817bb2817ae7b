"""ws::copy_out, out_done, copy_in, in_done: a value of the card waits in the host's memory, or in a file.

    h = copy_out(x)      a copy begins to leave the card
    h = out_done(x, h)   it has left: x, which is read here for the last time, may be freed
    y = copy_in(h)       memory for it is taken on the card, and the copy begins to come back
    y = in_done(y)       it is back: whoever reads it reads this

In and out: one tensor; y has the bits and strides of x. Functional, so where these nodes stand is the schedule: whoever counts
what is alive counts it as it is. What `copy_out` gives lies on the host, which its record says (`on_host`): in a dry capture
every tensor is said to lie on a CPU. No compiler sees them. The plain operators below copy at once, and are the reference; on a
GPU the driver lays the copies beside the computation (lower/transfers.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from wholestep.ops.record import record, record_of

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define('copy_out(Tensor x, str tier="host") -> Tensor')
LIBRARY.define("out_done(Tensor x, Tensor(a) h) -> Tensor(a)")
LIBRARY.define("copy_in(Tensor h, Device device) -> Tensor")
LIBRARY.define("in_done(Tensor(a) y) -> Tensor(a)")


def copy_out(x: Tensor, tier: str = "host") -> Tensor:
    return laid_like(x, torch.device("cpu")).copy_(x)


def out_done(x: Tensor, h: Tensor) -> Tensor:
    return h


def copy_in(h: Tensor, device: torch.device) -> Tensor:
    return laid_like(h, device).copy_(h)


def in_done(y: Tensor) -> Tensor:
    return y


def laid_like(x: Tensor, device: torch.device) -> Tensor:
    """Memory for a tensor of the same sizes and strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def copy_out_into(x: Tensor, h: Tensor) -> None:
    """`copy_out` to where the value lies from step to step: the form in which state leaves the card (lower/in_place.py)."""
    h.copy_(x, non_blocking=True)


def lies_on_host(node: fx.Node) -> bool:
    """Whether a value takes memory of the host, not of the card: what was copied out, and inputs that are only copied in."""
    if node.op != "placeholder":
        return record_of(node).on_host
    reads = (torch.ops.ws.copy_in.default, torch.ops.ws.out_done.default, copy_out_into)
    return any(user.target is reads[0] for user in node.users) and all(user.target in reads for user in node.users)


@torch.library.register_fake("ws::copy_out", lib=LIBRARY)
def _copy_out_fake(x: Tensor, tier: str = "host") -> Tensor:
    return laid_like(x, torch.device("cpu"))


@torch.library.register_fake("ws::copy_in", lib=LIBRARY)
def _copy_in_fake(h: Tensor, device: torch.device) -> Tensor:
    return laid_like(h, device)


for _name, _function in (("copy_out", copy_out), ("out_done", out_done), ("copy_in", copy_in), ("in_done", in_done)):
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")


def _tensors() -> list[Tensor]:
    """Odd, empty, of no dimension, transposed, of whole numbers and narrow."""
    return [
        torch.randn(5, 3), torch.randn(0, 4), torch.randn(()), torch.randn(4, 6).t(), torch.randn(3, 2, 5).permute(2, 0, 1),
        torch.arange(7), torch.randn(3, 3).bfloat16(), torch.ones(2, dtype=torch.bool),
    ]  # fmt: skip


record(
    "ws::copy_out", trip="copy_out", reference=copy_out, cases=lambda: [(x,) for x in _tensors()], kind="movement",
    flops=lambda call: 0, compiled=False, on_host=True,
)  # fmt: skip
record(
    "ws::out_done", trip="out_done", reference=out_done, cases=lambda: [(x, x.clone()) for x in _tensors()], kind="movement",
    flops=lambda call: 0, unread=("x", "h"), writes=False, compiled=False, on_host=True,
)  # fmt: skip
record(
    "ws::copy_in", trip="copy_in", reference=copy_in, cases=lambda: [(x, torch.device("cpu")) for x in _tensors()], kind="movement",
    flops=lambda call: 0, compiled=False,
)  # fmt: skip
record(
    "ws::in_done", trip="in_done", reference=in_done, cases=lambda: [(x,) for x in _tensors()], kind="movement",
    flops=lambda call: 0, unread=("y",), writes=False, compiled=False,
)  # fmt: skip
