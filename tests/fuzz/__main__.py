"""`python -m tests.fuzz`: random training steps through every stage; what is wrong is shortened and printed as a test.

python -m tests.fuzz --count 10000            # what `make fuzz` runs
python -m tests.fuzz --seed 4711 --count 1    # one of them again
python -m tests.fuzz --minutes 5 --passes fold_views,share_equal --backend inductor
"""

from __future__ import annotations

import argparse
import collections
import os
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

from tests.fuzz.check import STAGES
from tests.fuzz.run import Asked, results


def main() -> int:
    asked = _arguments()
    with tempfile.TemporaryDirectory(prefix="wholestep-fuzz-") as folder:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(folder, "inductor"))
        os.environ.setdefault("WHOLESTEP_CACHE_DIR", os.path.join(folder, "wholestep"))
        return _run(asked)


def _run(asked: Asked) -> int:
    began = time.monotonic()
    refusals: collections.Counter[str] = collections.Counter()
    done = lines = wrong = 0
    for found in results(asked):
        done += 1
        lines += found.lines
        if found.refused is not None:
            refusals[found.refused] += 1
        if found.stage is not None:
            wrong += 1
            print(f"\nseed {found.seed} is WRONG at {found.stage}: {found.what}\n\n{found.test}", flush=True)
        if done % 250 == 0:
            print(f"{done} graphs, {wrong} wrong, {time.monotonic() - began:.0f} s", flush=True)
    seconds = time.monotonic() - began
    print(
        f"\n{done} graphs of {lines / max(done, 1):.1f} lines, {wrong} wrong, {refusals.total()} not captured, {seconds:.0f} s"
    )
    for reason, count in refusals.most_common(8):
        print(f"  {count:5} not captured: {reason[:150]}")
    return 1 if wrong else 0


def _arguments() -> Asked:
    layout = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__, formatter_class=layout)
    parser.add_argument("--count", type=int, default=1000, help="graphs, one per seed")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--passes", type=lambda text: text.split(","), help=f"only these stages: {', '.join(STAGES)}")
    parser.add_argument(
        "--backend", choices=("interpret", "inductor"), help="compile no graph, or all; by default some"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--shrink", type=float, default=60.0, metavar="SECONDS", help="for each that is wrong; 0: print it whole"
    )
    asked = parser.parse_args()
    for name in asked.passes or ():
        if name not in STAGES:
            parser.error(f"no stage {name!r}; there are {', '.join(STAGES)}")
    return Asked(
        asked.seed, asked.count, asked.minutes, tuple(asked.passes or ()), asked.backend, asked.workers, asked.shrink
    )


if __name__ == "__main__":
    raise SystemExit(main())
