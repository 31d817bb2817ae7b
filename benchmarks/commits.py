"""Several commits side by side on one device: is a step as fast and as lean as before, and is the first one as quick?

In: folders that hold a checkout each (`NAME=FOLDER`), workloads of `wholestep bench`. Out: for every workload and commit the first
step, milliseconds of a step, peak of allocated memory, losses; JSON, and a table of ratios to the first commit named.

A process for each commit. All of a workload compile at the same time, each on its share of the CPU's cores and from empty caches
(`--one-by-one`: one after another on all cores, as a first step is alone, and where two first steps do not fit the card together);
then each makes a few steps in turn, round after round, so that clocks and heat that drift are the same for all. A round's
figure is the median of its steps, a commit's the median of its rounds. The children talk to this script by lines: `ready`
after the first step, `go` for a round. `--peers eager,compile` adds those, by the last commit's benchmark.

    python benchmarks/commits.py --trees before=FOLDER,now=. --models bert-large,resnet-50 --out FILE
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODELS = "bert-large,gpt2-medium,llama-1b,resnet-50,seq2seq"
WARM_UP, SETTLING, TIMED, ROUNDS = 14, 2, 8, 6
MARK = "COMMITS "


# ---- in a child ----


def say(**fact: Any) -> None:
    print(MARK + json.dumps(fact), flush=True)


def child(request: dict[str, Any]) -> None:
    """Compile and make the first step; then one round for every line that comes."""
    os.sched_setaffinity(0, request["cores"])
    import torch

    workloads = importlib.import_module("wholestep.bench.workloads").WORKLOADS
    api = importlib.import_module("wholestep.api")
    assert Path(api.__file__ or "").is_relative_to(request["folder"]), api.__file__
    from h200 import timed_steps  # not earlier: it puts its own checkout in front of the others

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.set_float32_matmul_precision("high")
    workload = workloads[request["model"]]
    training = workload.build(workload.gpu if on_gpu else workload.smoke, device, 0)
    if on_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    calls = []
    for part in training.parts:
        if request["system"] == "wholestep":
            args = part.model, part.loss_fn, part.optimizer, part.example_batch
            calls.append(api.compile(*args, precision=training.precision, clip_norm=part.clip_norm, verbose=False))
        else:
            maker = importlib.import_module("wholestep.bench.contenders").make_maker(request["system"])
            calls.append(maker(part, training.precision))

    def step(number: int) -> Any:
        return training.iterate(calls, number)

    losses: list[Any] = [step(0)]
    told = {"first_loss": float(losses[0]), "first_step_seconds": time.perf_counter() - began}
    if on_gpu:
        torch.cuda.empty_cache()  # what comparing the first step with eager took is for the others on this device
    say(ready=True, **told)
    peak = 0.0
    for round_ in range(ROUNDS + 1):
        sys.stdin.readline()
        warming = round_ == 0
        numbers = range(10**6)  # timed_steps asks for a batch by number, and this training for the number itself
        if warming and on_gpu:  # seen before a CUDA graph takes its memory out of the allocator's sight
            timed_steps(step, numbers, 1, len(losses), losses)
            torch.cuda.reset_peak_memory_stats()
            timed_steps(step, numbers, 1, len(losses), losses)
            peak = torch.cuda.max_memory_allocated() / 2**30
        timed_steps(step, numbers, WARM_UP if warming else SETTLING, len(losses), losses)
        times = [] if warming else timed_steps(step, numbers, TIMED, len(losses), losses)
        fact: dict[str, Any] = {"times_ms": times, "last_loss": float(losses[-1])}
        if on_gpu:
            fact["peak_allocated_gib"] = max(peak, torch.cuda.max_memory_allocated() / 2**30)
        say(**fact)


# ---- in the parent ----


class Child:
    """A commit (or a peer) at work on a workload."""

    def __init__(self, name: str, folder: Path, system: str, model: str, cores: list[int], caches: Path) -> None:
        self.row: dict[str, Any] = {"model": model, "tree": name, "system": system, "rounds": []}
        own = caches / f"{model}-{name}"
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(folder / "src"), str(Path(__file__).resolve().parent)]),
            "TORCHINDUCTOR_CACHE_DIR": str(own / "inductor"), "TRITON_CACHE_DIR": str(own / "triton"),
            "WHOLESTEP_CACHE_DIR": str(own / "wholestep"), "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, len(cores) - 1)),
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
        }  # fmt: skip
        request = json.dumps({"model": model, "system": system, "cores": cores, "folder": str(folder)})
        own.mkdir(parents=True)
        self.errors = (own / "stderr").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child", request], env=environment, cwd=own, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
        )  # fmt: skip

    def hear(self) -> dict[str, Any] | None:
        """What it says next; None, with the reason in the row, if it ended instead."""
        for line in self.process.stdout or ():
            if line.startswith(MARK):
                heard: dict[str, Any] = json.loads(line[len(MARK) :])
                return heard
        self.errors.seek(0)
        self.row["error"] = (self.errors.read().strip().splitlines() or ["no output"])[-1][:300]
        return None

    def go(self) -> None:
        """One round."""
        if "error" in self.row or self.process.stdin is None:
            return
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        heard = self.hear()
        if heard is not None:
            self.row["rounds"].append(heard.pop("times_ms"))
            self.row |= heard


def measured(model: str, systems: list[tuple[str, Path, str]], caches: Path, one_by_one: bool) -> list[dict[str, Any]]:
    """Rows of one workload."""
    from wholestep.bench.turns import my_turn

    every = sorted(os.sched_getaffinity(0))
    share = len(every) if one_by_one else max(1, len(every) // len(systems))
    children = []
    for index, (name, folder, system) in enumerate(systems):
        cores = every[:share] if one_by_one else every[index * share : (index + 1) * share] or every
        children.append(Child(name, folder, system, model, cores, caches))
        if one_by_one:
            children[-1].row |= children[-1].hear() or {}
    for one in children:
        if not one_by_one:
            one.row |= one.hear() or {}
    with my_turn():
        for _ in range(ROUNDS + 1):
            for one in children:
                one.go()
    for one in children:
        one.process.kill()
        one.process.wait()
        medians = [statistics.median(times) for times in one.row["rounds"] if times]
        if medians:
            one.row["step_ms"] = statistics.median(medians)
    return [one.row for one in children]


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"{'workload':<14} {'commit':<12} {'ms':>8} {'ratio':>7} {'GiB':>7} {'ratio':>7} {'first s':>8} {'loss':>10}")
    base: dict[str, dict[str, Any]] = {}
    for row in rows:
        first = base.setdefault(row["model"], row)
        if "step_ms" not in row:
            print(f"{row['model']:<14} {row['tree']:<12} {row.get('error', 'no round')}")
            continue
        time_ratio = row["step_ms"] / first.get("step_ms", float("nan"))
        gib = row.get("peak_allocated_gib", float("nan"))
        memory_ratio = gib / first.get("peak_allocated_gib", float("nan"))
        print(
            f"{row['model']:<14} {row['tree']:<12} {row['step_ms']:>8.2f} {time_ratio:>7.4f} {gib:>7.2f} {memory_ratio:>7.4f}"
            f" {row['first_step_seconds']:>8.1f} {row['last_loss']:>10.5g}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trees", default="now=.", help="NAME=FOLDER,...; the first is what others are compared with")
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--peers", default="", help="eager, compile")
    parser.add_argument("--one-by-one", action="store_true", help="first steps one after another, on all cores")
    parser.add_argument("--out", type=Path, default=Path("commits.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(json.loads(options.child))
        return
    from h200 import facts

    trees = [(name, Path(folder).resolve()) for name, _, folder in (t.partition("=") for t in options.trees.split(","))]
    systems = [(name, folder, "wholestep") for name, folder in trees]
    systems += [(peer, trees[-1][1], peer) for peer in options.peers.split(",") if peer]
    rows: list[dict[str, Any]] = json.loads(options.out.read_text("utf-8"))["rows"] if options.out.exists() else []
    with tempfile.TemporaryDirectory(prefix="wholestep-commits-") as caches:
        for model in options.models.split(","):
            found = measured(model, systems, Path(tempfile.mkdtemp(dir=caches)), options.one_by_one)
            rows += found
            options.out.write_text(json.dumps({"machine": facts(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
            print_table(found)


if __name__ == "__main__":
    main()
