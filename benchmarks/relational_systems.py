"""The systems that `relational.py` compares, and one process that measures them: rows in, `ROW {json}` lines out.

Legend: N nodes, E edges, R relations, d width; x (N, d), W (R, d, d). Sums over edges, no root matrix and no bias anywhere.

    rgcn  x[src] @ W[r]
    rgat  softmax per destination of leaky_relu(x[dst] . u[r] + m . v[r]) times m, m = x[src] @ W[r]
    hgt   softmax per destination of (k[src] @ A[r]) . q[dst] mu[r] / sqrt(d) times v[src] @ W[r]; one head, projections left out

    wholestep        rel.layer over the graph's better side per relation; wholestep-graph: the same, recorded as a CUDA graph
    source-only      rel.layer with source pairs for every relation, recorded on CUDA
    pyg, pyg-compile RGCNConv (PyG's other layers are other mathematics), as it is and under torch.compile
    loop, loop-compile  edges sorted by relation, one product per relation, as it is and under torch.compile
    grouped-mm       edges sorted by relation, torch's grouped product in bf16 (CUDA only)

Peak memory is that of one forward and backward, with nothing of the step before alive. Run by `relational.py`, options as JSON.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import gc
import importlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch
import torch.nn.functional as F
from torch import Tensor

from wholestep import relational as rel
from wholestep.bench.turns import my_turn, tune_in_turns
from wholestep.relational import spaces
from wholestep.relational.spaces import Space

BYTES_A_MS = 4.3e9
MOST_SECONDS = 5
"""Of timed runs; a slow system gets fewer."""
PEERS = ("pyg", "pyg-compile", "loop", "loop-compile", "grouped-mm")
SYSTEMS = ("wholestep-graph", "wholestep", "source-only", *PEERS)
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


def dot_at_asked_side(
    graph: rel.RelGraph, destination: Tensor, source: Tensor, matrices: Tensor, on_gpu: bool
) -> Tensor:
    """Programs are shared by the layers of a message function, so the system is asked for when one runs."""
    if graph.rows is not graph.only_sources:
        return LINEAR_DOT(graph, destination, source, matrices, on_gpu)
    moved = spaces.product_of(graph, source, matrices, Space.SOURCE, Space.SOURCE_PAIR, Space.RELATION)
    return spaces.dot_of_source_pairs(graph, destination, moved)


spaces.linear_dot = dot_at_asked_side


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
        graph, layer = rel.RelGraph(*edges[:3], num_nodes=edges[3], num_relations=edges[4]), rel.layer(MESSAGES[model])
        if system == "source-only":
            rows, graph = graph.only_sources, copy.copy(graph)
            object.__setattr__(graph, "rows", rows)
            object.__setattr__(graph, "between", None)  # whose places are those of the rows that were there
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
    tune_in_turns()
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

    if "compile" in system or system not in PEERS:
        step()  # compiles; that of the others takes much memory
    with alone(options):
        for _ in range(2):
            step()
        repeats = None if system in PEERS else says_the_same(step, device)
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
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
    begun, times, results = time.perf_counter(), [], None
    for _ in range(runs + 1):
        del results
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
    """One process at a time, and no row of another benchmark that takes turns with this one."""
    with open(Path(options["cache"]) / "lock", "w") as lock, my_turn():
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


def main() -> None:
    """Rows are printed as they come."""
    options = json.loads(sys.argv[1])
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


if __name__ == "__main__":
    main()
