"""Recompute, offload, keep: throughput against the peak of activations, for blocks of few and very wide layers; a process each.

A row is MODEL:WIDTHxLAYERS:SYSTEM, for example `gpt:12288x3:mixed`. GPT and BERT take 16x1024, 16 layers of Llama-8B 2x4096.
Systems of ours: `fastest` (no budget), `keep` (everything kept), `recompute` (every layer), `offload` (every layer's values to
the host), `mixed` (host memory without a budget: what the link hides), `mixed@0.6` (within that share of the card bytes of
`fastest`); of eager PyTorch: `eager`, `save_on_cpu` (torch's own hooks) and `streamed` (`wholestep.offload`). Activations are
what is allocated at the peak of a step beyond what is allocated between steps. Plain SGD, since fp32 weights and AdamW's state
of the widest would fill the card. Rows are written as they are made, and skipped when present.

    python benchmarks/rok.py --out rok.json --svg rok.svg            on a GPU: ten rows for each of seven stacks
    python benchmarks/rok.py --small --out rok.json --svg rok.svg    anywhere: the same, tiny, to see that all of it runs
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
import h200  # noqa: E402

from wholestep.bench.turns import side_by_side  # noqa: E402

BLOCKS = {"gpt": ("8192x4", "12288x3", "16384x2"), "bert": ("8192x4", "12288x3", "16384x2"), "llama": ("4096x16",)}
"""Llama: 16 of the 32 layers of Llama-8B (4096 wide, 32 heads that share 8 keys, 14336 between), so that `eager` and `keep` have
room on one H200: weights and gradients in fp32 are 1.7 GB a layer."""
SMALL_BLOCKS = {"gpt": ("32x4",), "bert": ("32x4",), "llama": ("32x4",)}
SYSTEMS = (
    "fastest",
    "keep",
    "recompute",
    "offload",
    "mixed",
    "mixed@0.8",
    "mixed@0.6",
    "eager",
    "save_on_cpu",
    "streamed",
)
SHAPES = {"gpt": (16, 1024), "bert": (16, 1024), "llama": (2, 4096)}
"""Rows x length."""
SMALL_SHAPE = (2, 16)
STEPS, TIMED = 14, 6
HEAD = 128
HOST = "64GiB"


def build(model: str, width: int, layers: int) -> Any:
    """A stack of transformer blocks without embedding: GPT and Llama norm first and look back only, BERT norms last."""
    from torch import nn

    block = llama_block if model == "llama" else gpt_block

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(block(model, width) for _ in range(layers))

        def forward(self, x: Any) -> Any:
            for one in self.blocks:
                x = one(x)
            return x

    return Stack()


def gpt_block(model: str, width: int) -> Any:
    """Of GPT and BERT: GELU, four times as wide between."""
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def attend(self, x: Any) -> Any:
            batch, length, _ = x.shape
            heads = self.qkv(x).view(batch, length, 3, -1, min(HEAD, width // 2)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=model == "gpt")
            return self.out(mixed.transpose(1, 2).reshape(batch, length, width))

        def forward(self, x: Any) -> Any:
            if model == "gpt":
                x = x + self.attend(self.first(x))
                return x + self.down(F.gelu(self.up(self.second(x))))
            x = self.first(x + self.attend(x))
            return self.second(x + self.down(F.gelu(self.up(x))))

    return Block()


def llama_block(model: str, width: int) -> Any:
    """Of Llama: RMSNorm, rotary positions, four heads share a key, a gate by SiLU, 3.5 times as wide between."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    head = min(HEAD, width // 4)
    wide, keys = 7 * width // 2, width // 4

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
            self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
            self.k, self.v = (nn.Linear(width, keys, bias=False) for _ in range(2))
            self.gate, self.up = (nn.Linear(width, wide, bias=False) for _ in range(2))
            self.down = nn.Linear(wide, width, bias=False)

        def heads(self, x: Any) -> Any:
            return x.unflatten(-1, (-1, head)).transpose(1, 2)

        def attend(self, x: Any) -> Any:
            q, k, v = turned(self.heads(self.q(x))), turned(self.heads(self.k(x))), self.heads(self.v(x))
            k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], dim=1) for one in (k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(mixed.transpose(1, 2).flatten(2))

        def forward(self, x: Any) -> Any:
            x = x + self.attend(self.first(x))
            y = self.second(x)
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def turned(x: Any) -> Any:
        """Rotary positions: halves of a head turn by position times frequency."""
        half = head // 2
        frequencies = 500000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angles = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * frequencies
        sine, cosine = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)

    return Block()


def loss_of(model: Any, batch: Any) -> Any:
    return model(batch["x"]).float().square().mean()


