"""What a row of the table of Hugging Face families is made of, and the batches that rows share.

A row names classes of transformers instead of holding them, so that the tables can be read without importing it. Models
are drawn from tiny configs, the same at every build; nothing is downloaded. Dropout is as the config has it, except that
no whole layer is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from tests.zoo.case import Built, default_loss

Batch = dict[str, Any]
MakeBatch = Callable[[torch.Generator], Batch]
LossFn = Callable[[Any, Any], torch.Tensor]

VOCAB, WIDTH, HEADS, LAYERS, ROWS, TOKENS = 101, 32, 4, 2, 2, 12
PIXELS, LABELS = 32, 5
BATCHES = 3
IGNORED = -100


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One row: which classes, which sizes, which batches."""

    config: str
    """The config's class in transformers."""
    sizes: dict[str, Any]
    """What the config is given."""
    model: str
    """The model's class in transformers."""
    batch: MakeBatch
    loss_fn: LossFn = default_loss
    parts: dict[str, tuple[str, dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """Configs inside the config: field -> (class, sizes)."""


def build_family(family: Family) -> Built:
    """The model in training mode, and its batches."""
    import transformers

    torch.manual_seed(0)
    parts = {name: getattr(transformers, kind)(**sizes) for name, (kind, sizes) in family.parts.items()}
    config = getattr(transformers, family.config)(**family.sizes, **parts)
    model = getattr(transformers, family.model)(config).train()
    batches: list[Any] = [family.batch(torch.Generator().manual_seed(index)) for index in range(BATCHES)]
    return Built(model, batches, family.loss_fn, trained=lambda: [p for p in model.parameters() if p.requires_grad])


def ids(source: torch.Generator, tokens: int = TOKENS, rows: int = ROWS) -> torch.Tensor:
    """Token ids above the special ones."""
    return torch.randint(3, VOCAB, (rows, tokens), generator=source)


def classes(source: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(0, LABELS, shape or (ROWS,), generator=source)


def lengths_mask(source: torch.Generator, tokens: int = TOKENS) -> torch.Tensor:
    """Ones, then zeros: rows of several lengths, the first one full."""
    lengths = torch.randint(tokens // 2, tokens + 1, (ROWS, 1), generator=source)
    lengths[0] = tokens
    return (torch.arange(tokens)[None, :] < lengths).long()


def causal(source: torch.Generator) -> Batch:
    """The next word."""
    found = ids(source)
    return {"input_ids": found, "labels": found.clone()}


def padded_causal(source: torch.Generator) -> Batch:
    """The next word, rows padded on the right."""
    found, mask = ids(source), lengths_mask(source)
    return {"input_ids": found, "attention_mask": mask, "labels": found.masked_fill(mask == 0, IGNORED)}


def masked(source: torch.Generator, tokens: int = TOKENS) -> Batch:
    """Some words hidden, rows padded on the right."""
    found, mask = ids(source, tokens), lengths_mask(source, tokens)
    hidden = (torch.rand(ROWS, tokens, generator=source) < 0.3) & (mask == 1)
    hidden[:, 1] = True
    return {
        "input_ids": found.masked_fill(hidden, 2), "attention_mask": mask, "labels": found.masked_fill(~hidden, IGNORED),
    }  # fmt: skip


def masked_of(tokens: int) -> MakeBatch:
    return lambda source: masked(source, tokens)


def seq2seq(source: torch.Generator, tokens: int = TOKENS) -> Batch:
    """A continuation of another length; the model shifts the labels itself."""
    return {
        "input_ids": ids(source, tokens), "attention_mask": lengths_mask(source, tokens), "labels": ids(source, TOKENS - 4),
    }  # fmt: skip


def seq2seq_of(tokens: int) -> MakeBatch:
    return lambda source: seq2seq(source, tokens)


def classified_text(source: torch.Generator) -> Batch:
    """One class per row."""
    return {"input_ids": ids(source), "attention_mask": lengths_mask(source), "labels": classes(source)}


def classified_tokens(source: torch.Generator) -> Batch:
    """One class per word, none for the padding."""
    mask = lengths_mask(source)
    labels = classes(source, ROWS, TOKENS).masked_fill(mask == 0, IGNORED)
    return {"input_ids": ids(source), "attention_mask": mask, "labels": labels}


def answers(source: torch.Generator) -> Batch:
    """Where an answer begins and ends."""
    begins = torch.randint(0, TOKENS // 2, (ROWS,), generator=source)
    return {
        "input_ids": ids(source), "attention_mask": lengths_mask(source), "start_positions": begins,
        "end_positions": begins + 2,
    }  # fmt: skip


def images(source: torch.Generator, pixels: int = PIXELS, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, 3, pixels, pixels, generator=source)


def classified_images(source: torch.Generator) -> Batch:
    return {"pixel_values": images(source), "labels": classes(source)}


def classified_images_of(pixels: int) -> MakeBatch:
    return lambda source: {"pixel_values": images(source, pixels), "labels": classes(source)}
