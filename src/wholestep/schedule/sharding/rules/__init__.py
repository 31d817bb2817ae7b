"""Rules by family of operators; a file registers its rows when it is imported."""

from wholestep.schedule.sharding.rules import (
    attention,
    elementwise,
    embeddings,
    losses,
    marks,
    multihead,
    norms,
    picks,
    products,
    random,
    reductions,
    views,
)

__all__ = [
    "attention", "elementwise", "embeddings", "losses", "marks", "multihead", "norms", "picks", "products", "random",
    "reductions", "views",
]  # fmt: skip
