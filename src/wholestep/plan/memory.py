"""The memory planner: which saved values to keep, which to recompute and which to move, least time for a number of bytes.

In: a Problem and a target in bytes. Out: the keys of the values to recompute, and what leaves the card. One binary variable per
value (kept), two per operation (recomputed near, recomputed far); equal layers share them, so a model of any depth has a few
hundred. Solved exactly by HiGHS.

    keep(v) + again(maker(v)) >= 1                   for every value v the backward pass reads
    keep(s) + again(maker(s)) >= again(w)            for every operand s of an operation w
    rest + sum keep bytes + sum again bytes <= target    in every stretch of the backward pass
    minimise  sum again seconds + sum keep seconds to write and read

Where there is room outside of the card (`moves.py`), a share of the layers of a value that is kept may wait there, one binary
variable per share, and optimizer state may lie there:

    keep(v) >= away(v, first share) >= away(v, second share) ...
    rest + sum keep bytes + sum again bytes - sum away bytes freed <= target
    sum away bytes <= room on the host
    sum away bytes / link <= seconds of the span + sum wait(window)    in every span of windows, each way
    minimise  ... + sum wait(window)

A value may be recomputed from one that comes back: whatever is kept, here or there, may be read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from wholestep.plan.moves import STATE_IN_FLIGHT, Moves, Span
from wholestep.plan.problem import Problem

if TYPE_CHECKING:
    from scipy.optimize import LinearConstraint

SECONDS_PER_SOLVE = 4.0
AGAIN_AT_ONCE = 0.5
"""Share of what is recomputed in a layer that is in memory at the same time."""
SMALL_SHARE = 2e-5
"""Values that the backward pass reads and that are smaller than this share of the memory, all layers together, are kept."""


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What the solver chose."""

    again: tuple[str, ...]
    """Values that are not kept."""
    seconds: float
    """What that takes beyond keeping all; less than nothing where computing is quicker than storing."""
    bytes: float
    """The largest sum over all stretches, as the problem counts them."""
    away: tuple[int, ...] = ()
    """Numbers of the moves that are made."""

    @property
    def choice(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return self.again, self.away


class MemoryPlanner:
    """One problem, asked for many targets."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.values, self.units = list(problem.values.values()), list(problem.units.values())
        self.keep = {value.key: index for index, value in enumerate(self.values)}
        count = len(self.values)
        self.near = {unit.key: count + index for index, unit in enumerate(self.units)}
        self.far = {unit.key: count + len(self.units) + index for index, unit in enumerate(self.units)}
        self.target = count + 2 * len(self.units)
        """The last variable: bytes, in units of `scale`."""
        everything = max(problem.rest, default=0) + sum(value.bytes for value in self.values)
        self.scale = max(1.0, everything / 1000)  # solvers want numbers of a sane size, in models of any size
        self.again_bytes = {unit.key: 0.0 for unit in self.units}
        """What an operation adds to a stretch in which it is recomputed."""
        for value in self.values:
            if value.stored and value.count:
                self.again_bytes[value.unit] += AGAIN_AT_ONCE * value.bytes / value.count
        self.moves = [] if problem.moves is None else list(problem.moves.moves)
        self.in_flight = frozenset(() if problem.moves is None else problem.moves.in_flight)
        self.away = range(self.target + 1, self.target + 1 + len(self.moves))
        """Variables: whether a move is made; then whether any state is moved; then the seconds waited in every window."""
        self.any_state = self.away.stop
        windows = len(problem.moves.windows) if problem.moves is not None and self.moves else 0
        self.waits = range(self.any_state + 1, self.any_state + 1 + windows)
        self.size = self.waits.stop if self.moves else self.target + 1
        self.whole = sum(unit.seconds for unit in self.units) or 1.0
        self._rows: list[tuple[list[int], list[float], float]] = []
        self._needs()
        self._memory()
        self._links()

    def least(self) -> Decision:
        """The plan that takes the fewest bytes, whatever the time."""
        found = self._solve(cost_of_bytes=1.0, most=np.inf)
        assert found is not None, "keeping everything is always possible"
        return found

    def fastest(self) -> Decision:
        """The plan that takes the least time, whatever the bytes."""
        found = self.within(np.inf)
        assert found is not None, "keeping everything is always possible"
        return found

    def within(self, target_bytes: float) -> Decision | None:
        """The fastest plan for a number of bytes; None when there is none."""
        return self._solve(cost_of_bytes=1e-9, most=target_bytes / self.scale)

    def least_in(self, seconds: float) -> Decision | None:
        """The plan that takes the fewest bytes of those that take so many seconds beyond keeping all; None when there is none."""
        return self._solve(cost_of_bytes=1.0, most=np.inf, most_seconds=seconds)

    # ---- rows: sum of coefficient * variable >= bound ----

    def _row(self, terms: list[tuple[int, float]], bound: float) -> None:
        self._rows.append(([i for i, _ in terms], [c for _, c in terms], bound))

    def _needs(self) -> None:
        values = self.problem.values
        for value in self.values:
            keep = (self.keep[value.key], 1.0)
            if value.near:
                self._row([keep, (self.near[value.unit], 1.0)], 1.0)
            if value.far:
                self._row([keep, (self.far[value.unit], 1.0)], 1.0)
        for unit in self.units:
            near, far = (self.near[unit.key], -1.0), (self.far[unit.key], -1.0)
            for key in unit.near_reads:
                self._row([(self.keep[key], 1.0), (self.near[values[key].unit], 1.0), near], 0.0)
                self._row([(self.keep[key], 1.0), (self.far[values[key].unit], 1.0), far], 0.0)
            for key in unit.free_reads:
                for again in (near, far):
                    self._row([(self.keep[key], 1.0), (self.far[values[key].unit], 1.0), again], 0.0)
            for key in unit.far_reads:
                self._row([(self.keep[key], 1.0), (self.far[values[key].unit], 1.0), near], 0.0)
                self._row([(self.keep[key], 1.0), far], 0.0)

    def _memory(self) -> None:
        again = self.again_bytes
        for stretch, rest in enumerate(self.problem.rest):
            terms = [(self.target, 1.0)]
            terms += [(self.keep[v.key], -v.alive[stretch] / self.scale) for v in self.values if v.alive.get(stretch)]
            terms += [
                (self.near[u.key], -again[u.key] / self.scale)
                for u in self.units
                if stretch in u.stretches and again[u.key]
            ]
            terms += [(i, m.freed[stretch] / self.scale) for i, m in zip(self.away, self.moves) if m.freed.get(stretch)]
            if self.moves and stretch in self.in_flight:
                terms.append((self.any_state, -STATE_IN_FLIGHT / self.scale))
            self._row(terms, rest / self.scale)

    def _links(self) -> None:
        """What may leave, and what the link moves in time."""
        moves = self.problem.moves
        if moves is None or not self.moves:
            return
        for index, move in zip(self.away, self.moves):
            before = self.any_state if move.value is None else self.keep[move.value]
            before = before if move.after is None else self.away[move.after]
            self._row([(before, 1.0), (index, -1.0)], 0.0)
        if not moves.room.files:
            held = [(i, -m.host_bytes / self.scale) for i, m in zip(self.away, self.moves)]
            self._row(held, -moves.room.host_bytes / self.scale)
        for span in moves.spans():
            seconds = sum(moves.windows[n] for n in span.time)
            waits = [(self.waits[n], 1.0) for n in span.moved] + self._recomputed(moves, span)
            leaving, coming = list(waits), list(waits)
            for index, move in zip(self.away, self.moves):
                if span.counts not in ("both", "state" if move.value is None else "values"):
                    continue
                out, back = (sum(way.get(n, 0) for n in span.moved) for way in (move.out, move.back))
                if out:
                    shared = moves.seconds_shared if move.value is None else 0.0
                    leaving.append((index, -out * (moves.seconds_out + shared) / self.whole))
                    back += out * shared / moves.seconds_in  # type: ignore[assignment]
                if back:
                    coming.append((index, -back * moves.seconds_in / self.whole))
            for terms in (leaving, coming):
                if len(terms) > len(waits):
                    self._row(terms, -seconds / self.whole)

    def _recomputed(self, moves: Moves, span: Span) -> list[tuple[int, float]]:
        """Seconds that what is recomputed adds to a span."""
        inside = {stretch for stretch, window in moves.window_of.items() if window in span.time}
        shares = [
            (u, len(inside & u.stretches) / (len(u.stretches) or 1)) for u in self.units if u.allowed and u.seconds
        ]
        return [(self.near[u.key], u.seconds * share / self.whole) for u, share in shares if share]

    def _solve(self, cost_of_bytes: float, most: float, most_seconds: float = np.inf) -> Decision | None:
        size, whole = self.size, self.whole
        cost = np.zeros(size)
        for value in self.values:
            # of two equal plans the one that keeps less
            cost[self.keep[value.key]] = value.holding / whole + 1e-7 * value.bytes / self.scale
        for unit in self.units:  # as shares of the forward pass, again for the solver's sake
            cost[self.near[unit.key]] = cost[self.far[unit.key]] = unit.seconds / whole + 1e-6
        cost[self.target] = cost_of_bytes
        for index, move in zip(self.away, self.moves):  # of two equal plans the one that moves less
            cost[index] = 1e-6 + 1e-7 * move.host_bytes / self.scale
        lower, upper = np.zeros(size), np.ones(size)
        for value in self.values:
            if (value.near or value.far) and value.bytes < SMALL_SHARE * self.scale * 1000:
                lower[self.keep[value.key]] = 1
        upper[self.target] = most
        for unit in self.units:
            if not unit.allowed:
                upper[self.near[unit.key]] = upper[self.far[unit.key]] = 0
        integral = np.ones(size)
        integral[self.target] = 0
        if self.moves:
            integral[self.waits.start : self.waits.stop] = 0
            upper[self.waits.start : self.waits.stop] = np.inf
            cost[self.waits.start : self.waits.stop] = 1.0
        from scipy.optimize import Bounds, milp  # half a second that a step without a budget does not wait for

        with _solver_is_silent():
            found = milp(
                cost, integrality=integral, bounds=Bounds(lower, upper), constraints=self._constraints(size, most_seconds),
                options={"time_limit": SECONDS_PER_SOLVE, "mip_rel_gap": 1e-3},
            )  # fmt: skip
        return None if found.x is None else self._decision(found.x)

    def _constraints(self, size: int, most_seconds: float) -> LinearConstraint:
        from scipy.optimize import LinearConstraint
        from scipy.sparse import coo_array

        told = [*self._rows, self._takes(most_seconds)] if most_seconds < np.inf else self._rows
        rows = np.repeat(np.arange(len(told)), [len(columns) for columns, _, _ in told])
        columns = np.concatenate([np.asarray(columns) for columns, _, _ in told])
        numbers = np.concatenate([np.asarray(numbers) for _, numbers, _ in told])
        matrix = coo_array((numbers, (rows, columns)), shape=(len(told), size)).tocsr()
        return LinearConstraint(matrix, lb=np.asarray([bound for _, _, bound in told]))

    def _takes(self, most_seconds: float) -> tuple[list[int], list[float], float]:
        """At most so many seconds beyond keeping all: a row."""
        terms = [(self.keep[value.key], value.holding) for value in self.values if value.holding]
        terms += [(again[unit.key], unit.seconds) for unit in self.units for again in (self.near, self.far)]
        terms += [(wait, self.whole) for wait in (self.waits if self.moves else ())]
        most = most_seconds + sum(value.holding for value in self.values)
        return [i for i, _ in terms], [-seconds / self.whole for _, seconds in terms], -most / self.whole

    def _decision(self, x: np.ndarray) -> Decision:
        chosen = x > 0.5
        again = [
            v.key for v in self.values
            if not chosen[self.keep[v.key]] and (chosen[self.near[v.unit]] or chosen[self.far[v.unit]])
        ]  # fmt: skip
        seconds = sum(u.seconds * (int(chosen[self.near[u.key]]) + int(chosen[self.far[u.key]])) for u in self.units)
        kept = [v for v in self.values if chosen[self.keep[v.key]]]
        seconds -= sum(v.holding for v in self.values) - sum(v.holding for v in kept)
        twice = [u for u in self.units if chosen[self.near[u.key]]]
        sums = [
            rest
            + sum(v.alive.get(i, 0) for v in kept)
            + sum(self.again_bytes[u.key] for u in twice if i in u.stretches)
            for i, rest in enumerate(self.problem.rest)
        ]
        away = tuple(number for number, index in enumerate(self.away) if chosen[index])
        if self.moves:
            seconds += self.whole * float(sum(x[self.waits.start : self.waits.stop]))
            in_flight = STATE_IN_FLIGHT if any(self.moves[n].value is None for n in away) else 0
            sums = [
                s + (in_flight if i in self.in_flight else 0) - sum(self.moves[n].freed.get(i, 0) for n in away)
                for i, s in enumerate(sums)
            ]
        return Decision(tuple(sorted(again)), seconds, max(sums, default=0.0), away)


@contextlib.contextmanager
def _solver_is_silent() -> Iterator[None]:
    """HiGHS now and then writes a line of its own to the standard output, below Python: it would break a program's `--json`."""
    sys.stdout.flush()
    kept, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nothing)
