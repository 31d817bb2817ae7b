"""Twins of published relational data sets: made up, without a network, with the sizes and ratios that decide how fast a layer runs.

In: a name, a seed, a scale (of nodes and edges; relations stay as many), a device. Out: a Twin, and `report(twin)`: what was wanted
beside what was achieved. The same seed gives the same twin on every device: random numbers come from the CPU, sorts run there.

A relation of e edges gets a pool of sources and one of destinations, as large as the ratios of pairs to edges say; nodes get into
pools by Zipf's law, so a popular one is in many. Every member of a pool has an edge; the rest are pairs of members, again by Zipf's
law. No edge is there twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wholestep.data.draws import generator_for
from wholestep.data.twin_statistics import STATISTICS, Group, Statistics, fitted_sizes
from wholestep.errors import BadOption, did_you_mean

ROOM = 2
"""Pairs that two pools can form, per edge of their relation: with fewer, new edges would be hard to find."""
ZIPF_TURNS = 12
"""So often what was drawn twice is drawn again by Zipf's law; then evenly."""
MOST_TURNS = 200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """Edge i goes from src[i] to dst[i] and is of relation etype[i]; edges are in the order of relations."""

    name: str
    seed: int
    scale: float
    src: Tensor
    dst: Tensor
    etype: Tensor
    node_type: Tensor
    num_nodes: int
    num_relations: int
    type_names: tuple[str, ...]