def make_step(system: str, model: Any, optimizer: Any, batch: Any, device: str, fastest: dict[str, Any] | None) -> Any:
    """A function of a batch, and what there is to tell about it."""
    import torch

    import wholestep

    name, _, share = system.partition("@")
    if name in ("eager", "save_on_cpu", "streamed"):
        around: Any = contextlib.nullcontext
        if name == "save_on_cpu":
            around = lambda: torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda")  # noqa: E731
        if name == "streamed":
            around = lambda: wholestep.offload(model, host=HOST if device == "cuda" else "1GiB", least=1 << 12)  # noqa: E731

        def step(batch: Any) -> Any:
            optimizer.zero_grad(set_to_none=True)
            with around(), torch.autocast(device, torch.bfloat16):
                loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, {}
    options: dict[str, Any] = {}
    sch = wholestep.schedule(model)
    if name == "keep":
        options["plan"] = wholestep.Plan()
    elif name == "recompute":
        options["recipe"] = sch["blocks.*"].recompute()
    elif name == "offload":
        options["recipe"] = sch["blocks.*"].offload("values")
    elif name == "mixed":
        options["host_memory"] = HOST if device == "cuda" else "1GiB"
        if share and fastest is not None and fastest.get("card_gib"):
            options["memory"] = int(float(share) * fastest["card_gib"] * 2**30)
    backend = "inductor" if device == "cuda" else "interpret"
    made = wholestep.compile(
        model, loss_of, optimizer, batch, precision="bf16", backend=backend, check="off", **options
    )
    plan = made.plan
    told = {"explain": made.explain(), "moved_bytes": dict(made.regions.get("moved_bytes", {}))}
    if plan is not None:
        told |= {
            "predicted_bytes": plan.predicted_bytes,
            "predicted_seconds": plan.predicted_seconds,
            "host": list(plan.host),
        }
    return made, told


