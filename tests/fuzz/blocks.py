"""Modules that random programs are built from, beside those of torch.nn: attention written in several ways, layers that repeat."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from wholestep import ops as ops  # registers ws::biased_attention


class Feedforward(nn.Module):
    """Enough operators to count as a layer of its own where it is repeated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)) * 1.5) + 0.5)


class Gated(nn.Module):
    """A gate and a value from two layers (`apart`) or from one (`halves`); `twice` the gate is read by another product too, and
    `shared` both come through the same weight."""

    def __init__(self, width: int, hidden: int = 8, gate: str = "silu", form: str = "apart") -> None:
        super().__init__()
        self.gate, self.form = getattr(F, gate), form
        self.up = nn.Linear(width, 2 * hidden if form == "halves" else hidden, bias=False)
        self.value = self.up if form in ("halves", "shared") else nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.form == "halves":
            gate, value = self.up(x).chunk(2, -1)
            return x + self.down(self.gate(gate) * value)
        opened = self.gate(self.up(x))
        mixed = opened * self.value(x)
        if self.form == "twice":
            mixed = mixed + opened.mean(-1, keepdim=True) * opened
        return x + self.down(mixed)


class Repeated(nn.Module):
    """Equal layers, one after the other."""

    def __init__(self, width: int, layers: int = 2, kind: Callable[[int], nn.Module] = Feedforward) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class SelfAttention(nn.Module):
    """Attention over (batch, tokens, width), with the products written as `form` says."""

    def __init__(self, width: int, heads: int, form: str = "sdpa", mask: str = "none") -> None:
        super().__init__()
        self.heads, self.form, self.mask = heads, form, mask
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        if form == "windows":
            self.slope = nn.Parameter(torch.linspace(0.5, 1.5, heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        split = (rows, tokens, self.heads, width // self.heads)
        query, key, value = (part.reshape(split) for part in self.into(x).chunk(3, -1))
        mask = attention_mask(self.mask, tokens)
        if self.form == "einsum":
            scores = torch.einsum("blhd,bmhd->bhlm", query, key) * split[-1] ** -0.5
            if mask is not None:
                scores = scores.masked_fill(~mask, -1e9)
            mixed = torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), value)
        else:
            query, key, value = (part.transpose(1, 2) for part in (query, key, value))
            if self.form == "matmul":
                scores = query @ key.transpose(-1, -2) / split[-1] ** 0.5
                if mask is not None:
                    scores = torch.where(mask, scores, torch.full_like(scores, -1e9))
                mixed = (scores.softmax(-1) @ value).transpose(1, 2)
            elif self.form == "windows":
                bias = window_bias(self.slope, rows, tokens)
                mixed = torch.ops.ws.biased_attention(query, key, value, bias, 0.5)[0].transpose(1, 2)
            else:
                mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
        return self.out(mixed.reshape(rows, tokens, width))


def window_bias(slope: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
    """(rows, heads, tokens, tokens): a learned slope by distance, and a mask that repeats itself after some rows."""
    places = torch.arange(tokens)
    table = (slope[:, None, None] * (places[:, None] - places[None, :]).abs())[None]
    windows = next(n for n in (2, 3, 1) if rows % n == 0)
    hidden = (places[None, :, None] + places[None, None, :] + torch.arange(windows)[:, None, None]) % 3 == 0
    mask = hidden.float()[None, :, None] * -3.0
    return table + mask.expand(rows // windows, -1, -1, -1, -1).reshape(rows, 1, tokens, tokens)


def attention_mask(kind: str, tokens: int) -> torch.Tensor | None:
    """True where attention may look."""
    if kind == "none":
        return None
    whole = torch.ones(tokens, tokens, dtype=torch.bool)
    if kind == "causal":
        return whole.tril()
    if kind == "band":
        return whole.tril() & whole.triu(-1)
    if kind == "ahead":
        return whole.tril(1)
    return whole


class Head(nn.Module):
    """Logits over a small vocabulary and their loss; rows with the target -100 count nothing."""

    def __init__(self, width: int, vocabulary: int, bias: bool = True) -> None:
        super().__init__()
        self.out = nn.Linear(width, vocabulary, bias=bias)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.out(x.reshape(-1, x.shape[-1])), target)


class Averaged(nn.Module):
    """A moving average of a weight, which nothing reads, or which is a teacher that is not trained."""

    def __init__(self, width: int, read: bool = False) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(width, width), read
        self.mean = nn.Buffer(torch.zeros(width, width))
        self.steps = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.layer(x)
        with torch.no_grad():
            self.steps += 1
            self.mean.lerp_(self.layer.weight, 0.1)
            teacher = F.linear(x, self.mean)
        return (made - teacher).tanh() if self.read else made


class Twice(torch.autograd.Function):
    """A derivative of its own: a gradient that is clipped on its way."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return (gradient * 2).clamp(-0.5, 0.5) * (x > -1)


class Checkpointed(nn.Module):
    """A layer whose inside is computed again in the backward, as torch does it."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Sequential(Feedforward(width), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Quantised(nn.Module):
    """The nearest of some learned rows, straight through: a codebook as in VQ-VAE."""

    def __init__(self, width: int, rows: int = 5) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(rows, width) * 0.5)
        self.uses = nn.Buffer(torch.zeros(rows))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        nearest = torch.cdist(flat.detach(), self.codes.detach()).argmin(-1)
        self.uses.index_add_(0, nearest, torch.ones(len(nearest)))
        chosen = self.codes[nearest].reshape(x.shape)
        return x + (chosen - x).detach() + 0.25 * (chosen - x.detach())
