"""One relational layer, forward and backward: Wholestep against PyG, a loop over relations, and one grouped product.

In: graphs (triples in a file, or twins of known graphs by their names), models, systems. Out: one row for every combination, with
median time, peak memory on CUDA, how many times faster it is than the best peer that ran and than PyG; a table, and JSON.

Legend: N nodes, E edges, R relations, d width; x (N, d), W (R, d, d). Sums over edges, no root matrix and no bias anywhere.

    rgcn  x[src] @ W[r]
    rgat  softmax per destination of leaky_relu(x[dst] . u[r] + m . v[r]) times m, m = x[src] @ W[r]
    hgt   softmax per destination of (k[src] @ A[r]) . q[dst] mu[r] / sqrt(d) times v[src] @ W[r]; one head, projections left out

    wholestep        rel.layer over the graph's better side per relation; wholestep-graph: the same, recorded as a CUDA graph
    source-only      rel.layer with source pairs for every relation, recorded on CUDA
    pyg, pyg-compile RGCNConv (PyG's other layers are other mathematics), as it is and under torch.compile
    loop, loop-compile  edges sorted by relation, one product per relation, as it is and under torch.compile
    grouped-mm       edges sorted by relation, torch's grouped product in bf16 (CUDA only)

Ours share a process per graph, plain peers another, and every compiled peer has its own: one that needs too much memory or time
is reported as such, and the others still run. With `--jobs` several of them get ready at a time (imports, graphs, compilation);
what is timed runs alone, by a lock. A twin is made once and kept in `--cache`.
`floor` is what must move whatever the algorithm: x, W, ids and the gradient read, out and gradients written, at 4.3 TB/s.
`rows floor` is what our order of work moves, every row that is gathered read from memory. Both on CUDA only.

On a CPU that others use too, take `--threads 1`: then `ms` is time of this process on its processor. With more threads every
parallel region waits for the last of them to be given a core, and small layers seem hundreds of times slower than they are.

    python benchmarks/relational.py --triples FILE --name fb15k-237 --device cuda --out FILE --budget-seconds 600
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import gc
import importlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch
import torch.nn.functional as F
from torch import Tensor

from wholestep import relational as rel
from wholestep.relational import spaces
from wholestep.relational.spaces import Space

ROOT = Path(__file__).resolve().parent.parent
BYTES_A_MS = 4.3e9
MOST_SECONDS = 5
"""Of timed runs; a slow system gets fewer."""
PEERS = ("pyg", "pyg-compile", "loop", "loop-compile", "grouped-mm")
SYSTEMS = ("wholestep", "wholestep-graph", "source-only", *PEERS)
Edges = tuple[Tensor, Tensor, Tensor, int, int]
"""src, dst, etype, nodes, relations."""

# ---- graphs ----


def triples(path: str) -> Edges:
    """A count, then `head tail relation` in every line. Inverse edges are added, of relations of their own."""
    with open(path) as lines:
        count = int(next(lines))
        told = torch.tensor([[int(word) for word in line.split()] for line in lines if line.strip()])
    assert told.shape == (count, 3), f"{tuple(told.shape)} numbers where {count} triples are announced"
    head, tail, relation = told.unbind(1)
    relations = int(relation.max()) + 1
    both = torch.cat([head, tail]), torch.cat([tail, head]), torch.cat([relation, relation + relations])
    return *both, int(told[:, :2].max()) + 1, 2 * relations


def edges_of(options: dict[str, Any]) -> Edges:
    if options["graph"] == options["name"] and options["triples"]:
        return triples(options["triples"])
    kept = Path(options["cache"]) / f"{options['graph']}-{options['scale']}.pt"
    if not kept.exists():
        made = importlib.import_module("wholestep.data.relational_twins").twin(options["graph"], scale=options["scale"])
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save((made.src, made.dst, made.etype, made.num_nodes, made.num_relations), f"{kept}.{os.getpid()}")
        os.replace(f"{kept}.{os.getpid()}", kept)
    return torch.load(kept)


# ---- models: as message functions, and over edges sorted by relation ----


def rgcn(e: Any, p: Any) -> Tensor:
    return (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1)


def rgat(e: Any, p: Any) -> Tensor:
    m = (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1)
    a = rel.edge_softmax(F.leaky_relu((e.dst.x * p.u[e.type]).sum(-1) + (m * p.v[e.type]).sum(-1)))
    return a[:, None] * m


def hgt(e: Any, p: Any) -> Tensor:
    m = (e.src.v.unsqueeze(1) @ p.W[e.type]).squeeze(1)
    k = (e.src.k.unsqueeze(1) @ p.A[e.type]).squeeze(1)
    a = rel.edge_softmax((k * e.dst.q).sum(-1) * p.mu[e.type] / math.sqrt(m.shape[-1]))
    return a[:, None] * m


MODELS = ("rgcn", "rgat", "hgt")
MESSAGES = {"rgcn": rgcn, "rgat": rgat, "hgt": hgt}
NODES = {"rgcn": ("x",), "rgat": ("x",), "hgt": ("k", "q", "v")}
PARAMS = {"rgcn": {"W": 2}, "rgat": {"W": 2, "u": 1, "v": 1}, "hgt": {"W": 2, "A": 2, "mu": 0}}
"""Name -> how many dimensions of the width."""

Product = Callable[[Tensor, Tensor], Tensor]


def softmax_per_node(logits: Tensor, dst: Tensor, nodes: int) -> Tensor:
    top = logits.detach().new_full((nodes,), float("-inf")).scatter_reduce(0, dst, logits.detach(), "amax")
    risen = (logits - top[dst]).exp()
    return risen / risen.new_zeros(nodes).index_add(0, dst, risen)[dst]


def over_edges(model: str, edges: Edges, n: dict[str, Tensor], p: dict[str, Tensor], product: Product) -> Tensor:
    """Edges in the order of relations; `product` multiplies their rows by the matrix of their relation."""
    src, dst, etype, nodes, _ = edges
    m = product(n["v" if model == "hgt" else "x"][src], p["W"])
    if model == "rgat":
        logits = F.leaky_relu((n["x"][dst] * p["u"][etype]).sum(-1) + (m * p["v"][etype]).sum(-1))
        m = softmax_per_node(logits, dst, nodes)[:, None] * m
    if model == "hgt":
        logits = (product(n["k"][src], p["A"]) * n["q"][dst]).sum(-1) * p["mu"][etype] / math.sqrt(m.shape[-1])
        m = softmax_per_node(logits, dst, nodes)[:, None] * m
    return m.new_zeros(nodes, m.shape[1]).index_add(0, dst, m)


LINEAR_DOT = spaces.linear_dot


def dot_at_sources(graph: rel.RelGraph, destination: Tensor, source: Tensor, matrices: Tensor) -> Tensor:
    moved = spaces.product_of(graph, source, matrices, Space.SOURCE, Space.SOURCE_PAIR, Space.RELATION)
    return spaces.dot_of_source_pairs(graph, destination, moved)


def by_relation(edges: Edges) -> tuple[Edges, Tensor]:
    """Sorted, with the end of every relation."""
    src, dst, etype, nodes, relations = edges
    order = etype.argsort(stable=True)
    ends = torch.bincount(etype, minlength=relations).cumsum(0)
    return (src[order], dst[order], etype[order], nodes, relations), ends


# ---- systems ----


def forward_of(
    system: str, model: str, edges: Edges, n: dict[str, Tensor], p: dict[str, Tensor]
) -> Callable[[], Tensor]:
    if system in ("wholestep", "wholestep-graph", "source-only"):
        spaces.linear_dot = dot_at_sources if system == "source-only" else LINEAR_DOT
        graph, layer = rel.RelGraph(*edges[:3], num_nodes=edges[3], num_relations=edges[4]), rel.layer(MESSAGES[model])
        if system == "source-only":
            rows, graph = graph.only_sources, copy.copy(graph)
            object.__setattr__(graph, "rows", rows)
        return lambda: layer(graph, n, p)
    if system in ("pyg", "pyg-compile"):
        return pyg(model, edges, n, p, system == "pyg-compile")
    ordered, ends = by_relation(edges)
    if system == "grouped-mm":
        refuse(not n[next(iter(n))].is_cuda, "CUDA only")
        last = ends.int()
        half = lambda rows, w: F.grouped_mm(rows.bfloat16(), w.bfloat16(), offs=last).to(rows.dtype)  # noqa: E731
        return lambda: over_edges(model, ordered, n, p, half)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()

    def one_by_one(rows: Tensor, w: Tensor) -> Tensor:
        # split and unbind: the derivative of a slice would fill a tensor of all edges with zeros, for every relation
        return torch.cat([part @ matrix for part, matrix in zip(rows.split(sizes), w.unbind(), strict=True)])

    def run() -> Tensor:
        return over_edges(model, ordered, n, p, one_by_one)

    return torch.compile(run) if system == "loop-compile" else run


def pyg(model: str, edges: Edges, n: dict[str, Tensor], p: dict[str, Tensor], compiled: bool) -> Callable[[], Tensor]:
    refuse(model != "rgcn", "PyG's layer is other mathematics")
    from torch_geometric.nn import RGCNConv

    width = p["W"].shape[-1]
    layer = RGCNConv(width, width, edges[4], aggr="add", root_weight=False, bias=False).to(p["W"])
    layer.weight = p["W"]
    index, etype, called = torch.stack(edges[:2]), edges[2], torch.compile(layer) if compiled else layer
    return lambda: called(n["x"], index, etype)


def refuse(when: bool, why: str) -> None:
    if when:
        raise NotImplementedError(why)


# ---- one system, in a process of its own ----


def measured(options: dict[str, Any]) -> dict[str, Any]:
    if options["threads"]:
        torch.set_num_threads(options["threads"])
    device, dtype, width = options["device"], getattr(torch, options["dtype"]), options["width"]
    edges = edges_of(options)
    nodes, relations = edges[3:]
    model, system, source = options["model"], options["system"], torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=source) / math.sqrt(width if len(shape) == 3 else 1)
        return torch.nn.Parameter(values.to(device, dtype))

    n = {name: leaf(nodes, width) for name in NODES[model]}
    p = {name: leaf(relations, *[width] * dims) for name, dims in PARAMS[model].items()}
    pull = torch.randn(nodes, width, generator=source).to(device, dtype)
    forward, leaves = forward_of(system, model, moved(edges, device), n, p), [*n.values(), *p.values()]

    def step() -> list[Tensor]:
        out = forward()
        return [out.detach(), *torch.autograd.grad(out, leaves, pull)]

    if "compile" in system:
        step()
    with alone(options):
        for _ in range(2):
            step()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        repeats = None if system in PEERS else says_the_same(step, device)
        if system == "wholestep-graph" or (system == "source-only" and device == "cuda"):
            step = recorded(step)
        times, peak, results = timed(step, device, options["runs"], MOST_SECONDS)
    checks = [float(t.double().square().mean().sqrt()) for t in results]
    checks += [float((results[0].double() * pull.double()).sum())]
    return {
        "ms": 1e3 * statistics.median(times), "times_ms": [1e3 * t for t in times], "peak_mb": peak, "checks": checks,
        "same_bits_and_no_wait": repeats, "clock": clock_of(device), "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1), "nodes": nodes, "edges": edges[0].shape[0], "relations": relations,
        **floors(moved(edges, device), n, p, model),
    }  # fmt: skip


def moved(edges: Edges, device: str) -> Edges:
    return tuple(t.to(device) if isinstance(t, Tensor) else t for t in edges)


def says_the_same(step: Callable[[], list[Tensor]], device: str) -> bool:
    """Whether a second step gives the same bits; an error where the host waits for the device."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        one, other = step(), step()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def recorded(step: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """As a CUDA graph: fails where anything is read on the host."""
    refuse(not torch.cuda.is_available(), "CUDA only")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()

    def replay() -> list[Tensor]:
        graph.replay()
        return kept

    return replay


def timed(
    step: Callable[[], list[Tensor]], device: str, runs: int, seconds: float
) -> tuple[list[float], float | None, Any]:
    """As many runs as the time allows, one at least, the first of several left out."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    clock = getattr(time, clock_of(device))
    begun, times = time.perf_counter(), []
    for _ in range(runs + 1):
        start, last = clock(), time.perf_counter()
        results = step()
        wait()
        times.append(clock() - start)
        last = time.perf_counter() - last
        if time.perf_counter() - begun + last > seconds:
            break
    peak = round(torch.cuda.max_memory_allocated() / 2**20, 1) if device == "cuda" else None
    return times[min(1, len(times) - 1) :], peak, results


