"""Arithmetic on lists of tensors with numbers that are 0-d tensors: what `arithmetic` of the updates is written in.

torch's `_foreach` operations take numbers of the host, or tensors of the lists' own dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def times(tensors: list[Tensor], number: Tensor) -> list[Tensor]:
    return list(torch._foreach_mul(tensors, number.to(tensors[0].dtype)))


def times_(tensors: list[Tensor], number: Tensor) -> None:
    torch._foreach_mul_(tensors, number.to(tensors[0].dtype))


def plus_(tensors: list[Tensor], number: Tensor) -> None:
    """One by one: torch reads a number that is added to a list on the host."""
    torch._foreach_add_(tensors, [number.to(tensors[0].dtype)] * len(tensors))


def blend_(olds: list[Tensor], news: list[Tensor], kept: Tensor) -> None:
    """old = kept * old + (1 - kept) * new"""
    times_(olds, kept)
    torch._foreach_add_(olds, times(news, 1 - kept))


def signed(grads: list[Tensor], maximize: bool) -> list[Tensor]:
    return list(torch._foreach_neg(grads)) if maximize else grads


def decayed(params: list[Tensor], grads: list[Tensor], weight_decay: Tensor, maximize: bool) -> list[Tensor]:
    """gradient + weight_decay * parameter, in new tensors."""
    pulls = times(params, weight_decay)
    torch._foreach_add_(pulls, grads, alpha=-1 if maximize else 1)
    return pulls
