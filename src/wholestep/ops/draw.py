"""ws::draw(parameter, other, key, kind): gamma, Dirichlet, Poisson and binomial numbers as functions of a key.

In: the parameter (and for binomial numbers, whose parameter is the count, the probability), a 0-d int64 key of this site.
Out: what torch draws, of the parameter's shape and dtype.

Why: these are drawn by rejection, a number of times that only the draws tell, so there is no formula from a few uniform
numbers. A generator that the key seeds is used for one call: the same bits whenever the draw is repeated on that device.
The key is read on the host, so a draw waits for a GPU. Derivatives are torch's own, above this operator.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from wholestep.ops.aten.elementwise import RANDOM_BITS, per_output_element
from wholestep.ops.record import record

aten = torch.ops.aten

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define("draw(Tensor parameter, Tensor? other, Tensor key, str kind) -> Tensor")
KINDS = {"gamma": aten._standard_gamma, "dirichlet": aten._sample_dirichlet, "poisson": aten.poisson}


def reference(parameter: Tensor, other: Tensor | None, key: Tensor, kind: str) -> Tensor:
    generator = torch.Generator(parameter.device).manual_seed(int(key) & (2**63 - 1))
    if kind == "binomial":
        assert other is not None
        count, probability = torch.broadcast_tensors(parameter, other)
        return aten.binomial.default(count.contiguous(), probability.contiguous(), generator)
    return KINDS[kind].default(parameter.contiguous(), generator)


@torch.library.register_fake("ws::draw", lib=LIBRARY)
def _fake(parameter: Tensor, other: Tensor | None, key: Tensor, kind: str) -> Tensor:
    shape = parameter.shape if other is None else torch.broadcast_shapes(parameter.shape, other.shape)
    return parameter.new_empty(shape)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("draw", reference, _device)


def _cases() -> Iterator[tuple[Tensor, Tensor | None, Tensor, str]]:
    key = torch.tensor(5)
    for parameter in (torch.rand(3, 4) + 0.5, torch.rand(1) + 1.0, torch.rand(0, 2)):
        yield from ((parameter, None, key, kind) for kind in KINDS)
    yield torch.full((4, 1), 10.0), torch.rand(1, 3), key, "binomial"


record(
    "ws::draw",
    reference=reference,
    cases=_cases,
    kind="elementwise",
    flops=per_output_element(4 * RANDOM_BITS),  # a few rounds of rejection
    compiled=False,  # its key is read on the host
)
