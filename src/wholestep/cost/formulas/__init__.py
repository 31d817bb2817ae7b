"""FLOP formulas by family of operators; importing this package fills the table of `wholestep.cost.registry`."""

from wholestep.cost.formulas import (
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
