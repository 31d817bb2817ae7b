"""A profile as JSON, small and made up, for tests of the page: awkward names, one unknown row."""

from __future__ import annotations

from typing import Any

NASTY = "a<b>&\"c'"
GIB = 2**30


def row(**changed: Any) -> dict[str, Any]:
    """One row of the table."""
    made: dict[str, Any] = {
        "name": "mm", "kind": "matmul", "phase": "forward", "module": "blocks.*", "calls": 4, "ms": 2.0, "share": 0.2,
        "flops": 4e9, "bytes": 2e7, "floor_ms": 0.5, "lost_ms": 1.5, "bound": "compute", "tflops_per_second": 2.0,
        "gb_per_second": 10.0, "kernels": [],
    }  # fmt: skip
    return made | changed


def memory(**changed: Any) -> dict[str, Any]:
    """A memory profile of three phases."""
    split = {"weights": 4 * GIB, "saved activations": 3 * GIB, "temporaries": GIB}
    held = {
        "bytes": GIB, "category": "saved activations", "name": "gelu", "module": NASTY, "phase": "forward", "operator": "gelu",
        "why": "gelu_backward in blocks.0", "shape": [4, 8], "dtype": "float32",
    }  # fmt: skip
    child = {
        "name": "0",
        "names": ["0", "1"],
        "count": 2,
        "bytes": 4 * GIB,
        "own": {"weights": 2 * GIB},
        "children": [],
    }
    tree = {
        "name": "", "names": [""], "count": 1, "bytes": 8 * GIB, "own": {"temporaries": GIB},
        "children": [{**child, "name": "x", "names": ["x"], "count": 1, "bytes": 4 * GIB, "own": {}, "children": [child]},
                     {**child, "name": NASTY, "names": [NASTY], "count": 1, "bytes": 3 * GIB,
                      "own": {"saved activations": 3 * GIB}}],
    }  # fmt: skip
    made: dict[str, Any] = {
        "system": "wholestep", "device": "cpu", "peak_bytes": 8 * GIB, "peak_instant": 2, "num_instants": 5, "at_peak": split,
        "phases": [{"name": n, "start": s, "end": s + 2, "peak_bytes": 8 * GIB} for n, s in (("forward", 0), ("backward", 2))],
        "timeline": [[0, {"weights": 4 * GIB}], [2, split], [4, {"weights": 4 * GIB}]], "top": [held, held, held],
        "icicle": tree, "elsewhere_bytes": 0,
    }  # fmt: skip
    return made | changed


def action(**changed: Any) -> dict[str, Any]:
    """Something to do, with awkward words."""
    made: dict[str, Any] = {
        "about": "memory", "gain": 0.25, "title": NASTY, "why": NASTY, "exact": True, "command": f"wholestep profile {NASTY}",
        "python": f"step = {NASTY}", "predicted": {"unit": "bytes", "now": 8 * GIB, "then": 6 * GIB},
    }  # fmt: skip
    return made | changed


def profile(**changed: Any) -> dict[str, Any]:
    """A whole profile."""
    times = {
        "median": 10.0, "lowest": 9.5, "highest": 11.0, "all": [9.5, 10.0, 11.0], "data_median": 0.1, "first": 900.0,
        "compile": 2000.0,
        "warm_up_steps": 10, "settled": True, "units_per_second": 25600.0,
    }  # fmt: skip
    dots = [
        {"kind": "gradient", "name": f"w{i}", "badness": 0.01 * 2**i, "bitwise": False, "ok": i < 7} for i in range(8)
    ]
    made: dict[str, Any] = {
        "format": "wholestep profile 1", "name": NASTY, "command": ["wholestep", "profile", NASTY], "busy": None,
        "system": "wholestep", "backend": "interpret", "asked_backend": "interpret",
        "settings": {"precision": "fp32"},
        "device": {"title": "a device", "peaks": {"fp32": 1e13}, "vector_peak": 5e12, "bandwidth": 1e12, "memory_bytes": 9 * GIB,
                   "source": "made up", "measured": True},
        "unit": "tokens", "units": 256, "step_ms": times,
        "rows": [row(), row(name="gelu", kind="elementwise", ms=3.0, lost_ms=2.9, floor_ms=0.1, flops=1e6),
                 row(name="copy", kind="movement", flops=0.0, lost_ms=0.2), row(name=NASTY, module=NASTY, ms=1.0),
                 row(name="unknown", kind="unattributed", flops=None, bytes=None, floor_ms=None, lost_ms=None, ms=0.5,
                     bound="unattributed", tflops_per_second=None, gb_per_second=None)],
        "phases": {"forward": 6.0, "backward": 3.0, "update": 0.5, "between calls": 0.5},
        "modules": {"": {"update": 0.5}, "blocks.0": {"forward": 3.0}, "blocks.1": {"forward": 3.0, "backward": 3.0}},
        "waterfall": [["arithmetic at the peak", 1.0], ["memory at full bandwidth", 0.5], ["lost in matmul", 7.0],
                      ["lost in movement", 1.0], ["between calls (host)", 0.5]],
        "floor_ms": 1.5, "unattributed": 0.05, "shares": {"gpu_busy": None, "data_wait": 0.01, "between_calls": 0.05},
        "utilisation": {"mfu": 0.4, "hfu": 0.41, "model_flops": 1.0, "executed_flops": 1.0, "seconds": 0.01, "peak": 1e13,
                        "format": "fp32", "lines": ["MFU 40 %", "HFU 41 %"]},
        "memory": memory(), "eager_memory": memory(system="eager", peak_bytes=9 * GIB),
        "predicted_memory": None, "budget_bytes": None, "copies": None,
        "predictions": [{"name": "memory peak", "predicted": 97, "measured": 100, "unit": "bytes"}],
        "verified": {"ok": False, "bitwise": False, "rung": "whole step", "departure": NASTY, "rows": dots},
        "actions": [action(), action(about="time", predicted=None, gain=0.2, command=None, exact=False)],
        "environment": {"torch": "2", "made": "today"}, "notes": [NASTY],
    }  # fmt: skip
    return made | changed
