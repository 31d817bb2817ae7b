"""Which layers have a lean form, and why a layer that looks like one is left as it is.

In: a module. Out: a `Swap` (the class it may change into), a reason in words, or None for a module that is nobody's concern
here. Torch's own layers are known by their exact class; layers of other libraries by what they hold, and then probed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from wholestep.nn.activations import GELU, SiLU
from wholestep.nn.keyed_dropout import Dropout
from wholestep.nn.linear_layers import Linear
from wholestep.nn.norms import LayerNorm, RMSNorm
from wholestep.nn.probe import disagreement
from wholestep.nn.styles import ACTIVATION_NAMES, GATED_NAMES, eps_of, lean_class

TORCH_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.LayerNorm: LayerNorm,
    nn.RMSNorm: RMSNorm,
    nn.GELU: GELU,
    nn.SiLU: SiLU,
    nn.Linear: Linear,
    nn.Dropout: Dropout,
}
OURS = frozenset(TORCH_CLASSES.values())
KEEP_INPUT = (nn.Mish, nn.Hardswish, nn.ELU, nn.LeakyReLU, nn.Softplus)
"""Torch's activations whose backward keeps the input alone: an origin is all they lack."""
KEEP_OUTPUT = (nn.ReLU, nn.Sigmoid, nn.Tanh)
ACTIVATIONS = {
    "GELUActivation": ("gelu", "replay"),
    "GELUTanh": ("gelu_tanh", "replay"),
    "PytorchGELUTanh": ("gelu_tanh", "replay"),
    "SiLUActivation": ("silu", "replay"),
    "NewGELUActivation": ("replay",),
    "FastGELUActivation": ("replay",),
    "QuickGELUActivation": ("replay",),
    "AccurateGELUActivation": ("replay",),
    "MishActivation": ("replay",),
}
"""Classes of Hugging Face by name, and the styles to try in order: torch's own operator where it gives the same bits."""

# The second is the first for a device on which the derivative written by hand should round otherwise than autograd's.
RMS_STYLES = ("rms_in_float", "rms_in_float_replayed", "rms_weight_dtype", "rms_one_plus", "rms_torch")


@dataclass(frozen=True, slots=True)
class Swap:
    """The class a module may change into; `note` is what a user should know about it."""

    becomes: type[nn.Module]
    note: str = ""


def recognise(module: nn.Module, *, planned: bool = False) -> Swap | str | None:
    """What may be done with a module; text is the reason why nothing is. `planned`: it may be without data, on the meta device."""
    found = _recognised(module)
    if isinstance(found, Swap):
        return _obstacle(module, planned) or found
    return found


def _recognised(module: nn.Module) -> Swap | str | None:
    kind = type(module)
    if kind in OURS:
        return None
    if kind in TORCH_CLASSES:
        return _torch_layer(module)
    if kind in KEEP_INPUT:
        return "it works in place" if getattr(module, "inplace", False) else Swap(lean_class(kind, "tell"))
    if kind in KEEP_OUTPUT:
        return "it keeps its output, which the next layer shares already"
    if kind.__name__ in ACTIVATIONS:
        return _probed(module, *ACTIVATIONS[kind.__name__])
    if _like_rms_norm(module):
        return _probed(module, *RMS_STYLES)
    if kind.__name__ == "Conv1D" and set(module._parameters) == {"weight", "bias"} and module.weight.dim() == 2:
        return _probed(module, "in_out")
    if _like_gated_mlp(module):
        return _gated_mlp(module)
    if isinstance(module, tuple(TORCH_CLASSES)) and kind.forward not in {c.forward for c in TORCH_CLASSES}:
        return f"{kind.__name__} has a forward of its own"
    return None


def _torch_layer(module: nn.Module) -> Swap | str:
    becomes = TORCH_CLASSES[type(module)]
    if getattr(module, "inplace", False):
        return "it works in place"
    if isinstance(module, nn.Dropout):
        if module.p == 0.0:
            return "p is 0: there is no mask to save"
        return Swap(becomes, "draws other masks than torch from the same seed")
    return Swap(becomes)


def _like_rms_norm(module: nn.Module) -> bool:
    if set(module._parameters) != {"weight"} or module._modules or module._buffers or eps_of(module) is None:
        return False
    return module.weight is not None and module.weight.dim() == 1 and type(module).__module__.split(".")[0] != "torch"


def _like_gated_mlp(module: nn.Module) -> bool:
    names = set(module._modules)
    return any(
        names == {*gate, "down_proj", activation} for gate in GATED_NAMES for activation in ACTIVATION_NAMES
    ) and not (module._parameters or module._buffers)


def _gated_mlp(module: nn.Module) -> Swap | str:
    activation = next(module._modules[name] for name in ACTIVATION_NAMES if name in module._modules)
    linears = [m for name, m in module._modules.items() if name not in ACTIVATION_NAMES]
    if not all(isinstance(m, nn.Linear) for m in linears):
        return "its projections are not nn.Linear"
    if activation is None or any(True for _ in activation.parameters()) or any(True for _ in activation.buffers()):
        return "its activation has parameters"
    if activation._forward_hooks or activation._forward_pre_hooks or activation._backward_hooks:
        return "its activation has hooks, which a lean form would pass by"
    return _probed(module, "gated")


def _probed(module: nn.Module, *styles: str) -> Swap | str:
    """The first style that gives the module's own bits."""
    hindrance = _obstacle(module)
    if hindrance is not None:
        return hindrance
    reasons = []
    for style in styles:
        reason = disagreement(module, style)
        if reason is None:
            return Swap(lean_class(type(module), style))
        reasons.append(reason)
    return reasons[0]


def _obstacle(module: nn.Module, planned: bool = False) -> str | None:
    """What forbids changing the class of this instance."""
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance (a hook of accelerate, or a patch)"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a TorchScript module"
    for p in module.parameters():
        if type(p).__name__ == "DTensor" or type(p.data).__name__ == "DTensor":
            return "its parameters are sharded already: convert before fully_shard"
        if p.device.type == "meta" and not planned:
            return "its parameters are on the meta device: convert after they are materialised"
    return None
