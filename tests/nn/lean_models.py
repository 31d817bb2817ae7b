"""What the tests of lean layers share: a small transformer, pairs of plain and converted models, bytes kept for a backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep

HIDDEN, HEADS = 24, 3  # no powers of two: odd sizes in every matrix


class Block(nn.Module):
    """Pre-norm attention and a GELU MLP, of torch's own layers."""

    def __init__(self, hidden: int = HIDDEN, heads: int = HEADS, p: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.act, self.down = nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        b, t, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, h)
        x = x + self.drop(self.proj(a))
        return x + self.drop(self.down(self.act(self.up(self.norm2(x)))))


class Net(nn.Module):
    """Two blocks, a norm and a head over few classes."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(p=p), Block(p=p))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(x)))


def twins(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """A model and its converted copy."""
    torch.manual_seed(0)
    plain = make().to(dtype)
    lean = copy.deepcopy(plain)
    assert wholestep.nn.convert(lean).swapped
    return plain, lean


def saved_bytes(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Bytes kept for the backward by one forward: distinct storages, without those of parameters."""
    held: dict[int, Tensor] = {}
    sizes: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if not isinstance(t, nn.Parameter) and not isinstance(t._base, nn.Parameter):
            held[storage.data_ptr()] = t  # kept, or another tensor could get its address
            sizes[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(*args, **kwargs)
    del out
    return sum(sizes.values())


def outcome(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Output, gradient of the (float) input and gradients of all parameters, by name."""
    model.zero_grad(set_to_none=True)
    args = tuple(a.detach().clone().requires_grad_() if a.is_floating_point() else a for a in args)
    out = model(*args, **kwargs)
    out = getattr(out, "loss", out) if not isinstance(out, Tensor) else out
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float32).to(out).view(out.shape)
    (out * weights).sum().backward()
    found = {"output": out.detach()}
    found |= {f"input {n}": a.grad for n, a in enumerate(args) if a.grad is not None}
    return found | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names whose bits are not the same, or that only one has."""
    return [
        n for n in {**a, **b} if n not in a or n not in b or a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])
    ]
