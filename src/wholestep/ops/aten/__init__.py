"""What is known of torch's own operators, by family; importing this package says it (`wholestep.ops.record`)."""

from wholestep.ops.aten import (
    attention,
    convolution,
    elementwise,
    layouts,
    lowering,
    matmul,
    movement,
    optimizers,
    precision,
    reductions,
    unordered,
)

__all__ = [
    "attention", "convolution", "elementwise", "layouts", "lowering", "matmul", "movement", "optimizers", "precision", "reductions",
    "unordered",
]  # fmt: skip
