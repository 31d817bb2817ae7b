"""How good is a search? All points of a recipe are measured, then the search is run on those very measurements.

    python benchmarks/search_against_all.py benchmarks/search_gpt_1m.toml --measure 6 --clock cpu
    python benchmarks/search_against_all.py benchmarks/search_gpt2_medium.toml --measure 5

Measurements are kept beside the recipe (`*.all.json`), so that a run that was cut short goes on. Printed is what the search found
after every point, as a share of the best of all; exit code 1 when it ends below --share.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--measure", type=int, default=6)
    parser.add_argument("--share", type=float, default=0.9)
    parser.add_argument("--clock", default="wall")
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--jobs", type=int, default=1, help="points that compile at once; they are timed in turns")
    given = parser.parse_args()

    from wholestep.bench.turns import side_by_side
    from wholestep.cost.target import find_target
    from wholestep.search.measure import measure_in_child
    from wholestep.search.predict import Predictor
    from wholestep.search.record import Record, made_with
    from wholestep.search.search import Found, Outcome, run_search
    from wholestep.search.space import Point, read_space
    from wholestep.search.text import lines_of

    target, space = find_target("this"), read_space(given.recipe)
    predictor = Predictor(target)
    known = {point.key: predictor.of(point) for point in space.points}
    calibrated = target.times == "calibrated"
    here = made_with(target.device, given.clock)
    record, lock = Record(given.recipe.with_suffix(".all.json"), here), threading.Lock()

    def measure_one(point: Point) -> None:
        row = measure_in_child(point, given.limit, clock=given.clock)
        with lock:
            record.add(point.key, known[point.key].program, {"point": dict(point.values), **row})
            print(f"{point.name}: {row['status']}", flush=True)

    if given.jobs > 1:
        fits = [point for point in space.points if known[point.key].fits]
        side_by_side(measure_one, [p for p in fits if not record.find(p.key, known[p.key].program)], given.jobs)
    whole = run_search(
        space, lambda point: known[point.key], lambda point: measure_in_child(point, given.limit, clock=given.clock),
        record, most=len(space.points), calibrated=calibrated,
        tell=lambda text: print(text, flush=True),
    )  # fmt: skip
    print("\n".join(lines_of(whole)), end="\n\n")
    rows = {one.point.key: one.row for one in whole.found if one.row is not None}
    best = whole.best
    if best is None or best.rate is None:
        print("nothing could be measured")
        return 1
    shares: list[float] = []

    def done(outcome: Outcome) -> None:
        found: Found | None = outcome.best
        shares.append(0.0 if found is None or found.rate is None or best.rate is None else found.rate / best.rate)

    with tempfile.TemporaryDirectory() as folder:
        run_search(
            space, lambda point: known[point.key], lambda point: dict(rows[point.key]), Record(Path(folder) / "a.json", here),
            most=given.measure, calibrated=calibrated, tell=lambda text: print(text, flush=True), done=done,
        )  # fmt: skip
    print(f"best of all after 1, 2, ... points: {', '.join(f'{share:.3f}' for share in shares)}")
    return 0 if shares and shares[-1] >= given.share else 1


if __name__ == "__main__":
    sys.exit(main())
