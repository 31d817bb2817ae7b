"""Budgets from the most a step would take down to the least: kept, monotone, and refused below; shallow versions of three models.

One process per model, which trains on while its step is compiled for one budget after the other. For each: bytes of the
card (reserved plus CUDA context), the allocated peak, what was predicted from the graph alone and after compiling, the time of
a step. A budget below the smallest is asked for and must be refused, and the smallest it names must be granted.

    python benchmarks/budget_sweep.py --models bert,gpt2,llama --layers 4 --points 8 --out FILE
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
import h200  # noqa: E402

WARM, TIMED = 8, 6
GIB = 2**30


def child(name: str, layers: int, points: int) -> dict[str, Any]:
    import torch

    from wholestep import compat
    from wholestep.bench.turns import tune_in_turns

    tune_in_turns()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":  # from the start, as in a process whose first step has a budget
        compat.grow_segments()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device(device):
        model = h200.build(name, layers).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, model.config.vocab_size, h200.SHAPES[name], generator=torch.Generator().manual_seed(0)).to(
        device
    )
    job = (model, optimizer, {"input_ids": ids, "labels": ids})
    free = measured(job, None)
    refused = measured(job, 2 * free["weights_bytes"])
    if "refused" not in refused:
        raise SystemExit(f"{name}: a budget of twice its weights was granted, so nothing is known of the smallest")
    rows = [free, refused, measured(job, refused["smallest_bytes"])]
    if "refused" in rows[-1]:  # kernels loaded meanwhile take a little of the card: it names the smallest anew
        rows.append(measured(job, rows[-1]["smallest_bytes"]))
    smallest, most = rows[-1]["budget_bytes"], free["card_bytes"]
    for step in range(1, points):
        rows.append(measured(job, int(smallest + (most - smallest) * step / (points - 1))))
        print(rows[-1], flush=True)  # seen where the rest is cut short
    rows.append(measured(job, int(0.97 * smallest)))
    return {"rows": sorted(rows, key=lambda row: -(row["budget_bytes"] or 2**60)), "smallest_bytes": smallest}


def measured(job: tuple[Any, Any, Any], budget: int | None) -> dict[str, Any]:
    """One compiled step: what it takes and how long; or its refusal."""
    import torch

    import wholestep
    from wholestep.bench.turns import my_turn
    from wholestep.errors import BudgetTooSmall

    model, optimizer, batch = job
    on_gpu = batch["input_ids"].is_cuda
    row: dict[str, Any] = {"budget_bytes": budget}
    began = time.perf_counter()
    try:
        step = wholestep.compile(
            model, h200.plain_loss, optimizer, batch, precision="bf16", memory=budget, check="off",
            backend="inductor" if on_gpu else "interpret",
        )  # fmt: skip
    except BudgetTooSmall as refusal:
        return row | {"refused": str(refusal), "smallest_bytes": refusal.smallest_bytes}
    row["compile_seconds"] = time.perf_counter() - began
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    losses: list[Any] = []
    with my_turn():
        h200.timed_steps(step, [batch], WARM, 0, losses)
        times = h200.timed_steps(step, [batch], TIMED, 0, losses)
    row |= {"step_ms": statistics.median(times), "step_ms_all": times, "loss": float(losses[-1])}
    row["weights_bytes"] = sum(p.numel() * p.element_size() for p in model.parameters())
    row |= (
        {"again": len(step.plan.recompute), "predicted_bytes": step.plan.predicted_bytes}
        if step.plan is not None
        else {}
    )
    row |= card_facts(step, model, optimizer, batch)
    del step
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return row


def card_facts(step: Any, model: Any, optimizer: Any, batch: Any) -> dict[str, int]:
    import torch

    if not torch.cuda.is_available():  # bytes of tensors instead
        from wholestep.profile.memory.profile import memory_profile

        profile = memory_profile(step, model=model, optimizer=optimizer, batch=batch)
        peak = profile.peak_bytes - profile.at_peak["other"]
        return {"allocated_bytes": peak, "card_bytes": peak}
    from wholestep import compat

    held = compat.bytes_on_card(torch.device("cuda"))
    if held is None:
        raise SystemExit("the driver does not tell what this process holds of the card (is nvidia-ml-py installed?)")
    context = held - torch.cuda.memory_reserved()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved(),
        "card_bytes": torch.cuda.max_memory_reserved() + context,
    }  # fmt: skip


def verdict(found: dict[str, Any]) -> dict[str, Any]:
    """What must hold: every budget kept, peaks falling and times rising with less, the least granted and less refused."""
    granted = [row for row in found["rows"] if row.get("budget_bytes") and "refused" not in row]
    peaks = [row["allocated_bytes"] for row in granted]
    times = [row["step_ms"] for row in granted]
    gained = [1 - after / max(times[: index + 1]) for index, after in enumerate(times[1:])]
    errors = [abs(row["predicted_bytes"] / row["allocated_bytes"] - 1) for row in granted if row.get("predicted_bytes")]
    return {
        "kept": all(row["card_bytes"] <= row["budget_bytes"] for row in granted),
        "monotone": all(after <= before * 1.001 for before, after in itertools.pairwise(peaks)),
        "largest_speedup_by_less_memory": max(gained, default=0.0),  # noise where it is small
        "smallest_granted": bool(granted) and granted[-1]["budget_bytes"] == found["smallest_bytes"],
        "less_refused": all(
            "refused" in row for row in found["rows"] if 0 < (row["budget_bytes"] or 0) < found["smallest_bytes"]
        ),
        "largest_prediction_error": max(errors, default=None),
    }


def show(name: str, found: dict[str, Any]) -> None:
    print(f"{name}: {found['verdict']}", flush=True)
    for row in found["rows"]:
        asked = f"{row['budget_bytes'] / GIB:7.2f}" if row["budget_bytes"] else "   none"
        if "refused" in row:
            print(f"  budget {asked}  refused: {row['refused'][:110]}", flush=True)
            continue
        took = f"card {row['card_bytes'] / GIB:6.2f}  allocated {row['allocated_bytes'] / GIB:6.2f}"
        print(f"  budget {asked}  {took}  {row['step_ms']:7.1f} ms  {row.get('again', 0)} recomputed", flush=True)


class Sweeps:
    """Models in a file, made by one worker or several until the time is up."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.lock = options, threading.Lock()
        self.deadline = time.monotonic() + options.limit
        self.models: dict[str, Any] = {}
        if options.out.exists():
            self.models = json.loads(options.out.read_text("utf-8"))["models"]

    def make(self, names: list[str]) -> None:
        from wholestep.bench.turns import side_by_side

        side_by_side(self._one, [name for name in names if name not in self.models], self.options.jobs)

    def _one(self, name: str) -> None:
        left, options = self.deadline - time.monotonic(), self.options
        if left < 30:
            print(f"out of time before {name}; the same command goes on from here", flush=True)
            return
        command = [
            sys.executable,
            __file__,
            "--child",
            name,
            "--layers",
            str(options.layers),
            "--points",
            str(options.points),
        ]
        environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=left, check=False)
        except subprocess.TimeoutExpired as cut:
            told = (cut.stdout or b"").decode(errors="replace")
            print(f"{name}: out of time; the same command makes it again. So far:\n{told[-3000:]}", flush=True)
            return
        answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
        with self.lock:
            if done.returncode or not answers:
                print(f"{name}: failed: {done.stderr.strip()[-1500:]}", flush=True)
                return
            found = self.models[name] = json.loads(answers[-1]) | {"layers": options.layers, "jobs": options.jobs}
            found["verdict"] = verdict(found)
            show(name, found)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(
                json.dumps({"machine": h200.facts(), "models": self.models}, indent=1) + "\n", encoding="utf-8"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="bert,gpt2,llama")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "budget_sweep.json")
    parser.add_argument("--limit", type=float, default=500.0, help="seconds for all models")
    parser.add_argument("--jobs", type=int, default=1, help="models at work at once, timed in turns")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print("\n" + json.dumps(child(options.child, options.layers, options.points)), flush=True)
        return
    Sweeps(options).make(options.models.split(","))


if __name__ == "__main__":
    main()