def twin(name: str, seed: int = 0, scale: float = 1.0, device: Any = "cpu") -> Twin:
    """The twin of the data set `name`."""
    wanted = _known(name)
    if not 0 < scale <= 1:
        raise BadOption(f"scale={scale}", hint="use more than 0, and 1 at most")
    generator, device = generator_for(seed, 0, f"twin {name}"), torch.device(device)
    counts = [max(round(count * scale), 1) for count in wanted.types.values()]
    counts[0] += round(wanted.nodes * scale) - sum(counts)  # types without a count of their own round differently
    starts = [sum(counts[:i]) for i in range(len(counts))]
    place = {kind: (start, count) for kind, start, count in zip(wanted.types, starts, counts, strict=True)}
    parts = [_edges(group, wanted, scale, place, generator, device) for group in wanted.groups]
    src, dst = (torch.cat([part[side] for part in parts]) for side in (0, 1))
    before = [sum(group.relations for group in wanted.groups[:i]) for i in range(len(parts))]
    etype = torch.cat([part[2] + first for part, first in zip(parts, before, strict=True)])
    # Within its type a node's number so far was its rank in popularity, which real numbers do not tell.
    number = torch.cat([torch.randperm(count, generator=generator) + start for start, count in place.values()]).to(
        device
    )
    src, dst = number[src], number[dst]
    if wanted.inverses:
        src, dst, etype = (
            torch.cat([src, dst]),
            torch.cat([dst, src]),
            torch.cat([etype, etype + wanted.relations // 2]),
        )
    node_type = torch.repeat_interleave(torch.tensor(counts)).to(device)
    return Twin(
        name=name, seed=seed, scale=scale, src=src, dst=dst, etype=etype, node_type=node_type, num_nodes=sum(counts),
        num_relations=wanted.relations, type_names=tuple(wanted.types),
    )  # fmt: skip


def _known(name: str) -> Statistics:
    if name not in STATISTICS:
        hint = did_you_mean(name, STATISTICS, f"use one of {', '.join(STATISTICS)}")
        raise BadOption(f"{name!r} has no twin", hint=hint)
    return STATISTICS[name]


# ---- edges of one group of relations ----


def _edges(
    group: Group, wanted: Statistics, scale: float, place: dict[str, tuple[int, int]], generator: torch.Generator,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(src, dst, relation within the group)."""
    sizes = torch.tensor(fitted_sizes(group, scale))
    ends = place[group.source], place[group.destination]
    pools = _pool_sizes(sizes, group, ends[0][1], ends[1][1], wanted.name)
    draw = _Draws(generator, device)

    def pool_members(pool: Tensor, first: int, count: int) -> Tensor:
        among = torch.full_like(pool, count)
        _, node = draw.distinct(
            pool, among, lambda relation: draw.zipf(torch.full_like(relation, count), wanted.pool_zipf)
        )
        return node + first

    members = [pool_members(pool, *end) for pool, end in zip(pools, ends, strict=True)]
    of_source, of_destination = (pool.to(device) for pool in pools)

    def pairs(relation: Tensor) -> Tensor:
        one, other = (draw.zipf(of[relation], wanted.pair_zipf) for of in (of_source, of_destination))
        return one * of_destination[relation] + other

    covering = _covering(of_source, of_destination, draw, wanted.pair_zipf)
    relation, pair = draw.distinct(sizes, pools[0] * pools[1], pairs, covering)
    src = members[0][_starts(of_source)[relation] + pair // of_destination[relation]]
    dst = members[1][_starts(of_destination)[relation] + pair % of_destination[relation]]
    return src, dst, relation


def _pool_sizes(sizes: Tensor, group: Group, sources: int, destinations: int, name: str) -> tuple[Tensor, Tensor]:
    """How many sources and destinations each relation has: by the ratios over all, with room for the edges of each."""
    edges = sizes.double()
    limits = [edges.clamp(max=float(count)) for count in (sources, destinations)]
    ratios = [group.source_ratio, group.destination_ratio]
    factors, pools = [1.0, 1.0], [edges, edges]
    if bool((limits[0] * limits[1] < edges).any()):
        raise BadOption(f"the twin of {name} has more edges than its nodes can be joined by", hint="use a larger scale")
    for _ in range(40):  # small relations need larger pools than their share: the others make up for it
        one, other = (
            torch.minimum((ratio * factor * edges).clamp(min=1), limit)
            for ratio, factor, limit in zip(ratios, factors, limits)
        )
        lift = (ROOM * edges / (one * other)).sqrt().clamp(min=1)
        one = torch.minimum((one * lift).ceil(), limits[0])
        other = torch.minimum(torch.maximum(other, ROOM * edges / one).ceil(), limits[1])
        one = torch.minimum(torch.maximum(one, (ROOM * edges / other).ceil()), limits[0])
        pools = [one, other]
        factors = [
            factor * float(ratio * edges.sum() / pool.sum()) for factor, ratio, pool in zip(factors, ratios, pools)
        ]
    return pools[0].long(), pools[1].long()


def _covering(of_source: Tensor, of_destination: Tensor, draw: _Draws, exponent: float) -> tuple[Tensor, Tensor]:
    """(relation, pair) such that every member of both pools is in one."""
    most, fewest = torch.maximum(of_source, of_destination), torch.minimum(of_source, of_destination)
    relation = torch.repeat_interleave(most)
    larger = torch.arange(len(relation), device=most.device) - _starts(most)[relation]
    fewest = fewest[relation]
    smaller = torch.where(larger < fewest, larger, draw.zipf(fewest, exponent))
    by_source = (of_source >= of_destination)[relation]
    one, other = torch.where(by_source, larger, smaller), torch.where(by_source, smaller, larger)
    return relation, one * of_destination[relation] + other


# ---- drawing ----


def _starts(counts: Tensor) -> Tensor:
    return counts.cumsum(0) - counts


class _Draws:
    """Random numbers from the CPU, on the device."""

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        self.generator, self.device, self.even = generator, device, False

    def zipf(self, counts: Tensor, exponent: float) -> Tensor:
        """For each count n one of 0 .. n - 1, where k has a weight of (k + 1) ** -exponent; evenly while `even` is set."""
        drawn = torch.rand(len(counts), generator=self.generator, dtype=torch.float64)
        n, power = counts.cpu().double(), 1.0 if self.even else 1.0 - exponent
        value = (1 + drawn * ((n + 1) ** power - 1)) ** (1 / power) - 1
        return torch.minimum(value.long(), counts.cpu() - 1).to(self.device)

    def distinct(
        self,
        counts: Tensor,
        spaces: Tensor,
        draw: Callable[[Tensor], Tensor],
        given: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """counts[r] different numbers below spaces[r] for every relation r, as (relation, number), sorted. `draw`: relations ->
        a number for each; what came twice is drawn again. `given`: those to begin with."""
        counts, spaces = counts.to(self.device), spaces.to(self.device)
        starts, ends = _starts(spaces), spaces.cumsum(0)
        keys = starts.new_zeros(0) if given is None else (starts[given[0]] + given[1]).sort().values
        for turn in range(MOST_TURNS):
            upto = torch.searchsorted(keys, ends)
            lack = counts - torch.diff(upto, prepend=upto.new_zeros(1))
            if not int(lack.max()):
                relation = torch.searchsorted(ends, keys, right=True)
                self.even = False
                return relation, keys - starts[relation]
            self.even = turn >= ZIPF_TURNS
            listed = (lack > 0) & (spaces <= 4 * counts) & self.even  # nearly all are wanted: list them
            relation = torch.repeat_interleave(torch.where(listed, 0, lack + lack // 2 + (lack > 0)))
            every = torch.repeat_interleave(torch.where(listed, spaces, 0))
            number = torch.arange(len(every), device=self.device) - _starts(torch.where(listed, spaces, 0))[every]
            new = torch.cat([starts[relation] + draw(relation), starts[every] + number]).unique()
            keys = torch.cat([keys, self._some(_without(new, keys), lack, ends)]).sort().values
        raise BadOption("no more different edges are found", hint="use a larger scale")

    def _some(self, keys: Tensor, most: Tensor, ends: Tensor) -> Tensor:
        """Of every relation at most so many, any of them."""
        keys = keys[torch.randperm(len(keys), generator=self.generator).to(self.device)]
        relation, order = torch.searchsorted(ends, keys, right=True).sort(stable=True)
        first = torch.searchsorted(relation, torch.arange(len(ends), device=self.device))
        rank = torch.arange(len(keys), device=self.device) - first[relation]
        return keys[order[rank < most[relation]]]


def _without(new: Tensor, known: Tensor) -> Tensor:
    """Those of `new` that are not in `known`, which is sorted."""
    if not len(known):
        return new
    return new[known[torch.searchsorted(known, new).clamp(max=len(known) - 1)] != new]


# ---- what came out ----


def achieved(made: Twin) -> dict[str, float]:
    """The statistics of a twin, by the names that `Statistics.wanted` has."""
    sizes = torch.bincount(made.etype, minlength=made.num_relations)
    edges, top = len(made.etype), max(round(made.num_relations / 10), 1)
    pairs = [
        torch.bincount((made.etype * made.num_nodes + node).unique() // made.num_nodes, minlength=made.num_relations)
        for node in (made.src, made.dst)
    ]
    degree = torch.bincount(made.dst, minlength=made.num_nodes).sort().values
    return {
        "nodes": made.num_nodes, "edges": edges, "relations": made.num_relations,
        "source pairs / edges": float(pairs[0].sum() / edges), "destination pairs / edges": float(pairs[1].sum() / edges),
        "better side / edges": float(torch.minimum(*pairs).sum() / edges), "smallest relation": int(sizes.min()),
        "median relation": int(sizes.median()), "largest relation": int(sizes.max()),
        "top 10 % of relations": float(sizes.sort(descending=True).values[:top].sum() / edges),
        "in-degree, largest": int(degree[-1]), "in-degree, 99 %": int(degree[int(0.99 * (len(degree) - 1))]),
        "nodes without edges": 1 - len(torch.cat([made.src, made.dst]).unique()) / made.num_nodes,
    }  # fmt: skip


def report(made: Twin) -> str:
    """Prints, and returns, what was achieved beside what was wanted; a wanted value that is not published is marked."""
    wanted = STATISTICS[made.name].wanted(made.scale)
    lines = [f"{made.name}, scale {made.scale:g}, seed {made.seed}", f"{'':<28}{'wanted':>14}{'achieved':>14}"]
    for name, value in achieved(made).items():
        want, published = wanted.get(name, (None, True))
        lines.append(f"{name:<28}{_shown(want):>14}{_shown(value):>14}{'' if published else '  assumed'}")
    text = "\n".join(lines)
    print(text)
    return text


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
