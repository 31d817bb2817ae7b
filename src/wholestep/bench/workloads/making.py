"""What every workload is made with: a model whose weights depend on the seed alone, and a few batches that come round again.

In: sizes, a device, a seed. Out: models and batches on that device. On the device `meta` nothing is allocated, so that the size
of a model can be told without a GPU to hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from wholestep.data.texts import read_text
from wholestep.data.tokens import RESERVED, Tokens, make_tokens
from wholestep.data.windows import Batch, Form, Masked, TextBatches, next_token_form

DIFFERENT = 4
"""Batches are made before training and come round again: what is measured is the step, not the making of data."""

Made = TypeVar("Made")


def drawn(seed: int, device: torch.device, make: Callable[[], Made]) -> Made:
    """A model (or several) built on the device, with weights drawn from the seed."""
    torch.manual_seed(seed)
    with device:
        return make()


def cycled(make: Callable[[int], Made], device: torch.device, count: int = DIFFERENT) -> Callable[[int], Made]:
    """Batch number -> one of `count` batches, all made now; on `meta` only the first, which is as good as any."""
    made = [make(number) for number in range(1 if device.type == "meta" else count)]
    return lambda number: made[number % len(made)]


def moved(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device."""
    return {name: value.to(device) for name, value in batch.items()}


def skewed(rows: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Row numbers of which low ones are common and high ones rare, as with the users and items of real logs."""
    return (rows * torch.rand(shape, generator=generator).pow(3)).long().clamp(max=rows - 1)


def text_tokens(kind: str, vocabulary: int, *, reserved: bool = False) -> tuple[Tokens, bytes]:
    """Tokens of that kind over Shakespeare's plays, and the plays."""
    content = read_text("shakespeare").content
    return make_tokens(kind, content, vocabulary, reserved=reserved), content


def text_batches(
    tokens: Tokens, content: bytes, form: Form, *, window: int, seq: int, rows: int, seed: int, device: torch.device
) -> Callable[[int], Batch]:
    """Windows of the text, a few batches of them."""
    source = TextBatches(
        tokens.encode(content), name="shakespeare", window=window, seq=seq, batch=rows, seed=seed, form=form, device=device,
        text_bytes=len(content),
    )  # fmt: skip
    return cycled(source.batch, device)


def next_token_batches(sizes: dict[str, Any], device: torch.device, seed: int) -> Callable[[int], Batch]:
    """For models of this package's own, which guess each token from those before it."""
    tokens, content = text_tokens(sizes["tokens"], sizes["vocabulary"])
    seq, rows = sizes["seq"], sizes["batch"]
    return text_batches(tokens, content, next_token_form, window=seq + 1, seq=seq, rows=rows, seed=seed, device=device)


def masked_form(tokens: Tokens) -> Masked:
    """15 % of the tokens are to be guessed."""
    assert tokens.mask_id is not None, "tokens for masked models are made with reserved=True"
    return Masked(mask_id=tokens.mask_id, first_id=len(RESERVED), end_id=tokens.size)
