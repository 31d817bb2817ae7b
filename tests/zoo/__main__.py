"""`python -m tests.zoo [case ...]`: the table of the zoo on this machine, also written to benchmarks/results/.

Per case: the rung of the ladder, seconds of capture, nodes per phase, and for two optimizers on two backends whether
five clipped steps were bit-equal to eager, equal within the rule of `wholestep.verify`, or how they failed.
"""

from __future__ import annotations

import collections
import json
import platform
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from tests.zoo.models import ZOO, Case

import wholestep

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "zoo_cpu.json"
RUNS = [(kind, backend) for backend in ("interpret", "inductor") for kind in ("sgd", "adamw")]


def outcome(case: Case, kind: Any, backend: str) -> dict[str, Any]:
    """One verification: `bitwise`, `equal`, or the first line of what went wrong."""
    began = time.perf_counter()
    try:
        result = "bitwise"
        built = case.build()
        for part in (built, built.partner):
            if part is None:
                continue
            report = wholestep.verify(
                part.model, part.loss_fn, part.make_optimizer(kind), part.batches,
                steps=5, edge_batches=part.edge_batches, clip_norm=1.0, backend=backend,
            )  # fmt: skip
            if report.rung == "eager":
                result = "eager"
                break
            if not report.ok:
                result = f"differs: {report.first_departure}"
                break
            if not report.bitwise:
                result = "equal"
    except Exception as error:  # the table names every failure and goes on
        result = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
    return {"result": result, "seconds": round(time.perf_counter() - began, 2)}


def row(case: Case) -> dict[str, Any]:
    built = case.build()
    began = time.perf_counter()
    step = wholestep.compile(
        built.model, built.loss_fn, built.make_optimizer("sgd"), built.batches[0], backend="interpret", check="off"
    )
    step(built.batches[0])
    phases: collections.Counter[str] = collections.Counter()
    if step.graph is not None:
        for node in step.graph.module.graph.nodes:
            if node.op == "call_function":
                phases[node.meta.get("custom", {}).get("phase", "none")] += 1
    made = {"case": case.name, "group": case.group, "rung": step.rung, "falls": [str(fall) for fall in step.falls],
            "capture_seconds": round(time.perf_counter() - began, 2), "nodes": dict(phases)}  # fmt: skip
    return made | {f"{kind} {backend}": outcome(case, kind, backend) for kind, backend in RUNS}


def line(made: dict[str, Any]) -> str:
    nodes = "/".join(str(made["nodes"].get(phase, 0)) for phase in ("forward", "backward", "update"))
    results = [made[f"{kind} {backend}"]["result"] for kind, backend in RUNS]
    shown = " ".join(f"{result.split(':')[0][:16]:<16}" for result in results)
    return f"{made['case']:<16} {made['rung']:<14} {made['capture_seconds']:>7.1f} {nodes:>15}  {shown}"


def facts() -> dict[str, str]:
    command = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(command, cwd=RESULT.parent, capture_output=True, text=True, check=False).stdout.strip()
    return {"torch": torch.__version__, "python": platform.python_version(), "commit": commit or "unknown"}


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore", wholestep.WholestepWarning)
    heads = " ".join(f"{kind + ' ' + backend:<16}" for kind, backend in RUNS)
    print(f"{'case':<16} {'rung':<14} {'seconds':>7} {'fwd/bwd/update':>15}  {heads}", flush=True)
    rows = []
    for name in names or ZOO:
        rows.append(row(ZOO[name]))
        print(line(rows[-1]), flush=True)
        if not names:  # a partial table must not replace the full one
            RESULT.write_text(json.dumps(facts() | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
    return (
        0 if all(made[f"{k} {b}"]["result"] in ("bitwise", "equal", "eager") for made in rows for k, b in RUNS) else 1
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
