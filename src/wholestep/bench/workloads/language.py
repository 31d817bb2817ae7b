"""Language models: BERT (masked words), GPT-2 and Llama (the next word) of Hugging Face, and an LSTM in plain PyTorch.

In: sizes, among them fields of a model's own configuration. Out: a Training on Shakespeare's plays. The presets of `wholestep
train` are the one place where the large configurations are written down.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wholestep.bench.workload import Part, Training, one_part
from wholestep.bench.workloads.making import drawn, masked_form, next_token_batches, text_batches, text_tokens
from wholestep.data.windows import Form, labelled_form
from wholestep.train.families import find_family
from wholestep.train.models.gpt import next_token_loss
from wholestep.train.optimizers import make_optimizer
from wholestep.train.presets import PRESETS


def build_language_model(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
    """The preset `sizes["preset"]`, with the fields in `sizes["config"]` changed."""
    preset = PRESETS[sizes["preset"]]
    family = find_family(preset.family, said=sizes["preset"])
    config = family.configure({**preset.config, **sizes["config"]})
    tokens, content = text_tokens(sizes["tokens"], sizes["vocabulary"], reserved=True)
    form: Form = masked_form(tokens) if family.task == "masked" else labelled_form
    rows, seq = sizes["batch"], sizes["seq"]
    batches = text_batches(tokens, content, form, window=seq, seq=seq, rows=rows, seed=seed, device=device)
    model = drawn(seed, device, lambda: family.build(config, None))
    optimizer = make_optimizer("adamw", model, lr=sizes["lr"], weight_decay=preset.weight_decay)
    part = Part(
        name="model", model=model, loss_fn=family.loss_fn, optimizer=optimizer, example_batch=batches(0), clip_norm=1.0
    )
    return one_part(part, batches, units=rows * seq, precision=sizes["precision"])


class LSTMLanguageModel(nn.Module):
    """Token ids in, logits of the next token out; every window starts from an empty state."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.token, self.dropout = nn.Embedding(vocabulary, width), nn.Dropout(dropout)
        self.recurrent = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.dropout(self.recurrent(self.dropout(self.token(ids)))[0]))


def build_lstm(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
    """The LSTM, clipped as in the paper."""
    rows, seq = sizes["batch"], sizes["seq"]
    batches = next_token_batches(sizes, device, seed)
    model = drawn(
        seed, device,
        lambda: LSTMLanguageModel(
            vocabulary=sizes["vocabulary"], width=sizes["width"], layers=sizes["layers"], dropout=sizes["dropout"]
        ),
    )  # fmt: skip
    optimizer = make_optimizer("adamw", model, lr=sizes["lr"], weight_decay=0.0)
    part = Part(
        name="model", model=model, loss_fn=next_token_loss, optimizer=optimizer, example_batch=batches(0), clip_norm=5.0
    )
    return one_part(part, batches, units=rows * seq, precision=sizes["precision"])