@contextlib.contextmanager
def alone(options: dict[str, Any]) -> Iterator[None]:
    """One process at a time."""
    with open(Path(options["cache"]) / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def clock_of(device: str) -> str:
    return "process_time" if device == "cpu" and torch.get_num_threads() == 1 else "perf_counter"


def floors(edges: Edges, n: dict[str, Tensor], p: dict[str, Tensor], model: str) -> dict[str, float]:
    """In ms; see the module."""
    if not edges[0].is_cuda:
        return {}
    size = sum(t.numel() * t.element_size() for t in [*n.values(), *p.values()])
    out, count = next(iter(n.values())), edges[0].shape[0]
    row, ids = out.shape[1] * out.element_size(), 3 * 4 * count
    graph = rel.RelGraph(*edges[:3], num_nodes=edges[3], num_relations=edges[4])
    sides = graph.sources.relation.shape[0], graph.destinations.relation.shape[0]
    gathered, spread = graph.rows.gathered.index.shape[0], graph.rows.spread.index.shape[0]
    pairs, nodes = graph.rows.gathered.ptr.shape[0] - 1, edges[3]
    moved = 2 * (gathered + spread + nodes) + 8 * pairs  # sums around a product, with its three products backward
    if model != "rgcn":
        moved += count + pairs  # the gradient of the weights
    if model == "rgat":
        moved += 4 * sum(sides) + 2 * nodes  # rows times vectors: read; written, summed up and read again backward
    if model == "hgt":
        moved += 3 * (count + nodes) + 7 * min(sides) + nodes  # products of both ends, after a product of one of them
    numbers = 4 * (2 * (gathered + spread) + (0 if model == "rgcn" else 16 * count))
    matrices = 3 * sum(t.numel() * t.element_size() for t in p.values())
    return {
        "floor_ms": (3 * size + 2 * ids + 2 * nodes * row) / BYTES_A_MS,
        "rows_floor_ms": (moved * row + matrices + numbers) / BYTES_A_MS,
    }


def child(options: dict[str, Any]) -> None:
    """Rows are told as they come."""
    for model, system in options["rows"]:
        try:
            found = measured({**options, "model": model, "system": system})
        except torch.OutOfMemoryError:
            found = {"error": "out of memory"}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        print("ROW " + json.dumps({"model": model, "system": system, **found}), flush=True)
        if options["device"] == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


# ---- all of them ----


def rows_of(options: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
    """From a process of their own; those that it did not come to have the reason."""
    command = [sys.executable, __file__, "--child", json.dumps(options)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        told, last = done.stdout, (done.stderr.strip().splitlines() or [""])[-1][:200]
        reason = f"killed by signal {-done.returncode}: out of memory?" if done.returncode < 0 else last
    except subprocess.TimeoutExpired as error:
        told, reason = (error.stdout or b"").decode(), f"not done in {seconds:.0f} s"
    found = [json.loads(line[4:]) for line in told.splitlines() if line.startswith("ROW ")]
    missing = options["rows"][len(found) :]
    return found + [{"model": model, "system": system, "error": reason} for model, system in missing]


def tasks(graphs: list[str], models: list[str], systems: list[str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """What runs in one process: all of ours on a graph; its peers; every compiled one alone, last."""
    known = [(m, s) for s in systems for m in models if m == "rgcn" or not s.startswith("pyg")]
    ours, peers = [pair for pair in known if pair[1] not in PEERS], [pair for pair in known if pair[1] in PEERS]
    plain = [pair for pair in peers if "compile" not in pair[1]]
    alone = [[pair] for pair in peers if "compile" in pair[1]]
    return [(graph, pairs) for pairs in (ours, plain, *alone) for graph in graphs if pairs]


def compared(rows: list[dict[str, Any]]) -> None:
    """Ratios, and how far results are from Wholestep's, among the rows of one graph and model."""
    ran = {row["system"]: row for row in rows if "ms" in row}
    best = min((ran[peer]["ms"] for peer in PEERS if peer in ran), default=None)
    ours = ran.get("wholestep", {}).get("checks")
    for row in ran.values():
        checks = row.pop("checks") if row["system"] != "wholestep" else ours
        row["times_faster_than_best_peer"] = best / row["ms"] if best else None
        row["times_faster_than_pyg"] = ran["pyg"]["ms"] / row["ms"] if "pyg" in ran else None
        if ours:
            row["difference"] = max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(checks, ours, strict=True))
    ran.get("wholestep", {}).pop("checks", None)


def machine() -> dict[str, Any]:
    git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
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


def means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Geometric, over graphs and models, of the quicker way in which Wholestep was run."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if row["system"] in ("wholestep", "wholestep-graph") and "ms" in row:
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


def table(rows: list[dict[str, Any]]) -> str:
    def shown(value: float | None, spec: str) -> str:
        return "-" if value is None else format(value, spec)

    lines = [
        f"{'graph':<14}{'model':<7}{'system':<17}{'ms':>10}{'MB':>9}{'x peer':>9}{'x pyg':>9}{'floor ms':>10}{'rows':>8}  off by"
    ]
    for row in rows:
        first = f"{row['graph']:<14}{row['model']:<7}{row['system']:<17}"
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
    parser.add_argument("--graphs", default="", help="names of twins, by commas")
    parser.add_argument("--triples", help="a file of triples: one more graph")
    parser.add_argument("--name", default="triples", help="what the graph of the file is called")
    parser.add_argument("--scale", type=float, default=1.0, help="of twins")
    parser.add_argument("--models", default="rgcn")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; as torch has them unless told")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--row-seconds", type=float, default=math.inf, help="for one system at most")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--cache", default="/tmp/wholestep-twins", help="folder of twins that were made")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-seconds", type=float, required=True, help="for all")
    return parser.parse_args()


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        return child(json.loads(sys.argv[2]))
    told, begun = arguments(), time.time()
    graphs = [*([told.name] if told.triples else []), *filter(None, told.graphs.split(","))]
    models, systems = told.models.split(","), told.systems.split(",")
    shared = {
        key: getattr(told, key)
        for key in ("triples", "name", "scale", "width", "dtype", "device", "runs", "threads", "cache")
    }
    Path(told.cache).mkdir(parents=True, exist_ok=True)
    public = {"width": told.width, "dtype": told.dtype, "device": told.device}

    def run(task: tuple[str, list[tuple[str, str]]]) -> list[dict[str, Any]]:
        graph, pairs = task
        left = min(told.budget_seconds - (time.time() - begun), told.row_seconds * len(pairs))
        found = rows_of({**shared, "graph": graph, "rows": pairs}, max(left, 1))
        for row in found:
            took = row.get("error") or format(row["ms"], ".3f") + " ms"
            line = f"{time.time() - begun:5.0f} s  {graph} {row['model']} {row['system']}: {took}"
            print(line, file=sys.stderr, flush=True)
        return [{"graph": graph, **public, **row} for row in found]

    with ThreadPoolExecutor(told.jobs) as pool:
        list(pool.map(lambda graph: edges_of({**shared, "graph": graph}), graphs))
        rows = [row for found in pool.map(run, tasks(graphs, models, systems)) for row in found]
    for graph, model in {(row["graph"], row["model"]) for row in rows}:
        compared([row for row in rows if (row["graph"], row["model"]) == (graph, model)])
    rows.sort(key=lambda row: (graphs.index(row["graph"]), MODELS.index(row["model"]), SYSTEMS.index(row["system"])))
    told.out.write_text(json.dumps({**machine(), "rows": rows, "means": means(rows)}, indent=1) + "\n")
    print(table(rows))
    for name, value in means(rows).items():
        print(f"{name}: {value:.2f}")


if __name__ == "__main__":
    main()
