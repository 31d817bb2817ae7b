"""Low-rank adapters on a frozen base: only what the optimizer holds is trained, and only that is saved.

A small byte-level language model learns a text, is frozen, and gets a low-rank adapter beside each linear layer of its
perceptrons; the adapters learn the same text in capitals. The base is unchanged bit for bit. The checkpoint holds the
adapters alone, and a fresh base with them loaded computes the same.

    python examples/lora.py --steps 100
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import wholestep

WIDTH, LAYERS, LENGTH, RANK = 64, 2, 32, 4
TEXT = Path(wholestep.__file__).parent / "data" / "files" / "shakespeare.txt"


class LowRank(nn.Module):
    """A linear layer that stays as it is, plus the product of two thin matrices."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        down, up = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        self.adapter = nn.Sequential(down, up)
        nn.init.zeros_(up.weight)  # so that training starts from the base itself

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x)


class Block(nn.Module):
    """Causal attention and a perceptron, each behind a norm and around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, WIDTH)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteModel(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.bytes(ids) + self.places.weight[: ids.shape[1]])))


def next_byte_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def windows(text: bytes, rows: int = 16) -> Callable[[], torch.Tensor]:
    """A function that returns a batch of random windows of a text."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    source = torch.Generator().manual_seed(3)

    def batch() -> torch.Tensor:
        starts = torch.randint(0, len(data) - LENGTH - 1, (rows,), generator=source)
        return torch.stack([data[s : s + LENGTH + 1] for s in starts.tolist()])

    return batch


def add_adapters(model: ByteModel) -> nn.ModuleDict:
    """Freeze the model, put adapters on its perceptrons, and return the adapters by name."""
    model.requires_grad_(False)
    adapters = nn.ModuleDict()
    for number, block in enumerate(model.blocks):
        for name in ("up", "down"):
            adapted = LowRank(getattr(block, name), RANK)
            setattr(block, name, adapted)
            adapters[f"{number}_{name}"] = adapted.adapter
    return adapters


def train(model: nn.Module, parameters: list, batch: Callable[[], torch.Tensor], steps: int, backend: str) -> str:
    """A few steps; the first and the last loss in words."""
    step = wholestep.compile(model, next_byte_loss, torch.optim.AdamW(parameters, lr=5e-3), batch(), backend=backend)
    losses = [float(step(batch())) for _ in range(steps)]
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--backend", choices=["inductor", "interpret"], default="interpret")
    given = parser.parse_args()
    torch.manual_seed(0)
    text = TEXT.read_bytes()[:200_000]
    model = ByteModel()
    print("base:    ", train(model, list(model.parameters()), windows(text), given.steps, given.backend))
    untouched = copy.deepcopy(model)
    adapters = add_adapters(model)
    count, total = (sum(p.numel() for p in m.parameters()) for m in (adapters, model))
    print(f"adapters: {count:,} of {total:,} parameters train, on the same text in capitals")
    capitals = windows(text.upper())
    print("adapters:", train(model, list(adapters.parameters()), capitals, given.steps, given.backend))
    kept = {name.replace(".base", ""): value for name, value in model.state_dict().items() if ".adapter." not in name}
    frozen = all(torch.equal(kept[name], value) for name, value in untouched.state_dict().items())
    print(f"the base is unchanged: {frozen}")
    with tempfile.TemporaryDirectory() as folder:
        path = wholestep.save(folder, model=adapters, step=given.steps)
        size = (path / "model.safetensors").stat().st_size
        loaded = add_adapters(untouched)
        wholestep.load(folder, model=loaded)
    with torch.no_grad():
        ids = capitals()[:, :-1]
        same = torch.equal(model(ids), untouched(ids))
    print(f"saved {size / 1024:.0f} KiB of adapters; a fresh base with them computes the same: {same}")
    return 0 if frozen and same else 1


if __name__ == "__main__":
    sys.exit(main())
