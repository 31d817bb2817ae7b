"""The peak of every workload, predicted on a CPU for an H200, beside what `wholestep bench` measured there.

    python benchmarks/plan_workloads.py                  # -> benchmarks/results/plan_workloads.json
    python benchmarks/plan_workloads.py resnet-50 unet   # some of them, added to the file

In: the workloads at their GPU size, captured without a GPU, and the rows of bench_h200.json. Out: a JSON row each with the peak of
the plan that `compile` takes without a budget, and what a batch holds that the step does not read (the tables of a graph that its
layers have no use for). What was measured has all the batches in it that a workload keeps on the GPU, and what an environment or a
data set takes there; predictions are of the step alone. Of several parts the largest counts.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch

from wholestep import compat
from wholestep.bench.results import load
from wholestep.bench.workload import Workload
from wholestep.bench.workloads import WORKLOADS
from wholestep.capture.batch import flatten
from wholestep.capture.dry import dry_capture
from wholestep.cost.devices import find_device
from wholestep.graph.liveness import tensor_bytes
from wholestep.graph.training_graph import Role, TrainingGraph
from wholestep.passes.pipeline import default_pipeline
from wholestep.plan.frontier import Study

RESULTS = Path(__file__).resolve().parent / "results"


def predicted(workload: Workload) -> dict[str, Any]:
    """Bytes and seconds of an iteration's parts."""
    training = workload.training(workload.gpu, torch.device("cpu"), 0, ours=True)
    torch.set_float32_matmul_precision("high")  # as it is measured; kernels that round operands take memory for them
    device, points = find_device("h200"), []
    unread = []
    for part in training.parts:
        with compat.no_collection():
            capture = dry_capture(
                part.model,
                part.loss_fn,
                part.optimizer,
                part.example_batch,
                precision=training.precision,
                clip_norm=part.clip_norm,
            )
            pipeline = default_pipeline()
            pipeline.run_on(capture)
            points.append(Study(capture.graph, device, pipeline.carry_out).quickest)
        unread.append(unread_bytes(part.example_batch, capture.graph))
    return {
        "predicted_bytes": max(point.peak_bytes + more for point, more in zip(points, unread, strict=True)),
        "unread_bytes": max(unread),
        "recompute": [len(p.plan.recompute) for p in points],
    }


def unread_bytes(batch: Any, graph: TrainingGraph) -> int:
    """What the batch holds, less what is an input of the step; tensors of one storage count once."""
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in flatten(batch)[0]}
    read = [graph.placeholders[number].meta["val"] for number in graph.indices(Role.BATCH)]
    return max(sum(held.values()) - sum(tensor_bytes(value) for value in read if isinstance(value, torch.Tensor)), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help="which; all without names")
    parser.add_argument("--measured", type=Path, default=RESULTS / "bench_h200.json")
    parser.add_argument("--out", type=Path, default=RESULTS / "plan_workloads.json")
    given = parser.parse_args()
    unknown = [name for name in given.workloads if name not in WORKLOADS]
    if unknown:
        parser.error(f"there is no workload {unknown[0]!r}: one of {', '.join(WORKLOADS)}")
    warnings.simplefilter("ignore")  # what a workload's own code warns of
    measured = {
        row["workload"]: row
        for row in load(given.measured)
        if row["contender"] == "wholestep" and row["status"] == "ok"
    }
    rows = (
        {row["workload"]: row for row in json.loads(given.out.read_text("utf-8"))["rows"]} if given.out.exists() else {}
    )
    for name in given.workloads or WORKLOADS:
        row = rows[name] = {"workload": name, **predicted(WORKLOADS[name]), "torch": torch.__version__}
        said = ""
        if name in measured:
            row["measured_bytes"] = measured[name]["memory"]["peak_bytes"]
            said = f", measured {row['measured_bytes'] / 2**30:.2f}, {row['predicted_bytes'] / row['measured_bytes'] - 1:+.1%}"
        print(f"{name:<14} predicted {row['predicted_bytes'] / 2**30:6.2f} GiB{said}", flush=True)
        ordered = [rows[known] for known in WORKLOADS if known in rows]
        given.out.write_text(json.dumps({"rows": ordered}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
