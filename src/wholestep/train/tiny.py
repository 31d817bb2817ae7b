"""A tiny language model trained on this package's own source text: no data to fetch, a minute on two CPU cores.

In: number of steps and a backend. Out: the losses. It exists to show, and to test, one whole run from `compile` to a
falling loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.runtime.step import Step

VOCABULARY = 256


class Block(nn.Module):
    """A transformer layer: attention and a perceptron, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class TinyGPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(
        self, width: int = 128, layers: int = 4, heads: int = 4, context: int = 64, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean cross-entropy of every byte given those before it."""
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def batches(context: int, batch: int, device: torch.device) -> Iterator[Tensor]:
    """Random windows of this package's source code, as bytes."""
    text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.parent.rglob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(0, len(data) - context - 1, (batch,), generator=generator)
        yield torch.stack([data[s : s + context + 1] for s in starts.tolist()]).long().to(device)


def train_tiny(
    compile_step: Callable[..., Step],
    steps: int = 200,
    *,
    backend: str = "inductor",
    dump: str | None = None,
    say: Callable[[str], None] = print,
) -> list[float]:
    """Compile (by `wholestep.compile`, handed in) and train; says what happens, returns the losses it reported."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = TinyGPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    stream = batches(64, 16, device)
    began = time.perf_counter()
    step = compile_step(model, next_byte_loss, optimizer, next(stream), clip_norm=1.0, backend=backend, dump=dump)
    say(step.explain())
    count = sum(p.numel() for p in model.parameters())
    say(f"compiled in {time.perf_counter() - began:.1f} s; {count:,} parameters on {device}")
    losses: list[float] = []
    began = time.perf_counter()
    for number in range(1, steps + 1):
        loss = step(next(stream))
        schedule.step()
        if number == 1 or number % max(steps // 10, 1) == 0:
            losses.append(float(loss))
            say(f"step {number:4d}  loss {losses[-1]:.3f}  {1e3 * (time.perf_counter() - began) / number:.1f} ms/step")
    say(f"a byte drawn at random costs {math.log(VOCABULARY):.3f}; the model now pays {losses[-1]:.3f}")
    return losses
