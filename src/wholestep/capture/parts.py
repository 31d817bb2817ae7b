"""What one rank has of parameters that are cut, while a step is traced: their local part, and the norm of gradients in parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from wholestep.graph.mesh import Ranks


def local_part(ranks: Ranks, name: str, fake: torch.Tensor, mode: Any) -> torch.Tensor:
    """What one rank has of a parameter: a plain tensor of its own."""
    cut = ranks.cuts.get(name)
    if cut is None:
        return fake
    size = ranks.local_shape(name, fake.shape)[cut.dim]
    with mode:
        return fake.detach().narrow(cut.dim, 0, size).clone()


def norms_of_parts(ranks: Ranks, grads: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What stands in a norm for gradients of which each rank has a part: the norm of all parts together."""
    found: dict[str, torch.Tensor] = {}
    for axis in dict.fromkeys(cut.axis for cut in ranks.cuts.values()):
        names = [n for n in grads if n in ranks.cuts and ranks.cuts[n].axis == axis]
        if names:
            wide = torch.float64 if any(grads[n].dtype == torch.float64 for n in names) else torch.float32
            own = torch.stack([torch.linalg.vector_norm(grads[n], dtype=wide) for n in names])
            whole = torch.ops.ws.all_reduce(own.square(), axis, ranks.mesh.size(axis)).sqrt()
            found |= dict(zip(names, whole.unbind(), strict=True))
    return found
