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
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor

from wholestep.errors import BadOption
from wholestep.relational.between import Between as Between
from wholestep.relational.between import between
from wholestep.relational.building import make_tables, make_types, one_row
from wholestep.relational.tables import Cells as Cells
from wholestep.relational.tables import NodeTypes as NodeTypes
from wholestep.relational.tables import Pairs as Pairs
from wholestep.relational.tables import Rows as Rows
from wholestep.relational.tables import Table as Table
from wholestep.relational.tables import Taking as Taking

if TYPE_CHECKING:
    from wholestep.relational.hetero import Layout


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
    cells: Cells | None
    """Of all nodes and relations, where most are pairs."""
    between: Between | None
    """For dots of both ends, where relations take different sides."""
    of_relations: Table
    """Relations -> nodes, over pairs: relations of sources, then those of destinations, each with its pairs."""
    at_destinations: Table
    """Source nodes -> destination pairs, over edges."""
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
        order = src.argsort(stable=True)
        order = order.index_select(0, (dst * relations + etype).index_select(0, order).argsort(stable=True))
        src, dst, etype = (ids.index_select(0, order) for ids in (src, dst, etype))
        types = None if ntype is None else one_row(make_types(*_checked_types(ntype, nodes, num_types, src.device)))
        tables = make_tables(src, dst, etype, nodes, relations)
        tables["between"] = between(tables, nodes)
        self._fill({"order": order.to(tables["src"].dtype), "types": types} | tables)

    @classmethod
    def _of(cls, tables: Mapping[str, Any]) -> RelGraph:
        """From tables that are there."""
        made = object.__new__(cls)
        made._fill(tables)
        return made

    def _fill(self, tables: Mapping[str, Any]) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, tables[field.name])

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
        told = torch.empty(3, self.num_edges, dtype=torch.int64, device=self.order.device)
        told[:, self.order.long()] = torch.stack([self.src, self.dst, self.etype]).long()
        return told[:2], told[2]

    def to(self, device: Any) -> RelGraph:
        """The same graph elsewhere."""
        moved: dict[int, Tensor] = {}
        return self._of({f.name: _moved(getattr(self, f.name), device, moved) for f in dataclasses.fields(self)})

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
    try:
        told = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError):
        raise BadOption(f"{name} is no tensor, and none can be made of it", hint=f"one whole number per {of}") from None
    if told.shape == (0,):
        return told.long()
    if told.dim() != 1 or told.is_floating_point() or told.dtype == torch.bool:
        raise BadOption(f"{name} is {told.dtype} of shape {tuple(told.shape)}", hint=f"one whole number per {of}")
    return told.long()


def _refuse_unequal(*ids: Tensor) -> None:
    if len({t.device for t in ids}) > 1:
        told = ", ".join(f"{name} {t.device}" for name, t in zip(("src", "dst", "etype"), ids, strict=True))
        raise BadOption(f"edges on several devices: {told}", hint="bring them to one")
    if len({t.shape[0] for t in ids}) > 1:
        told = ", ".join(f"{name} {t.shape[0]}" for name, t in zip(("src", "dst", "etype"), ids, strict=True))
        raise BadOption(
            f"edges of unequal number: {told}", hint="every edge has a source, a destination and a relation"
        )


def _count(name: str, given: int | None, *ids: Tensor) -> int:
    if given is None:
        return max((int(t.max()) + 1 for t in ids if t.numel()), default=0)
    if not isinstance(given, SupportsIndex) or isinstance(given, bool) or operator.index(given) < 0:
        raise BadOption(f"{name}={given!r}", hint="it is a count")
    return operator.index(given)


def _refuse_beyond(name: str, ids: Tensor, most: int, count: str) -> None:
    bad = (ids < 0) | (ids >= most)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise BadOption(f"{name}[{at}] is {int(ids[at])}, and {count} is {most}", hint=f"ids go from 0 to {most - 1}")


def _moved(value: Any, device: Any, moved: dict[int, Tensor]) -> Any:
    """A tensor that several tables share stays one."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        if id(value) not in moved:
            moved[id(value)] = value.to(device)
        return moved[id(value)]
    return type(value)(**{f.name: _moved(getattr(value, f.name), device, moved) for f in dataclasses.fields(value)})


def _checked_types(ntype: Any, nodes: int, count: int | None, device: torch.device) -> tuple[Tensor, int]:
    types = _ids("ntype", ntype, "node").to(device)
    if types.shape[0] != nodes:
        raise BadOption(f"ntype has {types.shape[0]} rows, and there are {nodes} nodes", hint="one type per node")
    count = _count("num_types", count, types)
    _refuse_beyond("ntype", types, count, "num_types")
    return types[None], count
