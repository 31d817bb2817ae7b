"""Random small networks: whatever layers, sizes, frozen parameters and optimizer flags meet, the step is eager's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import wholestep

pytestmark = pytest.mark.filterwarnings("ignore::wholestep.errors.WholestepWarning")

VOCAB = 7
KINDS = (
    "linear", "norm", "gelu", "dropout", "residual", "inplace_relu", "write_view", "reshape", "softmax", "batch_norm",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Design:
    """One network and its training, as drawn."""

    embeds: bool
    rows: int
    tokens: int
    width: int
    layers: tuple[tuple[str, int], ...]
    """(kind, size or seed of the layer)."""
    frozen: int
    """Bit mask over parameters; the head is always trained."""
    optimizer: str
    flags: dict[str, Any]
    clip_norm: float | None


class Network(nn.Module):
    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design = design
        width = design.width
        self.embedding = nn.Embedding(VOCAB, width) if design.embeds else nn.Identity()
        self.layers = nn.ModuleList()
        for kind, size in design.layers:
            made, width = self._layer(kind, size, width)
            self.layers.append(made)
        self.head = nn.Linear(width, VOCAB)
        for index, parameter in enumerate([*self.embedding.parameters(), *self.layers.parameters()]):
            parameter.requires_grad_(not design.frozen >> index & 1)

    @staticmethod
    def _layer(kind: str, size: int, width: int) -> tuple[nn.Module, int]:
        if kind == "linear":
            return nn.Linear(width, size, bias=size % 2 == 0), size
        if kind == "norm":
            return nn.LayerNorm(width), width
        if kind == "batch_norm":
            return nn.BatchNorm1d(width), width
        return nn.Identity(), width

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x).flatten(0, 1) if self.design.embeds else x
        earlier = hidden
        for (kind, size), layer in zip(self.design.layers, self.layers):
            earlier, hidden = hidden, self._apply(kind, size, layer, hidden, earlier)
        return F.cross_entropy(self.head(hidden), y)

    def _apply(
        self, kind: str, size: int, layer: nn.Module, hidden: torch.Tensor, earlier: torch.Tensor
    ) -> torch.Tensor:
        if kind in ("linear", "norm", "batch_norm"):
            return layer(hidden)
        if kind == "gelu":
            return F.gelu(hidden, approximate="tanh" if size % 2 else "none")
        if kind == "dropout":
            return F.dropout(hidden, size / 10, self.training)
        if kind == "residual":
            return hidden + earlier if earlier.shape == hidden.shape else hidden * 2
        if kind == "inplace_relu":
            return (hidden * 1.5).relu_()
        if kind == "write_view":
            fresh = hidden + 0.5
            fresh[:, ::2].mul_(0.7)
            return fresh
        if kind == "reshape":
            return hidden.t().reshape(-1).view(hidden.shape) + hidden.transpose(0, 1).contiguous().t()
        return hidden.t().softmax(-1).t() if size % 2 else hidden.softmax(-1)


@st.composite
def designs(draw: st.DrawFn) -> Design:
    embeds = draw(st.booleans())
    rows, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 4)) if embeds else 1
    kinds = [kind for kind in KINDS if kind != "batch_norm" or rows * tokens > 1]  # torch refuses one row
    layers = draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(1, 9)), min_size=1, max_size=7))
    decay = draw(st.sampled_from([0.0, 0.1]))
    flags: dict[str, Any] = {"lr": 0.05, "weight_decay": decay, "maximize": draw(st.booleans())}
    optimizer = draw(st.sampled_from(["sgd", "adamw"]))
    if optimizer == "sgd":
        flags["momentum"] = draw(st.sampled_from([0.0, 0.9]))
        flags["nesterov"] = flags["momentum"] > 0 and draw(st.booleans())
        flags["dampening"] = 0.0 if flags["nesterov"] else draw(st.sampled_from([0.0, 0.2]))
    else:
        flags["amsgrad"] = draw(st.booleans())
    flags |= draw(st.sampled_from([{}, {"foreach": True}, {"foreach": False}, {"fused": True}]))
    return Design(embeds, rows, tokens, draw(st.integers(1, 9)), tuple(layers), draw(st.integers(0, 63)),
                  optimizer, flags, draw(st.sampled_from([None, 0.5])))  # fmt: skip


def batches(design: Design, count: int) -> list[dict[str, torch.Tensor]]:
    made = []
    for index in range(count):
        source = torch.Generator().manual_seed(index)
        if design.embeds:
            x = torch.randint(0, VOCAB, (design.rows, design.tokens), generator=source)
        else:
            x = torch.randn(design.rows, design.width, generator=source)
        made.append({"x": x, "y": torch.randint(0, VOCAB, (design.rows * design.tokens,), generator=source)})
    return made


@pytest.mark.slow
@given(design=designs())
@settings(max_examples=15)
def test_a_random_network_trains_as_in_eager(design: Design) -> None:
    torch.manual_seed(0)
    network = Network(design)
    make = torch.optim.SGD if design.optimizer == "sgd" else torch.optim.AdamW
    report = wholestep.verify(
        network, lambda model, batch: model(**batch), make(network.parameters(), **design.flags), batches(design, 2),
        steps=2, clip_norm=design.clip_norm, backend="interpret",
    )  # fmt: skip
    assert report.ok and report.bitwise, f"{design}\n{report}"
