"""`python -m tests.trust [name or class ...]`: every case against eager, a line each, and totals by class and verdict."""

from __future__ import annotations

import argparse
import collections
import os
import tempfile

import torch
from tests.trust.battery import CASES, chosen
from tests.trust.run import judge

VERDICTS = ("whole", "loud", "refused", "WRONG", "error", "broken")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.trust", description=__doc__)
    parser.add_argument("names", nargs="*", help="cases or classes; all of them by default")
    parser.add_argument("--backend", choices=("interpret", "inductor"), default="interpret")
    parser.add_argument("--check", choices=("off", "first"), default="off")
    parser.add_argument("--cache", action="store_true", help="with a disk cache, empty at first")
    parser.add_argument("--self", dest="alone", action="store_true", help="eager against eager: all must be whole")
    parser.add_argument("--list", action="store_true", help="the names and classes only")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    cases = chosen(asked.names)
    if asked.list:
        print("\n".join(f"{case.name:<40} {case.kind}" for case in cases))
        return
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    seconds = 0.0
    with tempfile.TemporaryDirectory() as folder:
        if asked.cache:
            os.environ["WHOLESTEP_CACHE_DIR"] = folder
        for case in cases:
            found = judge(case, backend=asked.backend, check=asked.check, cache=asked.cache, alone=asked.alone)
            table[case.kind][found.verdict] += 1
            seconds += found.seconds
            print(f"{found.verdict:<8}{case.name:<40}{found.seconds:6.2f} s  {found.detail[:160]}", flush=True)
    print(f"\n{'class':<28}{'cases':>6}" + "".join(f"{verdict:>9}" for verdict in VERDICTS))
    table["all"] = sum(table.values(), collections.Counter())
    for kind, counts in table.items():
        print(f"{kind:<28}{counts.total():>6}" + "".join(f"{counts[verdict]:>9}" for verdict in VERDICTS))
    print(f"{len(cases)} of {len(CASES)} cases, {seconds:.0f} s")


if __name__ == "__main__":
    main()
