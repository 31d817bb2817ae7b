"""Is a memory budget kept from the call of `compile` on? Six kinds of models, each without a budget and within two; a process each.

A row has the most that the allocator held between the call of `compile` and step 20 (`reserved`), what the process held of the
card then (`card`: reserved plus the context, and as the driver says where it is asked), the seconds to the first loss, the
milliseconds of a step, what became of the comparison with eager PyTorch, and where the time went. Budgets are amounts (`11GiB`) or
shares of what the steps of the row without a budget held (`0.7`); one that is refused is asked for again as the refusal says. Every
row begins with empty caches. Rows are written as they are made and skipped when present.

    python benchmarks/budget_first_byte.py --out FILE [--only llama,resnet-50] [--budgets 0.8,0.6] [--jobs 3] [--limit 470]

Several models are made at once (`--jobs`): kernels are tuned and steps timed in turns, and waiting for a turn is not counted, but
the cores are shared, by rows with and without a budget alike. With `--jobs 1` a row has the machine to itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
import h200  # noqa: E402
from memory_budget import done_before, run_child  # noqa: E402

MODELS = {
    "llama": "language model, 0.57B, 4 x 2048",
    "bert": "BERT-large, 32 x 512",
    "resnet-50": "convolutions",
    "deep-speech-2": "speech: convolutions, GRUs, CTC",
    "mixture-gpt": "mixture of experts",
    "unet": "diffusion",
}
MORE = ("transformer", "vit-base", "inception-v3", "gpt2-medium", "r-gcn", "tiny")
"""By name only."""
LLAMA = {"llama": (5, (4, 2048)), "tiny": (2, (2, 16))}
"""Layers and shape of the batch of Llamas; `tiny` is to try this script out."""
STEPS, TIMED = 20, 8
GIB = 2**30


# ---- in the child process ----


def job(name: str, device: str) -> tuple[Any, Any, Any, list[Any], dict[str, Any]]:
    """Model, loss, optimizer, batches, options of `compile`."""
    import torch

    if name in (*LLAMA, "bert"):
        layers, h200.SHAPES[name] = LLAMA.get(name, (24, h200.SHAPES.get(name)))
        torch.manual_seed(0)
        with torch.device(device):
            model = h200.build(name, layers).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
        return model, h200.plain_loss, optimizer, h200.make_batches(name, model, device), {"precision": "bf16"}
    from wholestep.bench.workloads import WORKLOADS

    workload = WORKLOADS[name]
    sizes = workload.gpu if device == "cuda" else workload.smoke
    training = workload.training(sizes, torch.device(device), 0, ours=True)
    batches: list[Any] = []
    for number in range(4):
        training.iterate([lambda batch: batches.append(batch) or torch.zeros(())], number)  # type: ignore[func-returns-value]
    part = training.parts[0]
    options = {"precision": training.precision, "clip_norm": part.clip_norm}
    return part.model, part.loss_fn, part.optimizer, batches, options


class Watch:
    """The most that was reserved, also across resets of the peak, and what the driver says of the process meanwhile."""

    def __init__(self, device: str) -> None:
        import torch

        from wholestep import compat

        self.cuda = torch.cuda if device == "cuda" else None
        self.most, self.card, self.stopped = 0, 0, threading.Event()
        self.peaks: dict[str, float] = {}
        if self.cuda is None:
            return
        self.bytes_on_card = lambda: compat.bytes_on_card(torch.device("cuda"))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        inner = torch.cuda.reset_peak_memory_stats

        def reset(*args: Any) -> None:
            self.look()
            inner(*args)

        torch.cuda.reset_peak_memory_stats = torch.cuda.memory.reset_peak_memory_stats = reset
        threading.Thread(target=self._sample, daemon=True).start()

    def look(self) -> None:
        if self.cuda is not None:
            self.most = max(self.most, self.cuda.max_memory_reserved())

    def phase(self, name: str) -> None:
        """The peak since the last phase, in GiB, under a name."""
        if self.cuda is not None:
            self.look()
            self.peaks[name] = round(self.most / GIB, 3)
            self.most = 0
            self.cuda.reset_peak_memory_stats()
            self.most = 0  # the reset has looked at the phase that is over

    def _sample(self) -> None:
        while not self.stopped.wait(0.05):
            self.card = max(self.card, self.bytes_on_card() or 0)

    def facts(self) -> dict[str, Any]:
        if self.cuda is None:
            return {}
        self.stopped.set()
        held = self.bytes_on_card()
        from wholestep.plan.frontier import CONTEXT_BYTES

        context = CONTEXT_BYTES if held is None else held - self.cuda.memory_reserved()
        reserved, steps = max(self.peaks.values()), max(self.peaks["steps"], self.peaks["first step"])
        return {
            "reserved_gib": reserved, "reserved_by_phase_gib": self.peaks, "context_gib": round(context / GIB, 3),
            "card_gib": round(reserved + context / GIB, 3), "steps_gib": round(steps + context / GIB, 3),
            "card_by_driver_gib": round(self.card / GIB, 3) if self.card else None,
        }  # fmt: skip


def waits_counted() -> Callable[[], float]:
    """Kernels are tuned in turns from now on; the function returned tells the seconds spent waiting for one."""
    from wholestep.bench import turns

    waited = [0.0]
    inner = turns.my_turn

    @contextlib.contextmanager
    def my_turn() -> Iterator[None]:
        began = time.perf_counter()
        with inner():
            waited[0] += time.perf_counter() - began
            yield

    turns.my_turn = my_turn  # type: ignore[assignment]
    turns.tune_in_turns()
    return lambda: waited[0]


def child(row: dict[str, Any]) -> dict[str, Any]:
    import torch

    import wholestep
    from wholestep.bench import machine, turns
    from wholestep.errors import BudgetTooSmall

    waited = waits_counted()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    model, loss_fn, optimizer, batches, options = job(row["model"], device)
    if device == "cuda":
        torch.cuda.synchronize()
    watch, began, waits = Watch(device), time.perf_counter(), waited()

    def seconds() -> float:
        return round(time.perf_counter() - began - (waited() - waits), 2)

    found: dict[str, Any] = {}
    try:
        step = wholestep.compile(
            model, loss_fn, optimizer, batches[0], memory=row["budget_bytes"], verbose=False, **options
        )
    except BudgetTooSmall as refused:
        return {"refused": str(refused), "smallest_bytes": refused.smallest_bytes, "refused_seconds": seconds()}
    found["compile_seconds"] = seconds()
    watch.phase("compile")
    with turns.my_turn():
        losses = [float(_loss(step(batches[0])))]
        found["first_step_seconds"] = seconds()
        watch.phase("first step")
        kept: list[Any] = []
        times = h200.timed_steps(step, batches, STEPS - 1, 1, kept)
        watch.phase("steps")
    losses += [float(_loss(loss)) for loss in kept]
    found |= {"step_ms": statistics.median(times[-TIMED:]), "losses": [losses[0], losses[-1]], "seconds": step.seconds}
    found |= watch.facts() | {"check": check_of(step), "notes": [n for n in step.notes if n.kind != "pass"]}
    plan = step.plan
    found |= {"again": len(plan.recompute), "predicted_bytes": plan.predicted_bytes} if plan is not None else {}
    found |= {"rung": step.rung, "cuda_graph": step.regions.get("cuda_graph", {}).get("reason")}
    return found | {"machine": machine.facts(on_gpu=device == "cuda")}


def _loss(made: Any) -> Any:
    return made[0] if isinstance(made, tuple) else made


def check_of(step: Any) -> str:
    """What became of the comparison of the first step with eager PyTorch: whole, reduced, left out (or not told)."""
    done = [note.data["done"] for note in step.notes if note.kind == "check"]
    if "left out" in done:
        return "left out"
    return "+".join(done) or "whole"


# ---- in the parent ----


class Table:
    """Rows in a file, model by model, until the time is up."""

    def __init__(self, out: Path, rows: list[dict[str, Any]], budgets: list[str], limit: float, jobs: int) -> None:
        self.out, self.rows, self.budgets, self.jobs = out, rows, budgets, jobs
        self.deadline, self.lock = time.monotonic() + limit, threading.Lock()

    def make(self, names: list[str]) -> None:
        from wholestep.bench.turns import side_by_side

        side_by_side(self._model, names, self.jobs)

    def _model(self, name: str) -> None:
        free = self._row(name, "none", None)
        for text in self.budgets:
            budget = self._bytes(text, free)
            if budget is None:
                continue
            row = self._row(name, text, budget)
            if row is not None and "refused" in row:
                self._row(name, f"{text}, the smallest", row["smallest_bytes"])

    def _bytes(self, text: str, free: dict[str, Any] | None) -> int | None:
        """A share of what steps take without a budget; or an amount."""
        from wholestep.graph.bytes import parse_bytes

        try:
            share = float(text)
        except ValueError:
            return parse_bytes(text)
        return None if free is None or "steps_gib" not in free else int(share * free["steps_gib"] * GIB)

    def _row(self, name: str, text: str, budget: int | None) -> dict[str, Any] | None:
        known = next((row for row in self.rows if (row["model"], row["asked"]) == (name, text)), None)
        left = self.deadline - time.monotonic()
        if known is not None or left < 15:
            if known is None:
                print(f"out of time before {name} {text}; the same command goes on from here", flush=True)
            return known
        row: dict[str, Any] = {"model": name, "asked": text, "budget_bytes": budget, "jobs": self.jobs}
        row |= run_child(row, left, script=__file__)
        if "out_of_memory" in row:
            row["error"] = row.pop("out_of_memory")
        with self.lock:
            self.rows.append(row)
            print(shown(row), flush=True)
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(json.dumps({"rows": self.rows}, indent=1) + "\n", encoding="utf-8")
        return row


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """For every model within a budget: whether it was kept, and the first step beside that without one."""
    free = {row["model"]: row for row in rows if row["budget_bytes"] is None}
    lines = []
    for row in rows:
        beside = free.get(row["model"], {}).get("first_step_seconds")
        if row["budget_bytes"] is None or beside is None or "first_step_seconds" not in row:
            continue
        left = (row["budget_bytes"] / GIB - row["card_gib"]) if "card_gib" in row else float("nan")
        ratio = row["first_step_seconds"] / beside
        lines.append(
            f"{row['model']:<14} {row['budget_bytes'] / GIB:6.2f} GiB: {left:+.2f} GiB left at the peak, first step {ratio:.2f}x "
            f"({row['first_step_seconds']:.0f} s, {beside:.0f} s without), check {row['check']}"
        )
    return lines


def shown(row: dict[str, Any]) -> str:
    budget = "no budget" if row["budget_bytes"] is None else f"{row['budget_bytes'] / GIB:.2f} GiB"
    head = f"{row['model']:<14} {budget:>10} ({row['asked']})"
    if "error" in row:
        return f"{head} failed: {row['error'].splitlines()[-1][:300]}"
    if "refused" in row:
        return f"{head} refused after {row['refused_seconds']:.0f} s: {row['refused'][:150]}"
    memory = ""
    if "card_gib" in row:
        kept = (
            ""
            if row["budget_bytes"] is None
            else " kept"
            if row["card_gib"] * GIB <= row["budget_bytes"]
            else " EXCEEDED"
        )
        phases = "/".join(f"{peak:.2f}" for peak in row["reserved_by_phase_gib"].values())
        memory = f" card {row['card_gib']:6.2f}{kept} (reserved {phases} + {row['context_gib']:.2f})"
    spent = f"compile {row['compile_seconds']:.0f} s, first step {row['first_step_seconds']:.0f} s"
    return f"{head}{memory}  {spent}, {row['step_ms']:.1f} ms, check {row['check']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(MODELS), help=f"models: {', '.join((*MODELS, *MORE))}")
    parser.add_argument("--budgets", default="0.8,0.6", help="amounts, or shares of what steps take without a budget")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "budget_first_byte.json")
    parser.add_argument("--limit", type=float, default=470.0, help="seconds for all rows")
    parser.add_argument("--jobs", type=int, default=3, help="models at work at once")
    parser.add_argument("--retry", action="store_true", help="make rows that failed again")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print("\n" + json.dumps(child(json.loads(options.child)), default=str), flush=True)
        return
    names = list(filter(None, options.only.split(",")))
    unknown = [name for name in names if name not in (*MODELS, *MORE)]
    if unknown:
        parser.error(f"there is no model {unknown[0]!r}: one of {', '.join((*MODELS, *MORE))}")
    rows = done_before(options.out, options.retry)
    budgets = list(filter(None, options.budgets.split(",")))
    Table(options.out, rows, budgets, options.limit, options.jobs).make(names)
    print("\n".join(["", *summary(rows)]), flush=True)


if __name__ == "__main__":
    main()
