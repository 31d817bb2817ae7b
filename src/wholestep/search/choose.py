"""Which point to measure next: predictions, corrected by what was measured so far.

A prediction is off by a factor. What is known about log(measured / predicted) is a Gaussian process over the points:

    covariance(p, q) = EVERYWHERE^2 + sum over axes of (NUMBERS^2 ALIKE^|steps apart| or KINDS^2 [same value]) + APART^2 [p is q]

so a device that is three times as slow as thought is learnt from one point, and a value (bf16 on this CPU, a kernel) that is
slower than thought from one point that has it; neighbours on an axis of numbers are off by about as much. The next
point is the one with the largest expected improvement over the best so far: where the corrected prediction is high, or still
unsure. The first is the best prediction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

EVERYWHERE = 10.0
"""Of all predictions together: any factor, so that the first point settles it. On a busy CPU they were off by eight."""
NUMBERS = 0.2
"""Of a value on an axis of numbers: batches, ratios."""
KINDS = {True: 0.3, False: 2.0}
"""Of a value on another axis, by whether predictions for the device were ever compared with measured times. Where not, every
kind is tried soon: bf16 was to be seven times as fast as fp32 on a busy CPU, by its products alone, and was not."""
ALIKE = 0.9
"""How much of that a value shares with the next one, on an axis of numbers: errors grow along it rather than jump."""
APART = 0.03
"""Of one point by itself, the noise of measuring included."""


class Corrected:
    """Log rates of all points, as predicted and as learnt from the measured ones."""

    def __init__(
        self, predicted: Mapping[int, float], measured: Mapping[int, float], places: Sequence[Sequence[int]],
        numeric: Sequence[bool], *, calibrated: bool = False,
    ) -> None:  # fmt: skip
        """Rates by number of the point; `places`: its value's number on every axis; `numeric`: which axes are of numbers."""
        self.measured = {index: math.log(rate) for index, rate in measured.items() if index in predicted}
        self.points = list(predicted)
        at = np.array([places[index] for index in self.points], dtype=float).reshape(len(self.points), -1)
        apart = np.abs(at[:, None, :] - at[None, :, :])
        along = np.where(numeric, NUMBERS**2 * ALIKE**apart, KINDS[calibrated] ** 2 * (apart == 0))
        shared = EVERYWHERE**2 + along.sum(axis=2)
        rates = np.log([predicted[index] for index in self.points])
        rows = [row for row, index in enumerate(self.points) if index in self.measured]
        known = np.array([self.measured[self.points[row]] for row in rows])
        within = shared[np.ix_(rows, rows)] + APART**2 * np.eye(len(rows))
        weights = np.linalg.solve(within, shared[rows]) if rows else np.zeros((0, len(self.points)))
        self.mean = rates + weights.T @ (known - rates[rows])
        variance = np.diag(shared) + APART**2 - np.einsum("ij,ij->j", shared[rows], weights)
        self.deviation = np.sqrt(np.maximum(variance, 1e-12))

    def rate(self, index: int) -> float:
        """What to expect of a point."""
        return float(math.exp(self.mean[self.points.index(index)]))

    def next(self, allowed: Sequence[int]) -> int | None:
        """The point worth measuring most; None where there is none."""
        rows = [row for row, index in enumerate(self.points) if index in allowed and index not in self.measured]
        if not rows:
            return None
        if not self.measured:
            return self.points[max(rows, key=lambda row: float(self.mean[row]))]
        best = max(self.measured.values())
        return self.points[max(rows, key=lambda row: self._improvement(row, best))]

    def _improvement(self, row: int, best: float) -> float:
        """Expected, over the best measured log rate."""
        spread = float(self.deviation[row])
        z = (float(self.mean[row]) - best) / spread
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return spread * (z * math.erfc(-z / math.sqrt(2)) / 2 + density)
