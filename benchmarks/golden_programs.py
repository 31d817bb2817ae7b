"""Does a change of the compiler change any program? The graph after every stage, hashed, for every model of the zoo, every Hugging
Face family and every workload of the benchmark (in its small size); two such files are compared.

    python benchmarks/golden_programs.py --out before.json [--only gpt2,resnet-50] [--workers 2]
    python benchmarks/golden_programs.py --out after.json --against before.json

What differs between two runs of one compiler (seconds, comments, where code was imported from) is left out of the hash.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "src")]

OPTIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"precision": "bf16"}}


def jobs(name: str) -> Iterator[tuple[Any, Any, Any, Any, dict[str, Any]]]:
    """Model, loss, optimizer, batch and options of the steps of a model."""
    import torch

    kind, _, which = name.partition(":")
    if kind == "workload":
        from wholestep.bench.workloads import WORKLOADS

        row = WORKLOADS[which]
        for part in row.training(dict(row.smoke), torch.device("cpu"), 0, ours=True).parts:
            yield part.model, part.loss_fn, part.optimizer, part.example_batch, {"clip_norm": part.clip_norm}
        return
    if kind == "family":
        from tests.zoo.families import FAMILIES
        from tests.zoo.family import build_family

        built = [build_family(FAMILIES[which])]
    else:
        from tests.zoo.models import ZOO

        made = ZOO[which].build()
        built = made if isinstance(made, list) else [made]
    for one in built:
        yield one.model, one.loss_fn, one.make_optimizer("adamw"), one.batches[0], {}


def names() -> list[str]:
    from tests.zoo.families import FAMILIES
    from tests.zoo.models import ZOO

    from wholestep.bench.workloads import WORKLOADS

    return [*(f"zoo:{n}" for n in ZOO), *(f"workload:{n}" for n in WORKLOADS), *(f"family:{n}" for n in FAMILIES)]


def programs(name: str) -> dict[str, str]:
    """Stage -> hash of what it made."""
    import torch

    import wholestep
    from wholestep.graph.printer import hash_source

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, str] = {}
    for label, options in OPTIONS.items():
        torch.manual_seed(0)
        for number, (model, loss_fn, optimizer, batch, more) in enumerate(jobs(name)):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    step = wholestep.compile(
                        model, loss_fn, optimizer, batch, backend="interpret", check="off", cache=False, dump=folder, seed=0,
                        verbose=False, **more, **options,
                    )  # fmt: skip
                    for _ in range(0 if step.graph is not None else 2):  # some are captured after one real step
                        step(batch)
                    found[f"{label} {number} rung"] = step.rung
                except Exception as error:
                    found[f"{label} {number} rung"] = f"{type(error).__name__}: {error}"[:120]
                for path in sorted(Path(folder).iterdir()):
                    found[f"{label} {number} {path.stem.partition('_')[2]}"] = hash_source(path.read_text())
    return found


def differences(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> list[str]:
    found = []
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name, {}), after.get(name, {})
        stages = [stage for stage in dict.fromkeys([*old, *new]) if old.get(stage) != new.get(stage)]
        if stages:
            found.append(f"{name}: {', '.join(stages)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="", help="parts of names, with commas between them")
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    wanted = [part for part in asked.only.split(",") if part]
    chosen = [name for name in names() if not wanted or any(part in name for part in wanted)]
    os.environ["HF_HUB_OFFLINE"] = "1"
    rows: dict[str, dict[str, str]] = {}
    with multiprocessing.get_context("spawn").Pool(asked.workers, maxtasksperchild=25) as pool:
        for name, found in zip(chosen, pool.imap(programs, chosen), strict=True):
            rows[name] = found
            print(f"{name}: {len(found)} stages", flush=True)
            asked.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{len(rows)} models, {sum(map(len, rows.values()))} stages")
    if asked.against is not None:
        before = json.loads(asked.against.read_text())
        lines = differences({name: before[name] for name in rows if name in before}, rows)
        print("\n".join(lines) or "all as before")
        sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
