"""Copies of what a training has written, and where two copies differ."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

RELATIVE, ABSOLUTE = 1e-4, 1e-6
ATOMS = frozenset((int, str, bool, type(None)))


def kept(value: Any) -> Any:
    """A copy that later steps do not change: containers anew, tensors cloned, anything else as it is."""
    if type(value) in ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if type(value) in (torch.Tensor, torch.nn.Parameter) else value
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: kept(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [kept(entry) for entry in value]
    return frozenset(value) if isinstance(value, set) else value


def difference(ours: Any, theirs: Any, path: str = "") -> str | None:
    """Where the first difference is and what stands there; None where all is equal."""
    if type(ours) is not type(theirs):
        return f"{path}: {_shown(ours)} against {_shown(theirs)}"
    if type(theirs) in ATOMS and ours == theirs:
        return None
    if isinstance(theirs, torch.Tensor):
        return _tensors(ours, theirs, path)
    if isinstance(theirs, dict):
        if list(ours) != list(theirs):
            lost, new = [k for k in theirs if k not in ours], [k for k in ours if k not in theirs]
            return f"{path}: lacks {lost}, adds {new}" if lost or new else f"{path}: another order of keys"
        return next(filter(None, (difference(ours[k], theirs[k], f"{path}.{k}".lstrip(".")) for k in theirs)), None)
    if isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            return f"{path}: {len(ours)} entries against {len(theirs)}"
        return next(
            filter(None, (difference(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(ours, theirs)))), None
        )
    if isinstance(theirs, np.ndarray):
        same = ours.shape == theirs.shape and np.allclose(ours, theirs, RELATIVE, ABSOLUTE)
    elif isinstance(theirs, float):
        same = math.isclose(ours, theirs, rel_tol=RELATIVE, abs_tol=ABSOLUTE) or (ours != ours and theirs != theirs)
    else:
        same = bool(ours == theirs)
    return None if same else f"{path}: {_shown(ours)} against {_shown(theirs)}"


def _tensors(ours: torch.Tensor, theirs: torch.Tensor, path: str) -> str | None:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"{path}: {ours.dtype} {tuple(ours.shape)} against {theirs.dtype} {tuple(theirs.shape)}"
    if theirs.layout is not torch.strided:
        ours, theirs = ours.to_dense(), theirs.to_dense()
    if torch.allclose(ours, theirs, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True):
        return None
    return f"{path}: off by up to {(ours.double() - theirs.double()).abs().max():.3g}"


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]}"
