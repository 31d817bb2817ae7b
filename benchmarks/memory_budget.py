"""What a memory budget costs: BERT-large, GPT-2-medium and a 1.2B Llama on one GPU, within budgets, beside peers; a process each.

A row is MODEL:SYSTEM[:BUDGET][:BATCH][:LAYERS], for example `llama:eager`, `llama:compile`, `llama:wholestep:26GiB`,
`gpt2:wholestep:14GiB:32`, `bert:wholestep:6GiB::4`. Same weights, data, seed and precision as in h200.py. Every row has the
allocated and reserved peak, the bytes the card shows, the time of a step, and the losses. `hard` behind a budget
(`22GiB!`) also sets the allocator's limit to it, as on a smaller card. `27GiB+64GiB` allows 64 GiB of host memory beside the
budget, `+64GiB` without one. The system `sgd` is ours with plain SGD, which has no state. Rows are written as they are made and
skipped when present. With `--jobs 3` three compile at once and are timed in turns.

    python benchmarks/memory_budget.py --rows llama:compile,llama:wholestep,llama:wholestep:26GiB --out FILE
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
import h200  # noqa: E402

STEPS, TIMED = 24, 8
CUT = "took more than"
"""How the error of a row begins that the same command makes again."""


def parse(text: str) -> dict[str, Any]:
    model, system, memory, batch, layers = [*text.split(":"), "", "", ""][:5]
    budget, _, host = memory.partition("+")
    return {
        "host": host or None,
        "row": text, "model": model, "system": system, "budget": budget.rstrip("!") or None, "hard": budget.endswith("!"),
        "batch": int(batch or h200.SHAPES[model][0]), "layers": int(layers or h200.LAYERS[model]),
    }  # fmt: skip


def child(row: dict[str, Any]) -> dict[str, Any]:
    import torch

    from wholestep import compat
    from wholestep.bench.turns import my_turn, tune_in_turns
    from wholestep.errors import BudgetTooSmall
    from wholestep.graph.bytes import parse_bytes
    from wholestep.plan.frontier import CONTEXT_BYTES

    tune_in_turns()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    total = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 0
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device(device):
        model = h200.build(row["model"], row["layers"]).train()
    held = compat.bytes_on_card(torch.device(device)) if device == "cuda" else None
    context = max(held - torch.cuda.memory_reserved(), CONTEXT_BYTES) if held else CONTEXT_BYTES
    if row["hard"]:
        torch.cuda.set_per_process_memory_fraction((parse_bytes(row["budget"]) - context) / total)
    if row["system"] == "sgd":
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    source = torch.Generator().manual_seed(0)
    shape = (row["batch"], h200.SHAPES[row["model"]][1])
    ids = [torch.randint(0, model.config.vocab_size, shape, generator=source).to(device) for _ in range(4)]
    batches = [{"input_ids": i, "labels": i} for i in ids]
    began = time.perf_counter()
    found: dict[str, Any] = {"context_gib": context / 2**30}
    try:
        step, told = make_step(row, model, optimizer, batches[0], device)
    except BudgetTooSmall as refused:
        return found | {"refused": str(refused), "smallest_gib": refused.smallest_bytes / 2**30}
    losses = [float(step(batches[0]))] if row["system"] == "compile" else []  # compiles there, while others are timed
    waited = time.perf_counter()
    with my_turn():
        began += time.perf_counter() - waited
        losses = losses or [float(step(batches[0]))]
        found["first_step_seconds"] = time.perf_counter() - began
        return found | told | measured(row, step, batches, losses)


def make_step(row: dict[str, Any], model: Any, optimizer: Any, batch: Any, device: str) -> tuple[Any, dict[str, Any]]:
    if row["system"] not in ("wholestep", "sgd"):
        return h200.torch_step(row["system"], model, optimizer, device), {}
    import wholestep

    step = wholestep.compile(
        model, h200.plain_loss, optimizer, batch, precision="bf16", memory=row["budget"], host_memory=row["host"]
    )
    told: dict[str, Any] = {"explain": step.explain(), "notes": step.notes}
    if step.plan is not None:
        told |= {"plan": step.plan.to_json()}
    return step, told


def measured(row: dict[str, Any], step: Any, batches: list[Any], losses: list[float]) -> dict[str, Any]:
    import torch

    from wholestep import compat

    on_gpu = torch.cuda.is_available()
    cards: list[float] = []
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    kept: list[Any] = []
    for index in range(1, STEPS):
        times += h200.timed_steps(step, batches, 1, index, kept)
        held = compat.bytes_on_card(torch.device("cuda")) if on_gpu else None
        cards += [held / 2**30] if held else []
    losses += [float(loss) for loss in kept]
    median = statistics.median(times[-TIMED:])
    found: dict[str, Any] = {
        "step_ms": median,
        "step_ms_all": times,
        "losses": losses,
        "sequences_per_second": 1e3 * row["batch"] / median,
    }
    if on_gpu:
        found |= {
            "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
            "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        }
    if cards:
        found |= {"peak_card_gib": max(cards), "card_gib": cards[-1]}
    if row["system"] in ("wholestep", "sgd"):
        found["explain_after"] = step.explain()
    return found


def run_child(row: dict[str, Any], limit: float, cache: Path | None = None, script: str = __file__) -> dict[str, Any]:
    """What `script --child ROW` answers, in a process and with caches of its own."""
    with tempfile.TemporaryDirectory() as fresh:
        folder = cache or fresh
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton",
            "WHOLESTEP_CACHE_DIR": f"{folder}/wholestep", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
        }  # fmt: skip
        command = [sys.executable, script, "--child", json.dumps(row)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"{CUT} {limit:.0f} s"}
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if "OutOfMemoryError" in done.stderr and not answers:
        return {
            "out_of_memory": next(line for line in done.stderr.splitlines()[::-1] if "OutOfMemoryError" in line)[:300]
        }
    if done.returncode or not answers:
        return {"error": (done.stderr.strip() or "no output")[-3000:]}
    return json.loads(answers[-1])


def done_before(path: Path, retry: bool) -> list[dict[str, Any]]:
    """The rows of a file but those that were cut off by the time for all, and with `retry` those that failed."""
    rows: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
    return [row for row in rows if "error" not in row or not (retry or row["error"].startswith(CUT))]


def print_row(row: dict[str, Any]) -> None:
    if "error" in row:
        print(f"{row['row']:<28} failed: {row['error'].splitlines()[-1][:300]}", flush=True)
    elif "out_of_memory" in row:
        print(f"{row['row']:<28} out of memory: {row['out_of_memory'][:150]}", flush=True)
    elif "refused" in row:
        print(f"{row['row']:<28} refused: {row['refused']}", flush=True)
    else:
        kinds = [name for name in ("peak_allocated", "peak_reserved", "peak_card") if f"{name}_gib" in row]
        memory = "  ".join(f"{row[f'{name}_gib']:6.2f} {name}" for name in kinds)
        speed = f"{row['step_ms']:8.1f} ms  {row['sequences_per_second']:7.1f}/s"
        ends = f"first {row['first_step_seconds']:.0f} s  loss {row['losses'][-1]:.4f}"
        print(f"{row['row']:<28} {speed}  {memory}  {ends}", flush=True)


class Table:
    """Rows in a file, made by one worker or several until the time is up."""

    def __init__(self, out: Path, rows: list[dict[str, Any]], limit: float, jobs: int, cache: Path | None) -> None:
        self.out, self.rows, self.jobs, self.cache = out, rows, jobs, cache
        self.deadline = time.monotonic() + limit
        self.lock = threading.Lock()

    def make(self, texts: list[str]) -> None:
        from wholestep.bench.turns import side_by_side

        present = {row["row"] for row in self.rows}
        side_by_side(self._one, [text for text in texts if text not in present], self.jobs)

    def _one(self, text: str) -> None:
        left = self.deadline - time.monotonic()
        if left < 15:
            print(f"out of time before {text}; the same command goes on from here", flush=True)
            return
        row = parse(text)
        row |= run_child(row, left, self.cache) | ({"jobs": self.jobs} if self.jobs > 1 else {})
        with self.lock:
            self.rows.append(row)
            print_row(row)
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(
                json.dumps({"machine": h200.facts(), "rows": self.rows}, indent=1) + "\n", encoding="utf-8"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "memory_budget.json")
    parser.add_argument("--limit", type=float, default=500.0, help="seconds for all rows")
    parser.add_argument("--retry", action="store_true", help="make rows that failed again")
    parser.add_argument("--jobs", type=int, default=1, help="rows at work at once")
    parser.add_argument(
        "--cache", type=Path, help="a folder in which rows share compiled code; first steps then say little"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print("\n" + json.dumps(child(json.loads(options.child)), default=str), flush=True)
        return
    Table(options.out, done_before(options.out, options.retry), options.limit, options.jobs, options.cache).make(
        list(filter(None, options.rows.split(",")))
    )


if __name__ == "__main__":
    main()
