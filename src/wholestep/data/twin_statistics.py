"""What is known of the relational data sets that have twins, and what is assumed where nothing is published.

In: nothing. Out: STATISTICS, by name; `fitted_sizes`, the edges of every relation of a group by Zipf's law.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Relations between nodes of the same two types."""

    relations: int
    edges: int
    source_ratio: float
    """Pairs (source, relation) per edge."""
    destination_ratio: float
    source: str = "node"
    destination: str = "node"
    top_share: float | None = None
    """What the largest tenth of the relations holds; None: sizes by Zipf's law with an exponent of 1."""
    largest: int | None = None
    smallest: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """One data set."""

    name: str
    nodes: int
    edges: int
    relations: int
    groups: tuple[Group, ...]
    types: dict[str, int]
    inverses: bool = False
    """Every edge is there a second time, turned round, of a relation of its own; the groups hold the first."""
    pool_zipf: float = 0.6
    pair_zipf: float = 0.8
    published: tuple[str, ...] = ()
    """Those of the ratios that are not assumed."""
    more: dict[str, float] = dataclasses.field(default_factory=dict)
    """Published statistics of the data set at its full size that its groups do not hold."""

    def wanted(self, scale: float) -> dict[str, tuple[float, bool]]:
        """Statistic -> (value, is it published?)."""
        ratios = [
            sum(group.edges * getattr(group, side) for group in self.groups) / sum(group.edges for group in self.groups)
            for side in ("source_ratio", "destination_ratio")
        ]
        if self.inverses:
            ratios = [sum(ratios) / 2] * 2
        counts = {"nodes": round(self.nodes * scale), "edges": round(self.edges * scale), "relations": self.relations}
        names = dict(zip(("source pairs / edges", "destination pairs / edges"), ratios, strict=True))
        told: dict[str, tuple[float, bool]] = {name: (value, True) for name, value in counts.items()}
        told |= {name: (value, name in self.published) for name, value in names.items()}
        if len(self.groups) == 1 and self.groups[0].top_share is not None:
            told["top 10 % of relations"] = (self.groups[0].top_share, True)
        return told | ({name: (value, True) for name, value in self.more.items()} if scale == 1 else {})


def fitted_sizes(group: Group, scale: float) -> list[int]:
    """Edges of every relation, the largest first: (k + shift) ** -exponent, fitted to what is known."""
    edges = max(round(group.edges * scale), group.relations)
    least = None if group.smallest is None else max(round(group.smallest * scale), 1)
    exponent, shift = 1.0, 1.0
    if group.top_share is not None:
        low, high = 0.0, 200.0
        for _ in range(50 if group.largest is not None else 0):  # a larger shift: a smaller largest relation
            shift = (low + high) / 2 + 1
            exponent = _exponent(group, shift, edges, least)
            too_large = _sizes(group.relations, edges, least, exponent, shift)[0] > (group.largest or 0) * scale
            low, high = (shift - 1, high) if too_large else (low, shift - 1)
        exponent = _exponent(group, shift, edges, least)
    return _sizes(group.relations, edges, least, exponent, shift)


def _exponent(group: Group, shift: float, edges: int, least: int | None) -> float:
    """That for which the largest tenth holds its share."""
    low, high, top = 0.0, 40.0, max(round(group.relations / 10), 1)
    for _ in range(50):
        middle = (low + high) / 2
        share = sum(_sizes(group.relations, edges, least, middle, shift)[:top]) / edges
        low, high = (middle, high) if share < (group.top_share or 0.0) else (low, middle)
    return (low + high) / 2


def _sizes(relations: int, edges: int, least: int | None, exponent: float, shift: float) -> list[int]:
    """Whole numbers that sum to `edges`, the last of them `least` where it is known."""
    weights = [((k + shift) / shift) ** -exponent for k in range(relations)]
    if least is not None:
        weights = [weight - weights[-1] for weight in weights]
    least = least or 1
    total, spare = sum(weights), edges - least * relations
    sizes = [least + int(spare * weight / (total or 1.0)) for weight in weights]
    for k in range(edges - sum(sizes)):  # what rounding left, one each
        sizes[k % relations] += 1
    return sizes


def _plain(
    name: str, nodes: int, edges: int, relations: int, source: float, destination: float, *known: str
) -> Statistics:
    """One type of nodes; ratios are assumed except for the known ones."""
    group = Group(relations=relations, edges=edges, source_ratio=source, destination_ratio=destination)
    return Statistics(
        name=name,
        nodes=nodes,
        edges=edges,
        relations=relations,
        groups=(group,),
        types={"node": nodes},
        published=known,
    )


def _between(source: str, destination: str, edges: int, sources: int, destinations: int, relations: int = 1) -> Group:
    """By the pools of all its relations together rather than by ratios."""
    return Group(
        relations=relations, edges=edges, source=source, destination=destination, source_ratio=sources / edges,
        destination_ratio=destinations / edges,
    )  # fmt: skip


_MAG = {"paper": 736_389, "author": 1_134_649, "institution": 8_740, "field": 59_965}
_BIOKG = {"disease": 10_687, "protein": 17_499, "drug": 10_533, "side-effect": 9_969, "function": 45_085}
# fmt: off
_ALL = (
    _plain("aifb", 7_262, 48_810, 78, 0.60, 0.35), _plain("mutag", 27_163, 148_100, 46, 0.60, 0.35),
    _plain("bgs", 94_806, 672_884, 96, 0.55, 0.30), _plain("am", 881_680, 5_668_682, 96, 0.57, 0.30, "source pairs / edges"),
    Statistics(  # who cites, is cited and has an institution is assumed; authors, papers and fields all have edges
        name="mag", nodes=1_939_743, edges=21_111_007, relations=4, types=_MAG,
        groups=(
            _between("author", "paper", 7_145_660, 1_134_649, 736_389), _between("paper", "paper", 5_416_271, 620_000, 620_000),
            _between("paper", "field", 7_505_078, 736_389, 59_965),
            _between("author", "institution", 1_043_998, 780_000, 8_740),
        ),
    ),
    _plain("wikikg2", 2_500_604, 17_137_181, 535, 0.70, 0.20),
    Statistics(  # how the edges are shared out among the groups is assumed
        name="biokg", nodes=93_773, edges=5_088_434, relations=51, types=_BIOKG,
        groups=(
            _between("drug", "drug", 1_250_000, 62_500, 62_500, 38), _between("protein", "protein", 1_450_000, 100_000, 100_000, 8),
            _between("protein", "function", 780_000, 17_000, 18_000), _between("function", "function", 1_250_000, 44_000, 26_000),
            _between("drug", "side-effect", 160_000, 1_400, 9_900), _between("drug", "protein", 120_000, 6_000, 4_500),
            _between("disease", "protein", 78_434, 7_500, 6_500),
        ),
    ),
    Statistics(  # 237 relations; the side with fewer pairs is that of the destinations, and that of the sources once turned round
        name="fb15k-237", nodes=14_541, edges=620_232, relations=474, inverses=True, types={"node": 14_541},
        pool_zipf=0.45, pair_zipf=0.68,
        groups=(Group(
            relations=237, edges=310_116, source_ratio=0.419, destination_ratio=0.103, top_share=0.55, largest=16_391, smallest=45,
        ),),
        published=("source pairs / edges", "destination pairs / edges"),
        more={
            "better side / edges": 0.103, "smallest relation": 45, "median relation": 426, "largest relation": 16_391,
            "in-degree, largest": 8_642, "in-degree, 99 %": 314,
        },
    ),
)
# fmt: on
STATISTICS = {row.name: row for row in _ALL}
