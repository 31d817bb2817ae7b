"""`decompose`: a layer as the operators it consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from wholestep.capture.edits import Change
from wholestep.errors import BadOption
from wholestep.schedule.changes import function_change
from wholestep.schedule.modules import Modules, inside, once
from wholestep.schedule.verb import Verb, verb


def _linear(module: Any, input: torch.Tensor) -> torch.Tensor:
    product = F.linear(input, module.weight)
    return product if module.bias is None else product + module.bias


def _layer_norm(module: Any, input: torch.Tensor) -> torch.Tensor:
    dims = tuple(range(-len(module.normalized_shape), 0))
    centred = input - input.mean(dims, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + module.eps)
    out = out if module.weight is None else out * module.weight
    return out if module.bias is None else out + module.bias


def _rms_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    dims = tuple(range(-len(module.normalized_shape), 0))
    eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
    out = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    return out if module.weight is None else out * module.weight


def _softmax(module: Any, input: torch.Tensor) -> torch.Tensor:
    dim = F._get_softmax_dim("softmax", input.dim(), 3) if module.dim is None else module.dim
    exponents = torch.exp(input - input.amax(dim, keepdim=True))
    return exponents / exponents.sum(dim, keepdim=True)


FORMS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Linear: _linear,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.Softmax: _softmax,
}
"""Class -> its forward, operator by operator. Exact classes: a subclass may compute something else."""


@verb
class decompose(Verb):
    """Compute layers by the operators they consist of, so that their parts can be matched, fused or cut apart.

    Known are nn.Linear (product, then bias), nn.LayerNorm, nn.RMSNorm and nn.Softmax; of another module, those inside of it.
    It rounds differently. Example: sch["layers.*.mlp.up"].decompose()
    """

    def check(self, modules: Modules) -> None:
        self.changes(modules)

    def places(self, modules: Modules) -> dict[str, nn.Module]:
        scopes = modules.select(self.at)
        found = {p: m for p, m in modules if type(m) in FORMS and any(inside(p, at) for at in scopes)}
        if not found:
            kind = type(next(iter(scopes.values()))).__name__
            known = ", ".join(f"nn.{form.__name__}" for form in FORMS)
            raise BadOption(f"{self.at or 'the model'} ({kind}) has nothing to decompose", hint=f"known are {known}")
        return found

    def changes(self, modules: Modules) -> Sequence[Change]:
        places = once(self.places(modules))
        return [function_change(path, module, FORMS[type(module)], "Decomposed") for path, module in places.items()]
