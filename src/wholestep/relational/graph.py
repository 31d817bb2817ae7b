"""RelGraph: a typed graph as the tables that relational layers run over, built once on its device by sorts.

In: for every edge its source, destination and relation. Out: tensors only, so that two graphs of equal sizes are one and the same
program. Edges are kept in the order of (destination, relation, source). A *pair* is a node together with a relation of which it
has an edge: what depends on a node and a relation is computed once per pair and not once per edge. There are pairs of both sides:

    source pair       (source, relation)        x[src] @ W[relation] for all edges of a source at once
    destination pair  (destination, relation)   sum of x[src] over edges first, then one product

Per relation the side with fewer pairs is taken (`rows`). A `Table` sums, a `Taking` hands out; both come with themselves turned
round, for derivatives. Ids are int32 where they fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wholestep import ops as ops  # registers the operators
from wholestep.errors import BadOption

if TYPE_CHECKING:
    from wholestep.relational.hetero import Layout


@dataclasses.dataclass(frozen=True, slots=True)
class Taking:
    """Rows handed out: row i of the result is row index[i]; back_ptr and back_index say who took a row."""

    index: Tensor
    back_ptr: Tensor
    back_index: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.ws.take_rows(x, self.index, self.back_ptr, self.back_index)
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """Rows summed up: the entries of target t stand at ptr[t] to ptr[t + 1]; `edge` is that whose weight counts, or -1."""

    ptr: Tensor
    index: Tensor
    edge: Tensor
    back_ptr: Tensor
    back_index: Tensor
    back_edge: Tensor

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        edge, back_edge = (None, None) if weight is None else (self.edge, self.back_edge)
        out: Tensor = torch.ops.ws.gather_sum(
            x, weight, self.ptr, self.index, edge, self.back_ptr, self.back_index, back_edge
        )
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of one side, in the order of (relation, node)."""

    relation: Tensor
    ends: Tensor
    """Relation -> where its pairs end."""
    of_node: Taking
    """Node -> its pairs."""
    to_edge: Taking
    """Pair -> its edges."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeTypes:
    """The type of every node."""

    ends: Tensor
    """Type -> where its nodes end, in the order of types."""
    to_node: Taking
    """Type -> its nodes."""
    order: Taking | None
    """Nodes in the order of types; None where they are in that order."""

    @property
    def count(self) -> int:
        return self.ends.shape[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """One row per pair of the side that was chosen for its relation, in the order of relations."""

    ends: Tensor
    gathered: Table
    """Nodes -> rows: the source of a source pair; for a destination pair the sum over its edges."""
    spread: Table
    """Rows -> nodes: over the edges of a source pair; a destination pair to its node."""
    by_source: Tensor
    """Relation -> whether source pairs were chosen."""


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class RelGraph:
    """A typed graph; see the module."""

    src: Tensor
    dst: Tensor
    etype: Tensor
    order: Tensor
    """Edge here -> edge as given."""
    ptr: Tensor
    """Node -> where its incoming edges begin."""
    pair_ptr: Tensor
    """Where the edges of every destination and relation begin, in the order of edges."""
    degree: Tensor
    """Incoming edges of a node."""
    from_src: Taking
    """Source nodes -> edges."""
    from_dst: Taking
    sources: Pairs
    destinations: Pairs
    rows: Rows
    only_sources: Rows
    """The same with source pairs for every relation: where a message is not linear in its source, and to compare with."""
    incoming: Table
    """Edges -> destination nodes."""
    neighbours: Table
    """Source nodes -> destination nodes, over edges."""
    nodes: Tensor
    """(N, 0): how many nodes there are, as a size."""
    types: NodeTypes | None

    def __init__(
        self, src: Any, dst: Any, etype: Any, *, ntype: Any = None, num_nodes: int | None = None,
        num_relations: int | None = None, num_types: int | None = None,
    ) -> None:  # fmt: skip
        """Edge i goes from src[i] to dst[i] and is of relation etype[i], node n is of type ntype[n]. Without counts: one more than
        the largest id."""
        src, dst, etype = (_ids(name, t) for name, t in (("src", src), ("dst", dst), ("etype", etype)))
        _refuse_unequal(src, dst, etype)
        nodes = _count("num_nodes", num_nodes, src, dst)
        relations = _count("num_relations", num_relations, etype)
        for name, ids, most in (("src", src, nodes), ("dst", dst, nodes), ("etype", etype, relations)):
            _refuse_beyond(name, ids, most, "num_relations" if name == "etype" else "num_nodes")
        for name, made in _tables(src, dst, etype, nodes, relations).items():
            object.__setattr__(self, name, made)
        object.__setattr__(self, "types", None if ntype is None else _types(ntype, nodes, num_types, src.device))

    @classmethod
    def from_triples(cls, triples: Any, **counts: int) -> RelGraph:
        """Rows of (head, relation, tail)."""
        told = torch.as_tensor(triples)
        if told.dim() != 2 or told.shape[1] != 3:
            raise BadOption(f"triples of shape {tuple(told.shape)}", hint="one row (head, relation, tail) per edge")
        return cls(told[:, 0], told[:, 2], told[:, 1], **counts)

    @classmethod
    def from_hetero(cls, data: Any) -> tuple[RelGraph, Layout]:
        """Of torch_geometric's HeteroData, with a Layout that joins features of all node types and splits results."""
        from wholestep.relational.hetero import from_hetero  # which is made of this

        return from_hetero(data)

    @property
    def num_nodes(self) -> int:
        return self.nodes.shape[0]

    @property
    def num_edges(self) -> int:
        return self.src.shape[0]

    @property
    def num_relations(self) -> int:
        return self.sources.ends.shape[0]

    def given(self) -> tuple[Tensor, Tensor]:
        """(source, destination) and relation of every edge, in the order in which they were given."""
        index, etype = (
            torch.empty(2, self.num_edges, dtype=torch.int64, device=self.order.device),
            torch.empty_like(self.order),
        )
        index[:, self.order], etype[self.order] = torch.stack([self.src, self.dst]).long(), self.etype.long()
        return index, etype

    def to(self, device: Any) -> RelGraph:
        """The same graph elsewhere."""
        made = object.__new__(type(self))
        for field in dataclasses.fields(self):
            object.__setattr__(made, field.name, _moved(getattr(self, field.name), device))
        return made

    def report(self) -> str:
        """Sizes, and how few pairs there are beside the edges."""
        edges = max(self.num_edges, 1)
        sizes = [
            ("source pairs", self.sources.relation.shape[0]), ("destination pairs", self.destinations.relation.shape[0]),
            ("the better side per relation", self.rows.gathered.ptr.shape[0] - 1),
        ]  # fmt: skip
        first = f"{self.num_nodes} nodes, {self.num_edges} edges, {self.num_relations} relations"
        first += "" if self.types is None else f", {self.types.count} node types"
        lines = [f"{name:<30}{count:>12}  {count / edges:.3f} of the edges" for name, count in sizes]
        by_source = int(self.rows.by_source.sum())
        return "\n".join([first, *lines, f"relations by their sources    {by_source:>12}  of {self.num_relations}"])


