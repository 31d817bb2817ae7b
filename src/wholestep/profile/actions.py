"""From the numbers of a Profile to what to do about them: each action names the number it follows from.

An action is a dict with `about` (memory, time, data, equality, prediction), `text`, `gain`, the share of the step or of the
peak that it could give back at most, and `exact`, whether the training stays the same.
Nothing is suggested that the data do not show.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from wholestep.graph.bytes import show_bytes
from wholestep.graph.layers import layer_pattern
from wholestep.lower.footprint.blocks import SAVED, MemoryProfile
from wholestep.profile.memory.oom import ranked_fixes

if TYPE_CHECKING:
    from wholestep.profile.profile import Profile

WORTH = 0.03
"""Of the step or the peak: less is not worth a line."""
PREDICTION_BAND = 0.05
Action = dict[str, Any]


def actions_of(profile: Profile) -> list[Action]:
    """Equality before everything; then most to be won first, what changes the training last."""
    found = [*_memory(profile.memory), *_time(profile), *_gaps(profile), *_data(profile), *_prediction(profile)]
    ranked = sorted(found, key=lambda action: (not action["exact"], -action["gain"]))
    return _equality(profile) + [action for action in ranked if action["gain"] >= WORTH]


def _action(about: str, gain: float, text: str, *, exact: bool = True) -> Action:
    return {"about": about, "gain": gain, "text": text, "exact": exact}


def _equality(profile: Profile) -> list[Action]:
    if profile.verified is None or profile.verified["ok"]:
        return []
    return [
        _action(
            "equality",
            1.0,
            f"the step differs from eager PyTorch: {profile.verified['departure']}; see wholestep verify",
        )
    ]


def _memory(memory: MemoryProfile | None) -> list[Action]:
    if memory is None or memory.step_peak_bytes <= 0:
        return []
    found = []
    whole = memory.step_peak_bytes  # shares of what is the step's: other models and caches of the process are not
    saved = memory.at_peak.get(SAVED, 0) / whole
    group = _largest_cheap(memory)
    for fix in ranked_fixes(memory)[:3]:
        won = memory.peak_bytes - fix.peak_bytes
        because = ""
        if fix.name.startswith("recompute") and group is not None:
            because = f"saved activations are {saved:.0%} of the step's memory, of those cheap to make again most are {group}: "
        text = f"{because}{fix.name} would lower the peak from {show_bytes(memory.peak_bytes)} to {show_bytes(fix.peak_bytes)} "
        text += f"(-{show_bytes(won)}); {fix.how}"
        found.append(_action("memory", won / whole, text, exact=fix.exact))
    spare = memory.fragmentation_bytes
    if spare:
        text = f"{show_bytes(spare)} are reserved and not used at the peak: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        found.append(_action("memory", spare / whole, text))
    return found


def _largest_cheap(memory: MemoryProfile) -> str | None:
    """`gelu outputs in layers.*.mlp (9.1 MiB)`: of what a cheap operator could make again."""
    sizes: dict[str, int] = defaultdict(int)
    for block in memory.blocks:
        if block.category == SAVED and block.recomputable and block.alive(memory.peak_instant):
            layer = layer_pattern(block.module)
            sizes[f"{block.operator or 'unnamed'} outputs" + (f" in {layer}" if layer else "")] += block.bytes
    if not sizes:
        return None
    name = max(sizes, key=lambda key: sizes[key])
    return f"{name} ({show_bytes(sizes[name])})"


def _time(profile: Profile) -> list[Action]:
    """The three rows that lose most, and what would give it back."""
    found = []
    step = profile.step_ms["median"]
    for row in profile.rows[:3]:
        if row.lost_ms is None or row.lost_ms <= 0:
            continue
        where, times = f" in {row.module}" if row.module else "", "calls" if row.calls > 1 else "call"
        name = row.name.partition(" (")[0]
        text = (
            f"{name} ({row.phase}{where}, {row.calls} {times}) takes {row.ms:.3g} ms and needs {row.floor_ms:.3g} ms: "
        )
        found.append(_action("time", row.lost_ms / step, text + _remedy(row, profile)))
    return found


def _remedy(row: Any, profile: Profile) -> str:
    if profile.backend in ("interpret", "eager") and row.kind in ("elementwise", "reduction", "movement"):
        return f"{row.bound}-bound and run by itself; --backend inductor fuses it with its neighbours"
    small = row.calls and row.ms / row.calls < 0.05
    if small:
        return "each call is under 0.05 ms, too small to fill the device: a larger batch costs little more"
    if row.kind in ("matmul", "convolution", "attention"):
        formats = profile.device["peaks"]
        if profile.settings.get("precision") == "fp32" and formats.get("bf16", 0) > 1.5 * formats.get("fp32", 1):
            return f"--precision bf16 has {formats['bf16'] / formats['fp32']:.1f} times the peak of fp32 here"
        return "sizes that are multiples of 64 and a larger batch use the units better"
    if row.kind == "optimizer":
        if profile.backend in ("interpret", "eager"):
            how = "--backend inductor" if profile.backend == "interpret" else "fused=True"
            return f"it is not fused; {how} takes torch's fused update, one pass over memory"
        return f"its time does not grow with the batch: more {profile.unit} per update spread it"
    if row.bound == "memory":
        most = profile.device["bandwidth"] / 1e9
        return f"it moves {row.gb_per_second:.3g} of {most:.3g} GB/s; fewer or smaller values help, bf16 among them"
    peak = max(
        profile.device["peaks"].get(profile.settings.get("precision") or "fp32", 0.0), profile.device["vector_peak"]
    )
    reached = 1e12 * (row.tflops_per_second or 0.0) / peak
    return f"it is compute-bound and reaches {reached:.0%} of the peak; a larger batch fills the units better"


def _gaps(profile: Profile) -> list[Action]:
    on_gpu = profile.shares["gpu_busy"] is not None
    idle = 1 - (profile.shares["gpu_busy"] or 0.0) if on_gpu else profile.shares["between_calls"] or 0.0
    if on_gpu:
        text = f"the GPU is idle {idle:.0%} of the step, waiting for launches: a larger batch, or a CUDA graph (cuda_graph=True)"
    elif profile.backend in ("interpret", "eager"):
        text = f"{idle:.0%} of the step is spent between operators: a larger batch, or --backend inductor"
    else:
        text = f"{idle:.0%} of the step is spent between calls: a larger batch spreads it"
    return [_action("time", idle, text)]


def _data(profile: Profile) -> list[Action]:
    share = profile.shares["data_wait"] or 0.0
    taken = profile.step_ms["data_median"]
    text = f"waiting for a batch takes {taken:.3g} ms, {share:.0%} of the time: fetch it while the step runs"
    return [_action("data", share, text)]


def _prediction(profile: Profile) -> list[Action]:
    for row in profile.predictions:
        if row["unit"] == "bytes" and row["measured"]:
            off = row["predicted"] / row["measured"] - 1
            if abs(off) > PREDICTION_BAND:
                text = (
                    f"the predicted memory peak is off by {off:+.0%}: leave as much room when planning for this model"
                )
                return [_action("prediction", abs(off), text)]
    return []
