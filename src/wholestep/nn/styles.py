"""Lean forwards for classes that are not torch's own: each is named, takes a class and gives a subclass of it.

In: a class found in somebody's model (a norm, an activation, a Conv1D, a gated MLP of Hugging Face) and the name of a
style. Out: a subclass that differs in its forward alone, so a module can change into it and back without being rebuilt.
Whether a style computes what the class computes is not decided here: probe.py runs both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.nn.activations import gated, gelu, silu
from wholestep.nn.linear_layers import linear_in_out
from wholestep.nn.norms import rms_norm, rms_norm_in_float, rms_norm_one_plus, rms_norm_weight_dtype
from wholestep.nn.origin import remember
from wholestep.nn.replay import replayed

MARK = "_wholestep_was"
"""Attribute of a swapped module: the class it had."""
GATED_NAMES = (("gate_proj", "up_proj"), ("gate_up_proj",))
ACTIVATION_NAMES = ("act_fn", "activation_fn", "act")


def original_forward(module: nn.Module) -> Callable[..., Tensor]:
    """The forward a module had before any swap, bound to it; no hooks run."""
    return functools.partial(module.__dict__.get(MARK, type(module)).forward, module)


def eps_of(module: nn.Module) -> float | None:
    found = [getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)]
    return found[0] if found else None


def activation_of(module: nn.Module) -> nn.Module:
    names = [name for name in ACTIVATION_NAMES if name in module._modules]
    found: nn.Module = getattr(module, names[0])
    return found


def _replay(module: Any, x: Tensor) -> Tensor:
    """Keep x alone; run the original forward again in the backward."""
    return replayed(original_forward(module), x)


def _tell(module: Any, x: Tensor) -> Tensor:
    """Torch's own operator keeps x alone already: only leave the origin."""
    forward = original_forward(module)
    return remember(forward(x), forward, x)


def _gated(module: Any, x: Tensor) -> Tensor:
    """down(act(gate(x)) * up(x)); the three linear layers are called as modules, so their hooks and adapters run."""
    if "gate_up_proj" in module._modules:
        gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
    else:
        gate, up = module.gate_proj(x), module.up_proj(x)
    activation = activation_of(module)
    silu_like = activation.__dict__.get(MARK, type(activation)).__name__ in ("SiLU", "SiLUActivation")
    out: Tensor = module.down_proj(gated(gate, up, F.silu if silu_like else original_forward(activation)))
    return out


STYLES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "tell": _tell,
    "replay": _replay,
    "gelu": lambda module, x: gelu(x),
    "gelu_tanh": lambda module, x: gelu(x, "tanh"),
    "silu": lambda module, x: silu(x),
    "rms_in_float": lambda module, x: rms_norm_in_float(x, module.weight, eps_of(module) or 0.0),
    "rms_in_float_replayed": lambda module, x: rms_norm_in_float(
        x, module.weight, eps_of(module) or 0.0, by_hand=False
    ),
    "rms_weight_dtype": lambda module, x: rms_norm_weight_dtype(x, module.weight, eps_of(module) or 0.0),
    "rms_one_plus": lambda module, x: rms_norm_one_plus(x, module.weight, eps_of(module) or 0.0),
    "rms_torch": lambda module, x: rms_norm(x, module.weight.shape, module.weight, eps_of(module)),
    "in_out": lambda module, x: linear_in_out(x, module.weight, module.bias),
    "gated": _gated,
}


class Lean:
    """What the made classes share: they can be copied and pickled, though no module holds them by name."""

    style: str
    original: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (self.original, self.style), self.__dict__


_MADE: dict[tuple[Any, str], Any] = {}


def lean_class(original: type[nn.Module], style: str) -> type[nn.Module]:
    """The subclass of `original` with the forward of `style`."""
    if (original, style) not in _MADE:
        _MADE[original, style] = _made(original, STYLES[style], style)
    made: type[nn.Module] = _MADE[original, style]
    return made


def _made(original: type[nn.Module], body: Callable[[Any, Tensor], Tensor], style: str) -> Any:
    def forward(self: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        (x,) = (*args, *kwargs.values())  # the one argument has another name in every class
        return body(self, x)

    # module and name are part of the key under which a captured step is kept: the library, the class and the style
    name = f"Lean{original.__name__}"
    members = {"forward": forward, "style": style, "original": original, "__module__": original.__module__}
    return type(name, (Lean, original), {**members, "__qualname__": f"{name}[{style}]"})


def _blank(original: type[nn.Module], style: str) -> nn.Module:
    made: Any = lean_class(original, style)
    blank: nn.Module = made.__new__(made)
    return blank
