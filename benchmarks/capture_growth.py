"""What one more equal layer adds to the capture of a step: BERT-large, GPT-2-medium and the 1.2B Llama of `h200.py`.

Each is captured as a GPU would run it (bf16, AdamW), on tensors without data, so no GPU is needed: Dynamo's part, the trace below
it, and the passes (those of both parts, with a plan that keeps everything), in seconds of processor time of one thread. Every
capture is of a new model, in one process per model and after one that is not counted; depths take turns, and medians are told.

    python benchmarks/capture_growth.py [--models bert,gpt2,llama] [--layers 12,24,36] [--times 5] [--out FILE]
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
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
PARTS = ("Dynamo", "trace", "passes")
WARM_UP = 6
"""Layers of the capture that is not counted: what torch imports and compiles once is no part of growth."""


def measured(name: str, layers: int) -> dict[str, float]:
    """Part -> seconds of one capture."""
    import h200
    import torch

    from wholestep import compat
    from wholestep.capture import dry
    from wholestep.compiler import compiler_for
    from wholestep.graph.plan import Plan
    from wholestep.options import Options

    with torch.device("meta"):
        model = h200.build(name, layers).train()
        ids = torch.zeros(h200.SHAPES[name], dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = {"input_ids": ids, "labels": ids.clone()}
    began = [time.process_time()]
    whole, dry.capture_whole = dry.capture_whole, lambda *args: (began.append(time.process_time()), whole(*args))[1]
    try:
        with compat.no_collection():
            compiler = compiler_for(model, h200.plain_loss, optimizer, Options(precision="bf16"), batch, dry="cuda")
            made = dry.capture_dry(compiler.subject, batch)
            began.append(time.process_time())
            compiler.prepare(made)
            compiler.apply(made, Plan())
            began.append(time.process_time())
    finally:
        dry.capture_whole = whole
    return {part: end - start for part, start, end in zip(PARTS, began[:-1], began[1:], strict=True)}


def child(name: str, depths: list[int], times: int) -> dict[str, Any]:
    """Depth -> part -> the median, and what each capture took."""
    import torch

    torch.set_num_threads(1)
    measured(name, WARM_UP)
    all_of: dict[int, list[dict[str, float]]] = {depth: [] for depth in depths}
    for _ in range(times):
        for depth in depths:
            gc.collect()
            all_of[depth].append(measured(name, depth))
    medians = {
        depth: {part: statistics.median(one[part] for one in found) for part in PARTS}
        | {"whole": statistics.median(sum(one.values()) for one in found)}
        for depth, found in all_of.items()
    }
    return {"model": name, "torch": torch.__version__, "counting": counting(), "medians": medians, "all": all_of}


def counting() -> float:
    """How fast this processor is: seconds of a plain loop."""
    began = time.process_time()
    sum(range(10**7))
    return time.process_time() - began


def show(row: dict[str, Any]) -> None:
    medians = {int(depth): found for depth, found in row["medians"].items()}
    depths = sorted(medians)
    speed = f"sum(range(10**7)) takes {row['counting']:.3f} s here"
    print(f"{row['model']}, torch {row['torch']}: {' / '.join(PARTS)} (whole), s of processor time; {speed}")
    for depth in depths:
        parts = " / ".join(f"{medians[depth][part]:.2f}" for part in PARTS)
        print(f"  {depth:>3} layers: {parts} ({medians[depth]['whole']:.2f})")
    for less, more in itertools.pairwise(depths):
        per = {part: (medians[more][part] - medians[less][part]) / (more - less) for part in (*PARTS, "whole")}
        parts = " / ".join(f"{per[part]:.3f}" for part in PARTS)
        print(f"  per layer from {less} to {more}: {parts} ({per['whole']:.3f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--models", default="bert,gpt2,llama")
    parser.add_argument("--layers", default="12,24,36")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    depths = [int(depth) for depth in asked.layers.split(",")]
    if asked.child:
        print(json.dumps(child(asked.child, depths, asked.times)))
        return
    rows = []
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    for name in asked.models.split(","):
        command = [sys.executable, __file__, "--child", name, "--layers", asked.layers, "--times", str(asked.times)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        show(rows[-1])
        if asked.out is not None:
            asked.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
