"""Modules and functions a user can drop into an eager model; each name loads when it is first used.

    report = wholestep.nn.convert(model)     # swaps the layers it knows, keeps every parameter; restore(model) undoes it

Lean layers keep less for the backward than PyTorch's own and give the same bits: see docs/lean-layers.md.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "GELU": "activations",
    "SiLU": "activations",
    "SwiGLU": "activations",
    "gelu": "activations",
    "silu": "activations",
    "swiglu": "activations",
    "LayerNorm": "norms",
    "RMSNorm": "norms",
    "layer_norm": "norms",
    "rms_norm": "norms",
    "Linear": "linear_layers",
    "linear": "linear_layers",
    "Dropout": "keyed_dropout",
    "dropout": "keyed_dropout",
    "scaled_dot_product_attention": "keyed_attention",
    "gelu_linear": "functional",
    "silu_linear": "functional",
    "swiglu_linear": "functional",
    "layer_norm_linear": "functional",
    "rms_norm_linear": "functional",
    "convert": "swap",
    "restore": "swap",
    "RGCNConv": "relational.rgcn",
    "RGATConv": "relational.rgat",
    "HGTConv": "relational.hgt",
    "convert_relational": "relational.convert",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"wholestep.nn.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'wholestep.nn' has no attribute {name!r}")
