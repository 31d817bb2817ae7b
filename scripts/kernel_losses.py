"""Prints the kernels of a profiled step, slowest first: where `wholestep profile` says milliseconds go, kernel by kernel.

In: the JSON file of `wholestep profile` on a GPU. Out: one line per region and kernel with its class, launches and
milliseconds per step, then sums per class and what the listing misses. A region keeps its eight slowest kernels, so the rest
of a region is a line of its own. Least times of single kernels are not here: a profile knows them of regions only
(docs/kernels-to-write.md works them out from shapes).

    python scripts/kernel_losses.py benchmarks/results/profile_llama-1b.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

CLASSES = {
    "attention": ("sdpa", "flash", "fmha"),
    "gemm": ("nvjet", "gemm", "cutlass", "cublas"),
    "triton": ("triton_",),
}
"""Class -> parts of kernel names, tried in this order; kernels of an optimizer's row are `optimizer` whatever their name."""
WIDTH = 88


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of one region, all its launches of a step."""

    name: str
    region: str
    kind: str
    launches: int
    ms: float


def kind_of(name: str, row_kind: str) -> str:
    if row_kind == "optimizer":
        return "optimizer"
    return next((kind for kind, parts in CLASSES.items() if any(part in name for part in parts)), "other")


def kernels_of(profile: dict[str, Any]) -> list[Kernel]:
    """Every kernel that is listed, slowest first."""
    found = [
        Kernel(name, row["name"], kind_of(name, row["kind"]), launches, ms)
        for row in profile["rows"]
        for name, launches, ms in row["kernels"]
    ]
    return sorted(found, key=lambda kernel: -kernel.ms)


def print_kernels(profile: dict[str, Any], count: int) -> None:
    kernels = kernels_of(profile)
    print(f"{profile['name']} on {profile['device']['title']}: {profile['step_ms']['median']:.1f} ms per step")
    print(f"{'ms':>8} {'launches':>8}  {'class':<9}  region: kernel")
    for kernel in kernels[:count]:
        text = f"{kernel.region[:60]}: {kernel.name}"
        print(f"{kernel.ms:8.3f} {kernel.launches:8}  {kernel.kind:<9}  {text[:WIDTH]}")


def print_sums(profile: dict[str, Any]) -> None:
    kernels = kernels_of(profile)
    print("\nper class")
    for kind in sorted({kernel.kind for kernel in kernels}):
        print(f"{sum(kernel.ms for kernel in kernels if kernel.kind == kind):8.3f}  {kind}")
    print("\nper region: ms, least, lost, not among its eight slowest kernels")
    for row in profile["rows"]:
        if row["floor_ms"] is None:
            continue
        missing = max(0.0, row["ms"] - sum(ms for _, _, ms in row["kernels"]))
        print(f"{row['ms']:8.3f} {row['floor_ms']:8.3f} {row['lost_ms']:8.3f} {missing:8.3f}  {row['name'][:60]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profile", type=Path, help="the JSON file of wholestep profile")
    parser.add_argument("--count", type=int, default=25, help="kernels to print")
    options = parser.parse_args()
    profile = json.loads(options.profile.read_text("utf-8"))
    print_kernels(profile, options.count)
    print_sums(profile)


if __name__ == "__main__":
    main()
