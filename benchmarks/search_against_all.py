"""How good is a search? All points of a recipe are measured, then the search is run on those very measurements.

    python benchmarks/search_against_all.py benchmarks/search_gpt_1m.toml --measure 6 --clock cpu
    python benchmarks/search_against_all.py benchmarks/search_gpt2_medium.toml --measure 5
    python benchmarks/search_against_all.py benchmarks/search_gpt2_medium.toml --measure 5 --device h200 \\
        --rows benchmarks/results/search_h200.json --doubt 4:0.25,32:0.5,32:1
    python benchmarks/search_against_all.py benchmarks/search_gpt_1m.toml --rows benchmarks/results/search_cpu.json

The last two run the search on rows that were measured before, on any machine. `--doubt` names points that were slow because
something else ran beside them: the search is run with every mixture of them taken to be 0, 5 and 10 % quicker, and the worst
is told.

Measurements are kept beside the recipe (`*.all.json`), so that a run that was cut short goes on. Printed is what the search found
after every point, as a share of the best of all; exit code 1 when it ends below --share.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src")]

from wholestep.bench.turns import side_by_side  # noqa: E402
from wholestep.cost.target import find_target  # noqa: E402
from wholestep.search.measure import measure_in_child  # noqa: E402
from wholestep.search.predict import Prediction, Predictor  # noqa: E402
from wholestep.search.record import Record, Row, made_with  # noqa: E402
from wholestep.search.search import Found, Outcome, run_search  # noqa: E402
from wholestep.search.space import Point, Space, read_space  # noqa: E402
from wholestep.search.text import lines_of  # noqa: E402

QUICKER = (1.0, 0.95, 0.9)


class Bench:
    """A recipe's points, as predicted for one device, with the rows that are known."""

    def __init__(self, given: argparse.Namespace) -> None:
        target = find_target(given.device)
        self.given, self.space = given, read_space(given.recipe)
        predictor = Predictor(target)
        self.known: dict[str, Prediction] = {point.key: predictor.of(point) for point in self.space.points}
        self.calibrated, self.here = target.times == "calibrated", made_with(target.device, given.clock)

    def measured(self) -> dict[str, Row]:
        """Rows of all points, measured where they are not yet."""
        given = self.given
        record, lock = Record(given.recipe.with_suffix(".all.json"), self.here), threading.Lock()

        def measure_one(point: Point) -> None:
            row = measure_in_child(point, given.limit, clock=given.clock)
            with lock:
                record.add(point.key, self.known[point.key].program, {"point": dict(point.values), **row})
                print(f"{point.name}: {row['status']}", flush=True)

        if given.jobs > 1:
            fits = [point for point in self.space.points if self.known[point.key].fits]
            side_by_side(
                measure_one, [p for p in fits if not record.find(p.key, self.known[p.key].program)], given.jobs
            )
        whole = run_search(
            self.space, lambda point: self.known[point.key], lambda point: measure_in_child(point, given.limit, clock=given.clock),
            record, most=len(self.space.points), calibrated=self.calibrated, tell=lambda text: print(text, flush=True),
        )  # fmt: skip
        print("\n".join(lines_of(whole)), end="\n\n")
        return {one.point.key: one.row for one in whole.found if one.row is not None}

    def shares(self, rows: Mapping[str, Row]) -> list[float]:
        """What the search has after 1, 2, ... points, as a share of the best of all."""
        rates = {key: self.known[key].units / row["seconds"] for key, row in rows.items() if row["status"] == "ok"}
        found: list[float] = []

        def done(outcome: Outcome) -> None:
            best: Found | None = outcome.best
            found.append(0.0 if best is None or best.rate is None else best.rate / max(rates.values()))

        with tempfile.TemporaryDirectory() as folder:
            run_search(
                self.space, lambda point: self.known[point.key], lambda point: dict(rows[point.key]),
                Record(Path(folder) / "a.json", self.here), most=self.given.measure, calibrated=self.calibrated, done=done,
            )  # fmt: skip
        return found


def rows_of(path: Path, space: Space, recipe: str) -> dict[str, Row]:
    """The rows of a file of results, for the points of this recipe: a point is its values, or its name."""
    rows = [row for row in json.loads(path.read_text("utf-8"))["rows"] if row.get("recipe", recipe) == recipe]
    named = {json.dumps(row["point"]): {"status": "ok", **row} for row in rows}
    found = {p.key: named.get(json.dumps(dict(p.values)), named.get(json.dumps(p.name))) for p in space.points}
    missing = [point.name for point in space.points if found[point.key] is None]
    if missing:
        sys.exit(f"{path}: {len(missing)} of {len(found)} points have no row, the first is {missing[0]!r}")
    return {key: row for key, row in found.items() if row is not None}


def doubted(rows: dict[str, Row], names: str) -> list[dict[str, Row]]:
    """The rows with every mixture of quicker times for the points of these names (values, in the order of the axes)."""
    wanted = [name for name in names.split(",") if name]
    keys = {":".join(str(value) for value in row["point"].values()): key for key, row in rows.items()}
    mixtures = itertools.product(QUICKER, repeat=len(wanted))
    return [
        rows | {keys[n]: rows[keys[n]] | {"seconds": f * rows[keys[n]]["seconds"]} for n, f in zip(wanted, mixture)}
        for mixture in mixtures
    ]


def told(shares: list[float]) -> str:
    return ", ".join(f"{share:.3f}" for share in shares)


def main() -> int:
    parser: Any = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--measure", type=int, default=6)
    parser.add_argument("--share", type=float, default=0.9)
    parser.add_argument("--clock", default="wall")
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--jobs", type=int, default=1, help="points that compile at once; they are timed in turns")
    parser.add_argument("--device", default="this", help="what is predicted for")
    parser.add_argument("--rows", type=Path, help="measured before: nothing is run")
    parser.add_argument("--doubt", default="", help="points of these rows that something else made slow: 4:0.25,32:1")
    given = parser.parse_args()
    bench = Bench(given)
    rows = rows_of(given.rows, bench.space, given.recipe.name) if given.rows else bench.measured()
    if not any(row["status"] == "ok" for row in rows.values()):
        print("nothing could be measured")
        return 1
    shares = bench.shares(rows)
    print(f"best of all after 1, 2, ... points: {told(shares)}")
    if given.doubt:
        every = [bench.shares(mixture) for mixture in doubted(rows, given.doubt)]
        shares = [min(column) for column in zip(*every, strict=True)]
        print(f"at worst, over {len(every)} mixtures of the doubted points: {told(shares)}")
    return 0 if shares and shares[-1] >= given.share else 1


if __name__ == "__main__":
    sys.exit(main())
