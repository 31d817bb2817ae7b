"""ws::draw(parameter, other, key, kind): gamma, Dirichlet, Poisson and binomial numbers as functions of a key.

In: the parameter (and for binomial numbers, whose parameter is the count, the probability), a 0-d int64 key of this site.
Out: what torch draws, of the parameter's shape and dtype.

Why: these are drawn by rejection, a number of times that only the draws tell, so there is no formula from a few uniform
numbers. A generator that the key seeds is used for one call: the same bits whenever the draw is made again on that device.
The key is read on the host, so a draw waits for a GPU. Derivatives are torch's own, above this operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
