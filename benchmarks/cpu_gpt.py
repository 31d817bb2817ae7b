"""A 12-layer GPT-2 on the CPU: torch.compile with a fused AdamW against the whole step, and eager beside them.

Every figure comes from a process of its own. Cold: empty compile caches, from after imports and model build to the
end of the first step. Warm: a second process with the same caches. Step times: the warm processes take turns
(A B C A B C ...), a round is the median of a few steps, so a noisy neighbour hits all systems alike. All values are
written, not only medians.

    python benchmarks/cpu_gpt.py [--rounds 7] [--layers 12] [--steps 10] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))
ROWS, TOKENS, VOCAB, CLIP = 4, 64, 1024, 1.0
SYSTEMS = ("eager", "compile", "compile-fallback-random", "wholestep")


# ---- in the worker process ----


def make_run(layers: int) -> tuple[Any, Any, list[dict[str, Any]]]:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=128, n_layer=layers, n_head=4, n_positions=TOKENS,
                                     use_cache=False, attn_implementation="sdpa")  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = [torch.randint(0, VOCAB, (ROWS, TOKENS)) for _ in range(8)]
    return model, optimizer, [{"input_ids": i, "labels": i} for i in ids]


def loss_fn(model: Any, batch: dict[str, Any]) -> Any:
    return model(**batch).loss


def torch_step(system: str, model: Any, optimizer: Any) -> Callable[[Any], Any]:
    import torch

    forward = loss_fn
    if system != "eager":
        torch._inductor.config.fallback_random = system == "compile-fallback-random"
        forward = torch.compile(loss_fn)

    def step(batch: Any) -> Any:
        loss = forward(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def worker(system: str, layers: int) -> None:
    """Build, take the first step, say how long that took; then one round of steps per number read from stdin."""
    import torch
    import torch._inductor.config

    model, optimizer, batches = make_run(layers)
    if system == "wholestep":
        import wholestep.api  # imports are not part of the figure
    elif system != "eager":
        import torch._dynamo
        import torch._inductor.compile_fx
    began = time.perf_counter()
    if system == "wholestep":
        step: Any = wholestep.compile(model, loss_fn, optimizer, batches[0], clip_norm=CLIP)
    else:
        step = torch_step(system, model, optimizer)
    loss = float(step(batches[0]))
    facts: dict[str, Any] = {"first_step_seconds": time.perf_counter() - began, "first_loss": loss}
    if system == "wholestep":
        facts |= {
            "regions": {k: v for k, v in step.regions.items() if k != "driver"},
            "rung": step.rung,
            "captures": step.captures,
            "seconds": step.seconds,
        }
    elif system != "eager":
        facts["graphs"] = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    print(json.dumps(facts, default=str), flush=True)
    for line in sys.stdin:
        times = []
        for index in range(int(line)):
            began = time.perf_counter()
            step(batches[index % len(batches)])
            times.append(time.perf_counter() - began)
        print(json.dumps(times), flush=True)


# ---- in the parent ----


class Worker:
    """One worker process and its answers."""

    def __init__(self, system: str, layers: int, cache: str) -> None:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "WHOLESTEP_CACHE_DIR": f"{cache}/wholestep",
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
        }  # fmt: skip
        command = [sys.executable, __file__, "--worker", system, "--layers", str(layers)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        self.facts = self._answer()

    def _answer(self) -> Any:
        for line in self.process.stdout or ():
            if line.startswith(("{", "[")):
                return json.loads(line)
        raise RuntimeError(f"a worker ended with code {self.process.wait()}")

    def round(self, steps: int) -> list[float]:
        assert self.process.stdin is not None
        print(steps, file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def start_all(systems: tuple[str, ...], layers: int, caches: dict[str, str], kind: str) -> dict[str, dict[str, Any]]:
    """Start each system alone, note what its first step took, and end it."""
    facts = {}
    for system in systems:
        started = Worker(system, layers, caches[system])
        started.close()
        facts[system] = started.facts
        say(f"{kind:<10} {system:<24} first step after {started.facts['first_step_seconds']:6.2f} s")
    return facts


def interleaved(
    systems: tuple[str, ...], layers: int, caches: dict[str, str], rounds: int, steps: int
) -> dict[str, Any]:
    workers = {system: Worker(system, layers, caches[system]) for system in systems}
    for started in workers.values():
        started.round(steps)  # not counted
    medians: dict[str, list[float]] = {system: [] for system in systems}
    for number in range(rounds):
        for system, started in workers.items():
            medians[system].append(1e3 * statistics.median(started.round(steps)))
        say(f"round {number + 1}: " + "  ".join(f"{s} {m[-1]:.1f} ms" for s, m in medians.items()))
    for started in workers.values():
        started.close()
    return {s: {"round_medians_ms": values, "median_ms": statistics.median(values)} for s, values in medians.items()}


def machine() -> dict[str, Any]:
    import torch
    import transformers

    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    return {
        "cpu": names[0] if names else "unknown", "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "commit": commit.stdout.strip() or "unknown",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="steps per round")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "cpu_gpt.json")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.layers)
        return
    with tempfile.TemporaryDirectory(prefix="wholestep-bench-") as folder:
        caches = {system: f"{folder}/{system}" for system in SYSTEMS}
        cold = start_all(SYSTEMS, options.layers, caches, "cold")
        warm = start_all(SYSTEMS, options.layers, caches, "warm")
        timed = interleaved(SYSTEMS, options.layers, caches, options.rounds, options.steps)
        deeper = start_all(("wholestep",), 2 * options.layers, caches, f"{2 * options.layers} layers")
    peer = min(SYSTEMS[1:3], key=lambda system: timed[system]["median_ms"])
    result = {
        "benchmark": f"GPT-2, {options.layers} layers, width 128, batch {ROWS}x{TOKENS}, dropout 0.1, clip, AdamW",
        "machine": machine(), "steps_per_round": options.steps, "cold": cold, "warm": warm, "steps": timed,
        "peer": peer, "ratio_peer_over_wholestep": timed[peer]["median_ms"] / timed["wholestep"]["median_ms"],
        "regions": {str(options.layers): cold["wholestep"]["regions"],
                    str(2 * options.layers): deeper["wholestep"]["regions"]},
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{'system':<24} {'cold s':>8} {'warm s':>8} {'ms/step':>8}   all rounds")
    for system in SYSTEMS:
        rounds = " ".join(f"{value:.1f}" for value in timed[system]["round_medians_ms"])
        print(f"{system:<24} {cold[system]['first_step_seconds']:>8.1f} {warm[system]['first_step_seconds']:>8.1f}"
              f" {timed[system]['median_ms']:>8.1f}   {rounds}")  # fmt: skip
    print(f"best peer: {peer}; it takes {result['ratio_peer_over_wholestep']:.2f} times the whole step's time")


if __name__ == "__main__":
    main()
