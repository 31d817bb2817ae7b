"""GELU's gradient from its output, as Tempo takes it, and with the sign its published kernel has.

GELU's output is needed by the next layer anyway, so keeping it instead of the input saves memory. Its derivative as a
function of the output y has no closed form; Tempo uses polynomials in y - y0, one per segment. For y between 0.977 and 3
(inputs between 1.12 and 3) the kernel that was published computes y + y0 (src/inplace_gelu/gelu_kernel.cu in
https://github.com/UofT-EcoSystem/Tempo), and a derivative near 1 is off by up to 2.7. The forward is right throughout.
Only this segment is rebuilt, with a polynomial fitted here (off by up to 2.3 with that sign, by 4e-8 without); the
others keep the input and the exact formula.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

from wholestep.graph.training_graph import TrainingGraph
from wholestep.passes.pipeline import compiler_pass

from .splice import replace

aten = torch.ops.aten
FIRST, LAST = 0.97743, 3.0
"""The outputs for which the polynomial is used."""


def slope(x: torch.Tensor) -> torch.Tensor:
    """GELU's derivative: the normal distribution, plus x times its density."""
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


@functools.cache
def coefficients(degree: int = 12) -> tuple[float, ...]:
    """The derivative as a polynomial in y - FIRST, lowest power first; off by less than float32 can tell."""
    x = torch.linspace(1.1, 3.02, 4001, dtype=torch.float64)
    outputs, slopes = torch.nn.functional.gelu(x).numpy(), slope(x).numpy()
    fitted = np.polynomial.Chebyshev.fit(outputs - FIRST, slopes, degree).convert(kind=np.polynomial.Polynomial)
    return tuple(float(c) for c in fitted.coef)


def gradient(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, shift: float) -> torch.Tensor:
    """The gradient of the input; `shift` is what is added to the output before the polynomial is taken."""
    t = (y + shift).double()  # thirteen terms of both signs: in float32 they would cost digits
    value = torch.zeros_like(t)
    for c in reversed(coefficients()):
        value = value * t + c
    inside = (x > 0) & (y > FIRST) & (y < LAST)
    return grad * torch.where(inside, value.to(y.dtype), slope(x))


def _rewritten(graph: TrainingGraph, shift: float) -> TrainingGraph:
    outputs = {node.args[0]: node for node in graph.operations() if node.target is aten.gelu.default}
    for node in [n for n in graph.operations() if n.target is aten.gelu_backward.default]:
        grad, x = node.args[:2]
        replace(graph, node, functools.partial(gradient, shift=shift), grad, x, outputs[x])
    return graph


@compiler_pass(numerics="rounding")
def gelu_gradient_from_output(graph: TrainingGraph) -> TrainingGraph:
    """gelu_backward(grad, x) => grad * polynomial(y - y0)."""
    return _rewritten(graph, -FIRST)


@compiler_pass(numerics="rounding")
def gelu_gradient_with_published_sign(graph: TrainingGraph) -> TrainingGraph:
    """gelu_backward(grad, x) => grad * polynomial(y + y0)."""
    return _rewritten(graph, +FIRST)
