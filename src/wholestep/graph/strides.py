"""In which order the dimensions of a tensor lie in memory, and copies that lie in a given order."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Its dimensions, from the one with the largest stride to the one that is contiguous."""
    return sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d] != 1), reverse=True)


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that takes `order` back."""
    return [order.index(d) for d in range(len(order))]


def is_dense_in(tensor: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether its dimensions lie in memory in that order, without gaps."""
    return tensor.permute(order).is_contiguous()


def laid_out(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The tensor, or a copy of it, so that its dimensions lie in memory in that order, without gaps."""
    turned = tensor.permute(order)
    return tensor if turned.is_contiguous() else turned.contiguous().permute(inverse(order))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its dimensions fill their memory, in whichever order."""
    return tensor.is_contiguous() or is_dense_in(tensor, memory_order(tensor))