# ---- checks ----


def _ids(name: str, ids: Any, of: str = "edge") -> Tensor:
    told = torch.as_tensor(ids)
    if told.dim() != 1 or told.is_floating_point() or told.dtype == torch.bool:
        raise BadOption(f"{name} is {told.dtype} of shape {tuple(told.shape)}", hint=f"one whole number per {of}")
    return told.long()


def _refuse_unequal(*ids: Tensor) -> None:
    if len({t.shape[0] for t in ids}) > 1:
        told = ", ".join(f"{name} {t.shape[0]}" for name, t in zip(("src", "dst", "etype"), ids, strict=True))
        raise BadOption(
            f"edges of unequal number: {told}", hint="every edge has a source, a destination and a relation"
        )


def _count(name: str, given: int | None, *ids: Tensor) -> int:
    if given is None:
        return max((int(t.max()) + 1 for t in ids if t.numel()), default=0)
    if given < 0:
        raise BadOption(f"{name}={given}", hint="it is a count")
    return given


def _refuse_beyond(name: str, ids: Tensor, most: int, count: str) -> None:
    bad = (ids < 0) | (ids >= most)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise BadOption(f"{name}[{at}] is {int(ids[at])}, and {count} is {most}", hint=f"ids go from 0 to {most - 1}")