def child(row: str, shape: tuple[int, int], fastest: dict[str, Any] | None) -> dict[str, Any]:
    import torch

    from wholestep import compat
    from wholestep.bench.turns import my_turn, tune_in_turns
    from wholestep.errors import WholestepError

    tune_in_turns()
    model_name, block, system = row.split(":")
    width, layers = map(int, block.split("x"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model = build(model_name, width, layers).train()
        batches = [{"x": torch.randn(*shape, width)} for _ in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    try:
        step, told = make_step(system, model, optimizer, batches[0], device, fastest)
        with my_turn():
            losses = [float(step(batches[i % 2])) for i in range(2)]
            before = torch.cuda.memory_allocated() if device == "cuda" else 0
            if device == "cuda":  # before a CUDA graph takes its memory out of the allocator's sight
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            times = []
            for index in range(2, STEPS):
                began = time.perf_counter()
                loss = step(batches[index % 2])
                losses.append(float(loss))  # waits for the device
                times.append(time.perf_counter() - began)
    except (torch.OutOfMemoryError, WholestepError) as error:
        return {"row": row, "failed": " ".join(str(error).split())[:300]}
    seconds = statistics.median(times[-TIMED:])
    found = {"row": row, "step_ms": 1e3 * seconds, "rows_per_second": shape[0] / seconds, "losses": losses, **told}
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
        found |= {"peak_gib": peak / 2**30, "activations_gib": (peak - before) / 2**30}
        found["card_gib"] = (compat.bytes_on_card(torch.device("cuda")) or 0) / 2**30
    else:
        from wholestep.lower.footprint.predict import predict_profile

        graph = getattr(step, "graph", None)
        if graph is not None:
            found["activations_gib"] = found["peak_gib"] = predict_profile(graph).peak_bytes / 2**30
    return found


def run_row(row: str, small: bool, fastest: dict[str, Any] | None) -> dict[str, Any]:
    """A process of its own."""
    command = [sys.executable, __file__, "--child", row, "--given", json.dumps(fastest)] + (
        ["--small"] if small else []
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]
    except (IndexError, ValueError):
        return {"row": row, "failed": (done.stderr.strip().splitlines() or ["no result"])[-1][:300]}


def claims(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Each block: the least activations within 1 % of the fastest plan's time, and mixed rows that another beats in both."""
    lines = []
    for group in dict.fromkeys(name.rpartition(":")[0] for name in rows):
        mine = {
            n.rpartition(":")[2]: r for n, r in rows.items() if n.startswith(f"{group}:") and "activations_gib" in r
        }
        fastest = mine.get("fastest")
        if fastest is None:
            continue
        mixed = {name: row for name, row in mine.items() if name.startswith("mixed")}
        free = [r for r in mixed.values() if r["step_ms"] <= 1.01 * fastest["step_ms"]]
        if free:
            best = min(free, key=lambda r: r["activations_gib"])
            less = 100 * (1 - best["activations_gib"] / fastest["activations_gib"])
            lines.append(
                f"{group}: {less:.0f} % less activations at {100 * (best['step_ms'] / fastest['step_ms'] - 1):+.1f} % time"
            )
        for name, row in mixed.items():
            beaten = [
                other for other, r in mine.items()
                if not other.startswith("mixed") and r["step_ms"] < row["step_ms"] and r["activations_gib"] < row["activations_gib"]
            ]  # fmt: skip
            lines += [f"{group}: {name} is beaten in both by {', '.join(beaten)}"] if beaten else []
    return lines


def picture(rows: dict[str, dict[str, Any]]) -> str:
    """Throughput against the peak of activations, one colour a block, names beside the marks."""
    known = [(n, r["activations_gib"], r["rows_per_second"]) for n, r in rows.items() if "activations_gib" in r]
    if not known:
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" width="400" height="40"><text x="8" y="24">no rows</text></svg>\n'
        )
    wide, high, left, floor = 1000, 560, 70, 510
    most_x, most_y = 1.05 * max(x for _, x, _ in known), 1.1 * max(y for _, _, y in known)
    groups = list(dict.fromkeys(n.rpartition(":")[0] for n, _, _ in known))
    colours = ("#0b5cad", "#c2410c", "#15803d", "#7e22ce", "#b45309", "#0e7490", "#9f1239")
    body = [f'<rect width="{wide}" height="{high}" fill="#ffffff"/>']
    body += [f'<line x1="{left}" y1="{floor}" x2="{wide - 40}" y2="{floor}" stroke="#818b98"/>']
    body += [f'<line x1="{left}" y1="40" x2="{left}" y2="{floor}" stroke="#818b98"/>']
    body += [f'<text x="{left}" y="{high - 18}">peak of activations, GiB, up to {most_x:.3g}</text>']
    body += [f'<text x="{left}" y="28">rows per second, up to {most_y:.3g}</text>']
    for name, x, y in known:
        group, _, system = name.rpartition(":")
        colour = colours[groups.index(group) % len(colours)]
        across, up = left + (wide - 240 - left) * x / most_x, floor - (floor - 40) * y / most_y
        body.append(f'<circle cx="{across:.1f}" cy="{up:.1f}" r="4" fill="{colour}"/>')
        body.append(
            f'<text x="{across + 7:.1f}" y="{up + 4:.1f}" fill="{colour}" font-size="11">{group} {system}</text>'
        )
    style = "<style>text { font-family: system-ui, sans-serif; font-size: 12px }</style>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}">{style}{"".join(body)}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("rok.json"))
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--small", action="store_true", help="tiny blocks, for a CPU")
    parser.add_argument("--jobs", type=int, default=1, help="rows that compile at once; they are timed in turns")
    parser.add_argument("--rows", help="only these, with commas between")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--given", default="null", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        warnings.simplefilter("ignore")
        shape = SMALL_SHAPE if given.small else SHAPES[given.child.partition(":")[0]]
        print(json.dumps(child(given.child, shape, json.loads(given.given))))
        return
    blocks = SMALL_BLOCKS if given.small else BLOCKS
    wanted = (
        given.rows.split(",")
        if given.rows
        else [f"{model}:{block}:{system}" for model, sizes in blocks.items() for block in sizes for system in SYSTEMS]
    )
    rows: dict[str, dict[str, Any]] = {}
    if given.out.exists():
        rows = {row["row"]: row for row in json.loads(given.out.read_text(encoding="utf-8"))["rows"]}
    lock = threading.Lock()

    def make(row: str) -> None:
        found = run_row(row, given.small, rows.get(f"{row.rpartition(':')[0]}:fastest"))
        with lock:
            rows[row] = found
            document = {"machine": h200.facts(), "rows": list(rows.values())}
            given.out.write_text(json.dumps(document, indent=1), encoding="utf-8")
        shown = found.get("failed") or f"{found['step_ms']:.1f} ms, {found.get('activations_gib', 0):.3g} GiB"
        print(f"{row:28} {shown}", flush=True)

    missing = [row for row in wanted if row not in rows or "failed" in rows[row]]
    side_by_side(make, [row for row in missing if "@" not in row], given.jobs)
    side_by_side(make, [row for row in missing if "@" in row], given.jobs)  # they are given what `fastest` takes
    for line in claims(rows):
        print(line)
    if given.svg is not None:
        given.svg.write_text(picture(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
