"""One relational layer, forward and backward: Wholestep against PyG, a loop over relations, and one grouped product.

In: graphs (triples in a file, or twins of known graphs by their names), models, systems (`relational_systems.py`). Out: one row for
every combination, with median time, peak memory on CUDA, how many times faster it is than the best peer that ran and than PyG; a
table, and JSON.

A row is written as soon as it is measured, and the same command goes on where a run was cut off: rows that are there are left,
those that were cut off are made again (`--retry`: failed ones too). `--only am:rgat,mag` makes these alone. Ours come first, graph
by graph as `--graphs` names them, then plain peers, then compiled ones.

Ours share a process per graph, plain peers another, and every compiled peer has its own: one that needs too much memory or time
is reported as such, and the others still run. With `--jobs` several of them get ready at a time (imports, graphs, compilation);
what is timed runs alone, by a lock. A twin is made once and kept in `--cache`.
`floor` is what must move whatever the algorithm: x, W, ids and the gradient read, out and gradients written, at 4.3 TB/s.
`rows floor` is what our order of work moves, every row that is gathered read from memory. Both on CUDA only.

On a CPU that others use too, take `--threads 1`: then `ms` is time of this process on its processor. With more threads every
parallel region waits for the last of them to be given a core, and small layers seem hundreds of times slower than they are.

    python benchmarks/relational.py --jobs 8
    python benchmarks/relational.py --triples FILE --name fb15k-237 --graphs '' --models rgcn --threads 1
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from relational_systems import MODELS, PEERS, SYSTEMS, edges_of

HERE = Path(__file__).resolve().parent

GRAPHS = ("am", "mag", "wikikg2", "biokg", "fb15k-237", "bgs", "mutag", "aifb")
KEY = ("graph", "model", "system", "dtype", "width", "scale", "device")
CUT = "not done in"
"""How the reason of a row begins that is made again."""
Row = dict[str, Any]
Task = tuple[str, list[tuple[str, str]]]

# ---- one process ----


def lines_of(command: list[str], seconds: float) -> Iterator[str]:
    """What it prints, line by line. TimeoutError where a line takes longer; ChildProcessError, with the reason, where it fails."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as running,
    ):
        found: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=lambda: [*map(found.put, running.stdout or ()), found.put(None)], daemon=True).start()
        line: str | None = ""
        try:
            while (line := found.get(timeout=seconds)) is not None:
                yield line
        except queue.Empty:
            raise TimeoutError from None
        finally:
            if line is not None:
                running.kill()
        status = running.wait()
        errors.seek(0)
        last = (errors.read().strip().splitlines() or [f"exit status {status}"])[-1][:200]
    if status:
        raise ChildProcessError(f"killed by signal {-status}: out of memory?" if status < 0 else last)


def rows_of(options: dict[str, Any], pairs: list[tuple[str, str]], seconds: float, end: float) -> Iterator[Row]:
    """Rows as they come; one that takes too long, or ends the process, has the reason, and another process goes on behind it."""
    left = list(pairs)
    while left:
        limit = min(seconds, end - time.time())
        if limit <= 1:
            yield from (
                {"model": model, "system": system, "error": f"{CUT} the time for all"} for model, system in left
            )
            return
        command = [sys.executable, str(HERE / "relational_systems.py"), json.dumps({**options, "rows": left})]
        try:
            for line in lines_of(command, limit):
                if line.startswith("ROW "):
                    yield json.loads(line[4:])
                    left = left[1:]
                    limit = min(seconds, end - time.time())
            reason = "the process ended without it" if left else ""
        except TimeoutError:
            reason = f"{CUT} {limit:.0f} s"
        except ChildProcessError as error:
            reason = str(error)
        if left:
            yield {"model": left[0][0], "system": left[0][1], "error": reason}
            left = left[1:]


