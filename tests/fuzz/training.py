"""How a program is trained: precision, clipping, accumulation, an optimizer and its numbers, what is frozen."""

from __future__ import annotations

import random
from typing import Any

OPTIMIZERS = {"SGD": 6, "AdamW": 5, "Adam": 2, "RMSprop": 1, "Adagrad": 1, "NAdam": 1, "Adafactor": 1, "Muon": 1}
"""How likely each is: all whose update is in the graph."""


def options(source: random.Random) -> dict[str, Any]:
    """Those of `Case`."""
    step: dict[str, Any] = {}
    if source.random() < 0.15:
        step["precision"] = "bf16"
    if source.random() < 0.15:
        step["clip_norm"] = source.choice((0.1, 1.0, 100.0))
    if source.random() < 0.15:
        step["chunked_loss"] = True
    if source.random() < 0.08:
        step["accumulate"] = 2
    elif source.random() < 0.05:
        step["nonfinite"] = "skip"
    name = source.choices(list(OPTIMIZERS), list(OPTIMIZERS.values()))[0]
    return {
        "optimizer": name,
        "flags": _flags(source, name),
        "step": step,
        "guards": source.random() < 0.1,
        "plan_seed": source.randrange(1000),
        "groups": source.random() < 0.2,
        "frozen": source.choice((0, 0, 0, 0, 2, 3)),
    }


def _flags(source: random.Random, name: str) -> dict[str, Any]:
    """Numbers and switches of an optimizer."""

    def sometimes(share: float, value: Any, otherwise: Any) -> Any:
        return value if source.random() < share else otherwise

    flags: dict[str, Any] = {"lr": 0.05 if name in ("SGD", "Muon") else 0.01, "weight_decay": source.choice((0.0, 0.1))}
    if name != "Muon":
        flags["maximize"] = sometimes(0.1, True, False)
    if name == "SGD":
        momentum = source.choice((0.0, 0.9))
        flags |= {"momentum": momentum, "nesterov": momentum > 0 and source.random() < 0.3}
        flags["dampening"] = 0.0 if flags["nesterov"] else sometimes(0.2, 0.1, 0.0)
    elif name in ("Adam", "AdamW"):
        flags |= {"amsgrad": sometimes(0.2, True, False), "betas": sometimes(0.2, (0.8, 0.95), (0.9, 0.999))}
    elif name == "RMSprop":
        flags |= {"momentum": source.choice((0.0, 0.9)), "centered": sometimes(0.3, True, False)}
    elif name == "Adagrad":
        flags |= {"lr_decay": source.choice((0.0, 0.1)), "initial_accumulator_value": source.choice((0.0, 0.5))}
    elif name == "NAdam":
        flags |= {"decoupled_weight_decay": sometimes(0.5, True, False)}
    elif name == "Muon":
        flags |= {"nesterov": sometimes(0.7, True, False), "momentum": source.choice((0.9, 0.95))}
    return flags
