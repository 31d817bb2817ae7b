"""`python -m tests.zoo.families [name ...]`: which Hugging Face families are captured as a whole step.

Each family is built tiny from its config, compiled with the first step's check, and takes two steps. A line per family:
its name, the rung or why the whole step was left, seconds; at the end how many are whole. With `--verify` two steps are
compared with eager PyTorch as `wholestep.verify` does it; with `--backend inductor` they are compiled.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
import warnings

import torch
from tests.zoo.families_images import IMAGES
from tests.zoo.families_signals import SIGNALS
from tests.zoo.families_text import TEXT
from tests.zoo.family import Family, build_family

import wholestep

FAMILIES: dict[str, Family] = TEXT | IMAGES | SIGNALS
STEPS = 2
WHOLE = "whole step"


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one family."""

    rung: str
    """`error` when an exception ended it."""
    reason: str
    """Why the whole step was left, or the exception, or what `verify` found; empty when all is well."""
    seconds: float

    @property
    def whole(self) -> bool:
        return self.rung == WHOLE and not self.reason


def try_family(name: str, backend: str = "interpret", verify: bool = False) -> Outcome:
    """Compile, take two steps, and where asked compare two steps with eager PyTorch."""
    began = time.perf_counter()
    try:
        rung, reason = _compiled(name, backend)
        if verify and not reason:
            rung, reason = _verified(name, backend)
    except Exception as error:  # the table names every failure and goes on
        lines = [line for line in str(error).splitlines() if line.strip()]
        rung, reason = "error", f"{type(error).__name__}: {lines[0] if lines else ''}"
    return Outcome(rung, reason, time.perf_counter() - began)


def _compiled(name: str, backend: str) -> tuple[str, str]:
    built = build_family(FAMILIES[name])
    step = wholestep.compile(
        built.model, built.loss_fn, built.make_optimizer("adamw"), built.batches[0], backend=backend, check="first",
        cache=False,
    )  # fmt: skip
    losses = [float(step(batch)) for batch in built.batches[:STEPS]]
    if not all(map(math.isfinite, losses)):
        return step.rung, f"losses {losses}"
    return step.rung, "" if step.rung == WHOLE else str(step.falls[0] if step.falls else "no reason given")


def _verified(name: str, backend: str) -> tuple[str, str]:
    built = build_family(FAMILIES[name])
    report = wholestep.verify(
        built.model, built.loss_fn, built.make_optimizer("adamw"), built.batches, steps=STEPS, backend=backend,
        eval_too=False,
    )  # fmt: skip
    return report.rung, "" if report.ok else f"differs: {report.first_departure}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.families", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help="families (default: all)")
    parser.add_argument("--backend", choices=["interpret", "inductor"], default="interpret")
    parser.add_argument("--verify", action="store_true", help="compare two steps with eager PyTorch")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in FAMILIES]
    if unknown:
        parser.error(f"no such family: {', '.join(unknown)}")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = given.names or list(FAMILIES)
    whole, began = 0, time.perf_counter()
    for name in names:
        found = try_family(name, given.backend, given.verify)
        whole += found.whole
        shown = found.rung + (f": {found.reason}" if found.reason else "")
        print(f"{name:<24} {found.seconds:>6.1f} s  {' '.join(shown.split())[:200]}", flush=True)
    print(f"whole {whole} of {len(names)} in {time.perf_counter() - began:.0f} s")
    return 0 if whole == len(names) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
