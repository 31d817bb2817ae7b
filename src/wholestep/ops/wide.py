"""The dtype in which narrow floating-point values are computed and summed up."""

from __future__ import annotations

import torch


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, and float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
