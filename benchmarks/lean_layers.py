"""What a transformer block keeps for its backward, to the byte: plain PyTorch against `wholestep.nn.convert`.

Pre-norm blocks (norm, qkv, causal attention, projection; norm, MLP), pure bf16, activations only (parameters are not
counted), in units of T = batch x tokens x hidden x 2 bytes. Kept tensors are seen by saved_tensors_hooks, each storage once,
so the table is the same on every machine. With CUDA: time of forward and backward, and peak memory, of a stack of blocks.

    python benchmarks/lean_layers.py [--hidden 256] [--tokens 128] [--batch 2] [--layers 8] [--out FILE]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep

HEAD_WIDTH = 64


class GatedMLP(nn.Module):
    """SwiGLU by the names that Llama uses; 8/3 as wide as the block, so it has the weights of a 4x GELU MLP."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        inner = 8 * hidden // 3 // 16 * 16
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down_proj, self.act_fn = nn.Linear(inner, hidden, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LlamaLikeNorm(nn.Module):
    """An RMS norm written out in Python, as Hugging Face does."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(hidden)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    """`kind`: "gelu" (LayerNorm, GELU MLP) or "swiglu" (RMS norm in Python, gated MLP)."""

    def __init__(self, hidden: int, kind: str, p: float) -> None:
        super().__init__()
        norm = nn.LayerNorm if kind == "gelu" else LlamaLikeNorm
        self.norm1, self.norm2 = norm(hidden), norm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        gelu = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.mlp = gelu if kind == "gelu" else GatedMLP(hidden)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        b, t, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, -1, min(HEAD_WIDTH, h)).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, h)
        x = x + self.drop(self.proj(a))
        return x + self.drop(self.mlp(self.norm2(x)))


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    """Distinct storages kept for the backward, parameters excluded."""
    sizes: dict[int, int] = {}
    held: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        if not isinstance(t, nn.Parameter) and not isinstance(t._base, nn.Parameter):
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            held.append(t)  # or another tensor could get its address
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    return sum(sizes.values())


def table(arguments: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """One row per kind of block: bytes kept by plain and converted layers."""
    rows = []
    for kind, p in (("gelu", 0.0), ("gelu", 0.1), ("swiglu", 0.0)):
        torch.manual_seed(0)
        plain = Block(arguments.hidden, kind, p).to(device, torch.bfloat16).train()
        lean = copy.deepcopy(plain)
        wholestep.nn.convert(lean)
        x = torch.randn(arguments.batch, arguments.tokens, arguments.hidden, device=device, dtype=torch.bfloat16)
        unit = x.numel() * x.element_size()
        eager, converted = (kept_bytes(m, x.requires_grad_()) for m in (plain, lean))
        rows.append({"block": kind, "dropout": p, "T_bytes": unit, "eager_bytes": eager, "converted_bytes": converted})
    return rows


def measured(arguments: argparse.Namespace, lean: bool) -> dict[str, float]:
    """Milliseconds of forward and backward (median of 20) and peak bytes above the weights, of a stack on CUDA."""
    torch.manual_seed(0)
    blocks = [Block(arguments.hidden, "gelu", 0.0) for _ in range(arguments.layers)]
    model = nn.Sequential(*blocks).to("cuda", torch.bfloat16)
    if lean:
        wholestep.nn.convert(model)
    x = torch.randn(arguments.batch, arguments.tokens, arguments.hidden, device="cuda", dtype=torch.bfloat16)
    times = []
    for index in range(25):
        if index == 5:  # gradients and workspaces exist by now
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        model(x).float().square().mean().backward()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return {"milliseconds": statistics.median(times[5:]), "peak_bytes": torch.cuda.max_memory_allocated() - base}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("hidden", 256), ("tokens", 128), ("batch", 2), ("layers", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = table(arguments, device)
    print(f"bytes kept per block, bf16, {device}, T = {rows[0]['T_bytes']:,} bytes; the block's input (1 T) included")
    print(f"{'block':8} {'dropout':>7} {'eager bytes':>12} {'converted':>12} {'eager T':>8} {'converted T':>11}")
    for r in rows:
        eager, ours = r["eager_bytes"], r["converted_bytes"]
        in_units = f"{eager / r['T_bytes']:8.3f} {ours / r['T_bytes']:11.3f}"
        print(f"{r['block']:8} {r['dropout']:7} {eager:12,} {ours:12,} {in_units}")
    facts: dict[str, Any] = {"torch": torch.__version__, "device": device, "arguments": vars(arguments), "kept": rows}
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
        for name in ("eager", "converted"):
            facts[name] = measured(arguments, name == "converted")
            stack = f"{arguments.layers} gelu blocks"
            print(f"{name:10} {stack}: {facts[name]['milliseconds']:.2f} ms, peak {facts[name]['peak_bytes']:,} bytes")
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