def _moved(value: Any, device: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value.to(device)
    return type(value)(**{f.name: _moved(getattr(value, f.name), device) for f in dataclasses.fields(value)})


# ---- tables ----

Fit = Callable[[Tensor], Tensor]


def _tables(src: Tensor, dst: Tensor, etype: Tensor, nodes: int, relations: int) -> dict[str, Any]:
    order = src.argsort(stable=True)
    order = order[(dst[order] * relations + etype[order]).argsort(stable=True)]
    src, dst, etype = src[order], dst[order], etype[order]
    fit = _narrow(max(nodes, src.shape[0], relations))
    ptr = _ptr(dst, nodes)
    sources, destinations = (_pairs(node, etype, nodes, relations, fit) for node in (src, dst))
    counts = [torch.diff(pairs.ends, prepend=pairs.ends.new_zeros(1)) for pairs in (sources, destinations)]
    chosen = counts[0] <= counts[1]
    edges = torch.arange(src.shape[0], device=src.device)
    around = (src, dst, etype, nodes, relations, sources, destinations, fit)
    return {
        "src": fit(src), "dst": fit(dst), "etype": fit(etype), "order": order, "ptr": fit(ptr),
        "pair_ptr": fit(_changes(dst * relations + etype)),
        "degree": torch.diff(ptr), "from_src": _taking(src, nodes, fit), "from_dst": _taking(dst, nodes, fit),
        "sources": sources, "destinations": destinations, "rows": _rows(*around, chosen),
        "only_sources": _rows(*around, torch.ones_like(chosen)),
        "incoming": _table(dst, edges, edges, nodes, src.shape[0], fit),
        "neighbours": _table(dst, src, edges, nodes, nodes, fit),
        "nodes": torch.empty(nodes, 0, device=src.device),
    }  # fmt: skip


def _narrow(most: int) -> Fit:
    """int32 where all ids fit."""
    return (lambda t: t.int()) if most < 2**31 - 1 else (lambda t: t)


def _ptr(sorted_ids: Tensor, count: int) -> Tensor:
    """Where each id begins, among ids that are sorted."""
    return torch.searchsorted(sorted_ids, torch.arange(count + 1, device=sorted_ids.device))


def _changes(sorted_ids: Tensor) -> Tensor:
    """Where each id that occurs begins, and the end."""
    _, counts = torch.unique_consecutive(sorted_ids, return_counts=True)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _taking(index: Tensor, count: int, fit: Fit) -> Taking:
    back = index.argsort(stable=True)
    return Taking(fit(index), fit(_ptr(index[back], count)), fit(back))


def _table(target: Tensor, index: Tensor, edge: Tensor, targets: int, rows: int, fit: Fit) -> Table:
    """From entries in any order."""
    order, back = target.argsort(stable=True), index.argsort(stable=True)
    return Table(
        fit(_ptr(target[order], targets)), fit(index[order]), fit(edge[order]),
        fit(_ptr(index[back], rows)), fit(target[back]), fit(edge[back]),
    )  # fmt: skip


def _types(ntype: Any, nodes: int, count: int | None, device: torch.device) -> NodeTypes:
    types = _ids("ntype", ntype, "node").to(device)
    if types.shape[0] != nodes:
        raise BadOption(f"ntype has {types.shape[0]} rows, and there are {nodes} nodes", hint="one type per node")
    count = _count("num_types", count, types)
    _refuse_beyond("ntype", types, count, "num_types")
    fit = _narrow(max(nodes, count))
    to_node = _taking(types, count, fit)
    in_order = bool((types[1:] >= types[:-1]).all())
    everyone = torch.arange(nodes + 1, device=device)
    order = None if in_order else Taking(to_node.back_index, fit(everyone), fit(to_node.back_index.argsort()))
    return NodeTypes(to_node.back_ptr[1:], to_node, order)


def _pairs(node: Tensor, etype: Tensor, nodes: int, relations: int, fit: Fit) -> Pairs:
    keys, pair = torch.unique(etype * nodes + node, return_inverse=True)
    relation = keys // max(nodes, 1)
    ends = _ptr(relation, relations)[1:]
    return Pairs(fit(relation), fit(ends), _taking(keys % max(nodes, 1), nodes, fit), _taking(pair, keys.shape[0], fit))


def _rows(
    src: Tensor, dst: Tensor, etype: Tensor, nodes: int, relations: int, sources: Pairs, destinations: Pairs, fit: Fit,
    by_source: Tensor,
) -> Rows:  # fmt: skip
    """The rows of the chosen side of every relation, and the two tables around them."""
    kept = [by_source[sources.relation.long()], ~by_source[destinations.relation.long()]]
    relation = torch.cat([p.relation[k] for p, k in zip((sources, destinations), kept, strict=True)]).long()
    order = relation.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    first = int(kept[0].sum())
    row_of = [torch.full(k.shape, -1, device=k.device) for k in kept]
    row_of[0][kept[0]], row_of[1][kept[1]] = place[:first], place[first:]
    edges = torch.arange(src.shape[0], device=src.device)
    through = by_source[etype]
    here, there = edges[through], edges[~through]
    alone = [torch.full((int(k.sum()),), -1, device=k.device) for k in kept]
    gathered = _table(
        torch.cat([row_of[0][kept[0]], row_of[1][destinations.to_edge.index.long()[there]]]),
        torch.cat([sources.of_node.index.long()[kept[0]], src[there]]), torch.cat([alone[0], there]),
        order.shape[0], nodes, fit,
    )  # fmt: skip
    spread = _table(
        torch.cat([dst[here], destinations.of_node.index.long()[kept[1]]]),
        torch.cat([row_of[0][sources.to_edge.index.long()[here]], row_of[1][kept[1]]]), torch.cat([here, alone[1]]),
        nodes, order.shape[0], fit,
    )  # fmt: skip
    return Rows(fit(_ptr(relation[order], relations)[1:]), gathered, spread, by_source)
