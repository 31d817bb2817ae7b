"""Does a lean class compute what the class it would replace computes? Both are run on small inputs, and compared.

In: a module, a style. Out: None when output and gradients have the same bits, else the reason as text. The module's own
`__call__` is not used, so no hook of the user's sees these inputs; large children are replaced by tiny ones first.
"""

from __future__ import annotations

import copy
import warnings

import torch
from torch import Tensor, nn

from wholestep.errors import one_line
from wholestep.nn.styles import MARK, STYLES, eps_of, original_forward

ROWS = 3
TINY = 8
"""Width of the stand-ins inside a gated MLP."""


def disagreement(module: nn.Module, style: str) -> str | None:
    """None when the style gives the module's own bits: output, gradient of the input, gradients of parameters."""
    try:
        subject = _small_copy(module) if style == "gated" else module
        inputs = _inputs(subject, style)
        for x in inputs:
            ours = _outcome(subject, x, lean=style)
            theirs = _outcome(subject, x, lean=None)
            for name, a, b in zip(("output", *("gradient",) * len(ours)), ours, theirs, strict=False):
                if a.dtype != b.dtype or a.shape != b.shape:
                    return f"{name} is {b.dtype} {tuple(b.shape)}, the lean form gives {a.dtype} {tuple(a.shape)}"
                if not torch.equal(a, b):
                    return f"its {name} differs by up to {(a - b).abs().max().item():.1e} from the lean form's"
    except (
        Exception
    ) as error:  # somebody else's forward may raise anything at all; the reason is told, nothing is swapped
        return f"its forward could not be tried: {one_line(error)}"
    return None


def _outcome(module: nn.Module, x: Tensor, lean: str | None) -> list[Tensor]:
    x = x.detach().requires_grad_()
    parameters = [p for p in module.parameters() if p.requires_grad]
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about formulas that are tried and then not taken
        out = original_forward(module)(x) if lean is None else STYLES[lean](module, x)
        grads = torch.autograd.grad(out, [x, *parameters], torch.ones_like(out) + out.detach(), allow_unused=True)
    return [out.detach(), *(g for g in grads if g is not None)]


def _inputs(module: nn.Module, style: str) -> list[Tensor]:
    """Ordinary, large and tiny values, in the dtype of the parameters; two dtypes where there are none."""
    parameters = list(module.parameters())
    if not parameters:
        dtypes, device, width = [torch.float32, torch.bfloat16], torch.device("cpu"), TINY
    else:
        weight = parameters[0]
        width = TINY if style == "gated" else weight.shape[0]
        # Norms written in Python promote: a float32 weight on a bf16 input is the case where formulas part.
        dtypes, device = (
            sorted({weight.dtype, torch.bfloat16} if eps_of(module) else {weight.dtype}, key=str),
            weight.device,
        )
    generator = torch.Generator().manual_seed(0)
    unit = torch.randn(2, ROWS, width, generator=generator)
    return [(unit * scale).to(device=device, dtype=dtype) for dtype in dtypes for scale in (1.0, 50.0, 1e-3)]


def _small_copy(module: nn.Module) -> nn.Module:
    """The module with tiny linear layers in place of its own, and activations without hooks."""
    small = copy.copy(module)
    generator = torch.Generator().manual_seed(1)
    children: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        if isinstance(child, nn.Linear):
            wide = 2 * TINY if name == "gate_up_proj" else TINY
            stand_in = nn.Linear(TINY, wide, bias=child.bias is not None)
            for p in stand_in.parameters():
                p.data = torch.randn(p.shape, generator=generator)
            children[name] = stand_in.to(device=child.weight.device, dtype=child.weight.dtype)
        elif child is not None:
            bare = copy.copy(child)
            object.__setattr__(bare, "__class__", child.__dict__.get(MARK, type(child)))
            children[name] = bare
    small.__dict__["_modules"] = children
    return small
