"""Plain PyTorch modules of the zoo, each there for one thing that a captured step could get wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.zoo.case import NUM_BATCHES, Built
from torch import nn

Batch = dict[str, torch.Tensor]


def _vector_batches(
    width: int, classes: int, rows: int = 4, dtype: torch.dtype = torch.float32
) -> tuple[list[Batch], list[Batch]]:
    """Rows of normal numbers with class labels; the edges are zeros, large values, one ignored row, equal rows."""
    batches = []
    for index in range(NUM_BATCHES):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(rows, width, generator=generator).to(dtype)
        batches.append({"x": x, "y": torch.randint(0, classes, (rows,), generator=generator)})
    first = batches[0]
    one_label = torch.full_like(first["y"], -100)
    one_label[0] = classes - 1
    edges = [
        first | {"x": torch.zeros_like(first["x"])},
        first | {"x": first["x"] * 100},
        first | {"x": first["x"][:1].expand_as(first["x"]).clone(), "y": torch.zeros_like(first["y"])},
        first | {"y": one_label},
    ]
    return batches, edges


def _token_batches(vocab: int, rows: int, tokens: int) -> tuple[list[Batch], list[Batch]]:
    batches = []
    for index in range(NUM_BATCHES):
        generator = torch.Generator().manual_seed(index)
        x, y = torch.randint(0, vocab, (2, rows, tokens), generator=generator)
        batches.append({"x": x, "y": y})
    first = batches[0]
    one_label = torch.full_like(first["y"], -100)
    one_label[0, 1] = 3
    edges = [
        {"x": torch.zeros_like(first["x"]), "y": torch.zeros_like(first["y"])},
        {"x": torch.full_like(first["x"], vocab - 1), "y": torch.full_like(first["y"], vocab - 1)},
        first | {"x": torch.full_like(first["x"], 5)},
        first | {"y": one_label},
    ]
    return batches, edges


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(x), y)


class BatchNormCnn(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16, momentum=momentum), nn.ReLU(inplace=True),
            nn.Dropout(0.1),
        )  # fmt: skip
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.convolutions(x).mean((2, 3))), y)


class TransformerModel(nn.Module):
    """torch's own encoder-decoder module; attention runs inside F.multi_head_attention_forward."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, dim_feedforward=64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, vocab)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.transformer(self.embedding(x), self.embedding(x), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


class LstmModel(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(24, vocab)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(x))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


class LoraLinear(nn.Module):
    def __init__(self, width_in: int, width_out: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(width_in, width_out).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, width_in) * 0.1)
        self.up = nn.Parameter(torch.zeros(width_out, rank))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(self.dropout(x), self.down), self.up) * 2.0


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(LoraLinear(20, 32), nn.ReLU(), LoraLinear(32, 10))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(x), y)


class Bf16Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 10))
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(x).float(), y)


class TiedFrozen(nn.Module):
    """Tied head, a frozen layer in the middle, and a parameter that the loss never reads (no decay, no state)."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.norm = nn.LayerNorm(16)
        self.norm.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(16, 3))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.norm(F.gelu(self.frozen(self.embedding(x)))))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


class InplaceBuffers(nn.Module):
    """Writes to activations, to views of them and to buffers; one buffer is replaced instead of written."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 16), nn.Linear(16, 10)
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("largest", torch.zeros(16))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden[:, :4].mul_(2.0)
        hidden.view(-1, 4, 4).transpose(1, 2)[:, 0].add_(1.0)
        hidden = F.relu_(hidden) * 1.5
        self.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        self.largest = torch.maximum(self.largest, hidden.detach().amax(0))
        hidden = F.dropout(hidden + 0.1 * self.average, 0.1, self.training, inplace=True)
        hidden[:, 0] = self.largest[0]
        return F.cross_entropy(self.second(hidden), y)


def mlp() -> Built:
    torch.manual_seed(0)
    batches, edges = _vector_batches(20, 10)
    return Built(Mlp(), batches, edge_batches=edges)


def bn_cnn(momentum: float | None = 0.1) -> Built:
    torch.manual_seed(0)
    batches, edges = _vector_batches(3 * 12 * 12, 10)
    # not the batch of zeros: at variance 0 the normalisation multiplies eager's own rounding noise by 1/sqrt(eps)
    images = [[batch | {"x": batch["x"].view(-1, 3, 12, 12)} for batch in some] for some in (batches, edges[1:])]
    return Built(BatchNormCnn(momentum), images[0], edge_batches=images[1])


def bn_cumulative() -> Built:
    return bn_cnn(momentum=None)


def transformer() -> Built:
    torch.manual_seed(0)
    batches, edges = _token_batches(97, 2, 11)
    return Built(TransformerModel(97), batches, edge_batches=edges)


def lstm() -> Built:
    torch.manual_seed(0)
    batches, edges = _token_batches(61, 3, 7)
    return Built(LstmModel(61), batches, edge_batches=edges)


def lora() -> Built:
    torch.manual_seed(0)
    batches, edges = _vector_batches(20, 10)
    model = Lora()
    return Built(model, batches, edge_batches=edges, trained=lambda: [p for p in model.parameters() if p.requires_grad])


def bf16_weights() -> Built:
    torch.manual_seed(0)
    batches, edges = _vector_batches(20, 10, dtype=torch.bfloat16)
    return Built(Bf16Weights(), batches, edge_batches=edges)


def tied_frozen() -> Built:
    torch.manual_seed(0)
    batches, edges = _token_batches(61, 3, 7)
    return Built(TiedFrozen(61), batches, edge_batches=edges)


def inplace_buffers() -> Built:
    torch.manual_seed(0)
    batches, edges = _vector_batches(20, 10)
    return Built(InplaceBuffers(), batches, edge_batches=edges)
