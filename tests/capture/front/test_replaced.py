"""Functions that Dynamo does not trace, and those of ours that stand in for them."""

from __future__ import annotations

import bisect
import itertools

from wholestep.capture.front.replaced import SKIPPED


def test_bisection_finds_the_same_place() -> None:
    """In lists that are not sorted, too."""
    lists = [list(rows) for n in range(5) for rows in itertools.product(range(3), repeat=n)]
    for function in (bisect.bisect_right, bisect.bisect_left):
        ours = SKIPPED[function]
        assert all(ours(rows, x) == function(rows, x) for rows in lists for x in (-1, 0, 0.5, 1, 2, 3))
        assert ours([1, 2, 2, 3], 2, 1, 3) == function([1, 2, 2, 3], 2, 1, 3)