def tasks(graphs: list[str], models: list[str], systems: list[str]) -> list[Task]:
    """What runs in one process: all of ours on a graph; its peers; every compiled one alone, last."""
    known = [(m, s) for s in systems for m in models if m == "rgcn" or not s.startswith("pyg")]
    ours, peers = [pair for pair in known if pair[1] not in PEERS], [pair for pair in known if pair[1] in PEERS]
    plain = [pair for pair in peers if "compile" not in pair[1]]
    alone = [[pair] for pair in peers if "compile" in pair[1]]
    return [(graph, pairs) for pairs in (ours, plain, *alone) for graph in graphs if pairs]


# ---- all rows ----


class Rows:
    """All rows of a file, written whenever one comes."""

    def __init__(self, path: Path, retry: bool) -> None:
        self.path, self.lock, self.machine = path, threading.Lock(), machine()
        found: list[Row] = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
        self.rows = {key_of(row): row for row in found if not again(row, retry)}

    def add(self, row: Row) -> None:
        with self.lock:
            self.rows[key_of(row)] = row
            rows = self.ordered()
            compared(rows)
            whole = json.dumps({**self.machine, "rows": rows, "means": means(rows)}, indent=1)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = self.path.with_suffix(".tmp")
            beside.write_text(whole + "\n", encoding="utf-8")
            os.replace(beside, self.path)

    def ordered(self) -> list[Row]:
        def place(row: Row) -> tuple[Any, ...]:
            graph = GRAPHS.index(row["graph"]) if row["graph"] in GRAPHS else len(GRAPHS)
            return graph, row["graph"], row["dtype"], MODELS.index(row["model"]), SYSTEMS.index(row["system"])

        return sorted(self.rows.values(), key=place)


def key_of(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name, 1.0 if name == "scale" else None) for name in KEY)


def again(row: Row, retry: bool) -> bool:
    return "error" in row and (retry or row["error"].startswith(CUT))


def compared(rows: list[Row]) -> None:
    """Ratios, and how far results are from Wholestep's, among the rows of one graph, model and dtype."""
    groups: dict[Any, dict[str, Row]] = {}
    for row in rows:
        if "ms" in row:
            groups.setdefault((key_of(row)[:2], key_of(row)[3:]), {})[row["system"]] = row
    for ran in groups.values():
        best = min((ran[peer]["ms"] for peer in PEERS if peer in ran), default=None)
        ours = ran.get("wholestep", ran.get("wholestep-graph", {})).get("checks")
        for row in ran.values():
            row["times_faster_than_best_peer"] = best / row["ms"] if best else None
            row["times_faster_than_pyg"] = ran["pyg"]["ms"] / row["ms"] if "pyg" in ran else None
            if ours and row.get("checks"):
                pairs = zip(row["checks"], ours, strict=True)
                row["difference"] = max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)


