"""FLOP formulas by family of operators; importing this package fills the table of `wholestep.ops.registry`."""

from wholestep.ops.aten import (
    attention,
    convolution,
    elementwise,
    loss,
    matmul,
    movement,
    optimizers,
    recurrent,
    reductions,
)

__all__ = [
    "attention",
    "convolution",
    "elementwise",
    "loss",
    "matmul",
    "movement",
    "optimizers",
    "recurrent",
    "reductions",
]
