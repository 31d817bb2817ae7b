"""Machine translation: a transformer, and LSTMs with attention, on a made-up pair of languages.

In: sizes. Out: a Training. A sentence of the second language is the first one read backwards, word by word through a dictionary:
as in real translation, each word depends on one far away, and no model gets there without attention or a good memory.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.bench.workload import Part, Training, one_part
from wholestep.bench.workloads.making import cycled, drawn, moved
from wholestep.data.draws import generator_for
from wholestep.data.windows import Batch
from wholestep.train.optimizers import make_optimizer

PADDING, START, END, FIRST_WORD = 0, 1, 2, 3


def sentence_pairs(rows: int, length: int, words: int, seed: int, number: int) -> Batch:
    """`source` [rows, length], and what the decoder reads and is to write [rows, length + 1]; shorter sentences are padded."""
    dictionary = torch.randperm(words - FIRST_WORD, generator=generator_for(seed, 0, "dictionary")) + FIRST_WORD
    generator = generator_for(seed, number, "sentences")
    lengths = torch.randint(length // 2, length + 1, (rows, 1), generator=generator)
    # Common and rare words, as languages have them.
    drawn_words = torch.rand(rows, length, generator=generator).pow(3).mul(words - FIRST_WORD).long() + FIRST_WORD
    places = torch.arange(length).expand(rows, length)
    inside = places < lengths
    source = torch.where(inside, drawn_words, PADDING)
    backwards = source.gather(1, (lengths - 1 - places).clamp(min=0))
    target = torch.where(inside, dictionary[(backwards - FIRST_WORD).clamp(min=0)], PADDING)
    ended = torch.cat([target, torch.full((rows, 1), PADDING)], dim=1).scatter(1, lengths, END)
    started = torch.cat([torch.full((rows, 1), START), target], dim=1)
    return {"source": source, "read": started, "write": ended}


def translation_loss(model: Any, batch: Batch) -> Tensor:
    """Mean cross-entropy of the words to write; padding does not count."""
    logits = model(batch["source"], batch["read"])
    return F.cross_entropy(logits.flatten(0, 1), batch["write"].flatten(), ignore_index=PADDING)


class Transformer(nn.Module):
    """Vaswani et al., 2017, on `nn.Transformer`: one embedding for both languages and the head, sines as positions."""

    def __init__(self, *, words: int, width: int, layers: int, heads: int, longest: int, dropout: float) -> None:
        super().__init__()
        self.width = width
        self.word = nn.Embedding(words, width, padding_idx=PADDING)
        nn.init.normal_(self.word.weight, std=width**-0.5)
        angles = torch.arange(longest)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
        self.register_buffer("position", torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.body = nn.Transformer(width, heads, layers, layers, 4 * width, dropout, batch_first=True)

    def _embedded(self, ids: Tensor) -> Tensor:
        return self.dropout(self.word(ids) * math.sqrt(self.width) + self.position[: ids.shape[1]])

    def forward(self, source: Tensor, read: Tensor) -> Tensor:
        padding = source == PADDING
        length = read.shape[1]
        # No mask for the decoder's padding: it lies behind every word that counts.
        later = torch.ones(length, length, dtype=torch.bool, device=read.device).triu(1)
        out = self.body(
            self._embedded(source), self._embedded(read), tgt_mask=later, src_key_padding_mask=padding,
            memory_key_padding_mask=padding, tgt_is_causal=True,
        )  # fmt: skip
        return F.linear(out, self.word.weight)


class Recurrent(nn.Module):
    """A bidirectional LSTM reads, an LSTM writes and looks back at all it has read (Luong et al., 2015, without input feeding)."""

    def __init__(self, *, words: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.layers = layers
        self.source_word = nn.Embedding(words, width, padding_idx=PADDING)
        self.target_word = nn.Embedding(words, width, padding_idx=PADDING)
        self.reader = nn.LSTM(width, width // 2, layers, batch_first=True, dropout=dropout, bidirectional=True)
        self.writer = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout)
        self.look, self.mix = nn.Linear(width, width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(width, words)

    def _joined(self, state: Tensor) -> Tensor:
        """Both directions of a layer as one state of the writer's width."""
        _, rows, half = state.shape
        return state.view(self.layers, 2, rows, half).transpose(1, 2).reshape(self.layers, rows, 2 * half)

    def forward(self, source: Tensor, read: Tensor) -> Tensor:
        memory, (hidden, cell) = self.reader(self.dropout(self.source_word(source)))
        start = (self._joined(hidden), self._joined(cell))
        written, _ = self.writer(self.dropout(self.target_word(read)), start)
        scores = self.look(written) @ memory.transpose(1, 2)
        scores = scores.masked_fill((source == PADDING)[:, None], -math.inf)
        context = scores.softmax(dim=2) @ memory
        return self.head(self.dropout(torch.tanh(self.mix(torch.cat([written, context], dim=2)))))


def build_transformer(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
    """The transformer, in its big form on a GPU."""
    model = drawn(
        seed, device,
        lambda: Transformer(
            words=sizes["words"], width=sizes["width"], layers=sizes["layers"], heads=sizes["heads"],
            longest=sizes["length"] + 1, dropout=sizes["dropout"],
        ),
    )  # fmt: skip
    return _training(model, sizes, device, seed, clip_norm=None)


def build_recurrent(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
    """The LSTMs, clipped as every LSTM."""
    model = drawn(
        seed, device,
        lambda: Recurrent(words=sizes["words"], width=sizes["width"], layers=sizes["layers"], dropout=sizes["dropout"]),
    )  # fmt: skip
    return _training(model, sizes, device, seed, clip_norm=5.0)


def _training(
    model: nn.Module, sizes: dict[str, Any], device: torch.device, seed: int, clip_norm: float | None
) -> Training:
    rows, length = sizes["batch"], sizes["length"]
    batches = cycled(lambda n: moved(sentence_pairs(rows, length, sizes["words"], seed, n), device), device)
    part = Part(
        name="model", model=model, loss_fn=translation_loss, clip_norm=clip_norm, example_batch=batches(0),
        optimizer=make_optimizer("adamw", model, lr=sizes["lr"], weight_decay=0.0),
    )  # fmt: skip
    return one_part(part, batches, units=rows * length, precision=sizes["precision"])