def machine() -> dict[str, Any]:
    git = subprocess.run(["git", "-C", str(HERE), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    found = {
        "commit": os.environ.get("WHOLESTEP_COMMIT") or git.stdout.strip(), "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }  # fmt: skip
    for name in ("triton", "torch_geometric"):
        try:
            found[name] = importlib.import_module(name).__version__
        except ImportError:
            found[name] = None
    return found


def means(rows: list[Row]) -> dict[str, float]:
    """Geometric, over graphs and models in float32, of the quicker way in which Wholestep was run."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row["system"] in ("wholestep", "wholestep-graph") and "ms" in row and row["dtype"] == "float32":
            key = row["graph"], row["model"]
            best[key] = min(row, best.get(key, row), key=lambda r: r["ms"])
    found = {}
    for name in ("times_faster_than_best_peer", "times_faster_than_pyg"):
        values = [row[name] for row in best.values() if row.get(name)]
        if values:
            found[f"{name}, geometric mean of {len(values)}"] = statistics.geometric_mean(values)
    within = [row["ms"] / row["rows_floor_ms"] for row in best.values() if row["ms"] > 1 and row.get("rows_floor_ms")]
    if within:
        found[f"times the rows floor at most, of {len(within)} above 1 ms"] = max(within)
    return found


def table(rows: list[Row]) -> str:
    def shown(value: float | None, spec: str) -> str:
        return "-" if value is None else format(value, spec)

    lines = [
        f"{'graph':<14}{'model':<7}{'system':<17}{'dtype':<10}{'ms':>10}{'MB':>9}{'x peer':>9}{'x pyg':>9}{'floor ms':>10}"
        f"{'rows':>8}  off by"
    ]
    for row in rows:
        first = f"{row['graph']:<14}{row['model']:<7}{row['system']:<17}{row['dtype']:<10}"
        if "error" in row:
            lines.append(first + f"  {row['error']}")
            continue
        found = [
            shown(row.get(key), spec).rjust(wide)
            for key, spec, wide in (
                ("ms", ".3f", 10), ("peak_mb", ".0f", 9), ("times_faster_than_best_peer", ".2f", 9),
                ("times_faster_than_pyg", ".2f", 9), ("floor_ms", ".3f", 10), ("rows_floor_ms", ".3f", 8),
            )
        ]  # fmt: skip
        lines.append(first + "".join(found) + f"  {shown(row.get('difference'), '.0e')}")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--graphs", default=",".join(GRAPHS), help="names of twins, by commas; those first that matter most"
    )
    parser.add_argument("--triples", help="a file of triples: one more graph, the first")
    parser.add_argument("--name", default="triples", help="what the graph of the file is called")
    parser.add_argument("--scale", type=float, default=1.0, help="of twins")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--only", default="", help="GRAPH, GRAPH:MODEL or GRAPH:MODEL:SYSTEM, by commas; * is any")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default=here)
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; without it as many as torch takes")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--row-seconds", type=float, default=150.0, help="for one row at most, imports and all")
    parser.add_argument("--budget-seconds", type=float, default=540.0, help="for all")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--retry", action="store_true", help="make rows that failed again")
    parser.add_argument("--cache", default="/tmp/wholestep-twins", help="folder of twins that were made")
    parser.add_argument("--out", type=Path, default=HERE / "results" / f"relational_{here}.json")
    given = parser.parse_args()
    for option, known in (("models", MODELS), ("systems", SYSTEMS), ("graphs", GRAPHS)):
        names = list(filter(None, getattr(given, option).split(",")))
        unknown = [name for name in names if name not in known]
        if unknown:
            parser.error(f"--{option}: there is no {unknown[0]!r}: {', '.join(known)}")
        setattr(given, option, names)
    return given


def asked_for(only: str, *names: str) -> bool:
    def fits(pattern: str) -> bool:
        return all(part in ("*", name) for part, name in zip(pattern.split(":"), names, strict=False))

    return not only or any(fits(pattern) for pattern in only.split(","))


def main() -> None:
    given, begun = arguments(), time.time()
    graphs = [*([given.name] if given.triples else []), *given.graphs]
    shared = {
        key: getattr(given, key)
        for key in ("triples", "name", "scale", "width", "dtype", "device", "runs", "threads", "cache")
    }
    Path(given.cache).mkdir(parents=True, exist_ok=True)
    public = {name: getattr(given, name) for name in ("dtype", "width", "scale", "device")}
    rows = Rows(given.out, given.retry)

    def wanted(graph: str, pair: tuple[str, str]) -> bool:
        key = key_of({"graph": graph, "model": pair[0], "system": pair[1], **public})
        return asked_for(given.only, graph, *pair) and key not in rows.rows

    left = [
        (graph, [pair for pair in pairs if wanted(graph, pair)])
        for graph, pairs in tasks(graphs, given.models, given.systems)
    ]
    left = [(graph, pairs) for graph, pairs in left if pairs]

    def run(task: Task) -> None:
        graph, pairs = task
        for row in rows_of({**shared, "graph": graph}, pairs, given.row_seconds, begun + given.budget_seconds):
            rows.add({"graph": graph, **public, **row})
            took = row.get("error") or format(row["ms"], ".3f") + " ms"
            line = f"{time.time() - begun:5.0f} s  {graph} {row['model']} {row['system']}: {took}"
            print(line, file=sys.stderr, flush=True)

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(lambda graph: edges_of({**shared, "graph": graph}), dict.fromkeys(graph for graph, _ in left)))
        list(pool.map(run, left))
    print(table(rows.ordered()))
    for name, value in means(rows.ordered()).items():
        print(f"{name}: {value:.2f}")


if __name__ == "__main__":
    main()
