"""From the numbers of a Profile to what to do about them: each action names the number it follows from.

An action is a dict: `about` (memory, time, data, equality), `title`, `why`, what to copy (`command`, a line for the shell, and
`python`, one for a script; one of them may be None), `gain`, the share of step or peak it gives back, `predicted`, bytes or
milliseconds before and after where that was computed (None: `gain` is an upper bound), and `exact`, whether the training stays
the same. Nothing is suggested that the data do not show.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wholestep.graph.bytes import show_bytes
from wholestep.graph.layers import layer_pattern
from wholestep.lower.footprint.blocks import SAVED, MemoryProfile
from wholestep.profile.memory.budget_fix import Fix
from wholestep.profile.memory.oom import ranked_fixes

if TYPE_CHECKING:
    from wholestep.profile.profile import Profile

WORTH = 0.03
"""Of the step or the peak: less is not worth a line."""
Action = dict[str, Any]
_VERIFIED_BY = (
    "--set", "--data", "--glob", "--field", "--tokenizer", "--batch", "--seq", "--precision", "--memory", "--backend",
    "--disable", "--seed",
)  # fmt: skip
"""Options of `wholestep profile` that `wholestep verify` has too."""


def actions_of(profile: Profile, budget: Fix | None = None) -> list[Action]:
    """Equality before everything; then what was predicted, then what could be won at most, each most first; what changes the
    training comes last. `budget` is what the planner offers."""
    found = [*_memory(profile, budget), *_together([*_time(profile), *_gaps(profile)]), *_data(profile)]
    ranked = sorted(found, key=lambda a: (not a["exact"], a["predicted"] is None, -a["gain"]))
    return _equality(profile) + [action for action in ranked if action["gain"] >= WORTH]


# ---- what to copy ----


def command_with(command: Sequence[str], option: str) -> str | None:
    """The command with one more option, in place of the same option where it has it; None without a command.

    >>> command_with(["wholestep", "profile", "gpt-1m", "--batch", "8"], "--batch 16")
    'wholestep profile gpt-1m --batch 16'
    """
    if not command:
        return None
    name, value = option.split(" ", 1)
    kept, words = list(command[:3]), list(command[3:])
    for old, given in zip(words[::2], words[1::2]):  # options all have values: `wholestep.cli.profile` writes them so
        same = old == name and (name != "--set" or given.partition("=")[0] == value.partition("=")[0])
        kept += [] if same else [old, given]
    return shlex.join([*kept, name, value])


def python_with(profile: Profile, keyword: str) -> str:
    """`step = wholestep.compile(model, loss_fn, optimizer, batch, memory="12GiB")`, with what the profile was made with."""
    known = {"precision": "fp32", "clip_norm": None, "accumulate": 1}
    told = {key: profile.settings.get(key, usual) for key, usual in known.items()}
    words = [f"{key}={value!r}".replace("'", '"') for key, value in told.items() if value != known[key]]
    words = [word for word in words if word.partition("=")[0] != keyword.partition("=")[0]]
    return f"step = wholestep.compile({', '.join(['model, loss_fn, optimizer, batch', *words, keyword])})"


def _action(
    profile: Profile, about: str, gain: float, title: str, why: str, *, option: str = "", python: str = "", exact: bool = True,
    predicted: dict[str, Any] | None = None,
) -> Action:  # fmt: skip
    sized = (
        option.startswith("--batch") and profile.settings.get("family") is None
    )  # a user's function makes its own batches
    line = python_with(profile, python) if python and " = " not in python else python
    return {
        "about": about, "gain": gain, "title": title, "why": why, "exact": exact, "predicted": predicted,
        "command": command_with(profile.command, option) if option and not sized else None, "python": line or None,
    }  # fmt: skip


def _larger_batch(profile: Profile) -> dict[str, Any]:
    rows = int(profile.settings.get("batch") or 0)
    option = f"--batch {2 * rows}" if rows else ""
    return {"option": option, "python": f"loader = DataLoader(dataset, batch_size={2 * rows or '...'})"}


# ---- what there is to do ----


def _equality(profile: Profile) -> list[Action]:
    if profile.verified is None or profile.verified["ok"]:
        return []
    why = f"the step differs from eager PyTorch: {profile.verified['departure']}"
    found = _action(profile, "equality", 1.0, "Find out why the step differs from eager PyTorch", why)
    if profile.command:
        words = list(zip(profile.command[3::2], profile.command[4::2]))
        kept = [word for pair in words if pair[0] in _VERIFIED_BY for word in pair]
        found["command"] = shlex.join(["wholestep", "verify", profile.command[2], *kept])
    return [found | {"python": "print(wholestep.verify(model, loss_fn, optimizer, [batch]))"}]


def _memory(profile: Profile, budget: Fix | None) -> list[Action]:
    memory = profile.memory
    if memory is None or memory.peak_bytes <= 0:
        return []
    others = [fix for fix in ranked_fixes(memory) if not fix.name.startswith("recompute")]
    found = []
    for fix in [*([budget] if budget is not None else []), *others][:3]:
        fall = f"from {show_bytes(memory.peak_bytes)} to {show_bytes(fix.peak_bytes)}"
        title = f"{fix.name.removesuffix(' (--memory)')}: the peak falls {fall}"
        because = _saved(memory) if fix is budget else ""
        then = {"unit": "bytes", "now": memory.peak_bytes, "then": fix.peak_bytes}
        gain = 1 - fix.peak_bytes / memory.peak_bytes
        found.append(
            _action(
                profile,
                "memory",
                gain,
                title,
                f"{because}{fix.how}",
                option=fix.option,
                python=fix.python,
                exact=fix.exact,
                predicted=then,
            )
        )
    spare = memory.fragmentation_bytes
    if spare:
        name = "PYTORCH_CUDA_ALLOC_CONF"
        why = f"{show_bytes(spare)} are reserved and not used at the peak"
        line = f'os.environ["{name}"] = "expandable_segments:True"  # before torch is imported'
        action = _action(profile, "memory", spare / memory.peak_bytes, "Let segments grow", why, python=line)
        command = f"{name}=expandable_segments:True {shlex.join(profile.command)}" if profile.command else None
        found.append(action | {"command": command})
    return found


def _saved(memory: MemoryProfile) -> str:
    """`saved activations are 60% of the peak, most of them gelu outputs in layers.*.mlp (9.1 MiB): `."""
    sizes: dict[str, int] = defaultdict(int)
    for block in memory.blocks:
        if block.category == SAVED and block.alive(memory.peak_instant):
            layer = layer_pattern(block.module)
            sizes[f"{block.operator or 'unnamed'} outputs" + (f" in {layer}" if layer else "")] += block.bytes
    if not sizes:
        return ""
    name = max(sizes, key=lambda key: sizes[key])
    share = memory.at_peak.get(SAVED, 0) / memory.peak_bytes
    return f"saved activations are {share:.0%} of the peak, most of them {name} ({show_bytes(sizes[name])}); "


def _time(profile: Profile) -> list[Action]:
    """The three rows that lose most, and what would give it back."""
    found = []
    step = profile.step_ms["median"]
    for row in profile.rows[:3]:
        if row.lost_ms is None or row.lost_ms <= 0:
            continue
        where, times = f" in {row.module}" if row.module else "", "calls" if row.calls > 1 else "call"
        name = row.name.partition(" (")[0]
        why = (
            f"{name} ({row.phase}{where}, {row.calls} {times}) takes {row.ms:.3g} ms and needs {row.floor_ms:.3g} ms: "
        )
        title, reason, copied = _remedy(row, profile)
        found.append(_action(profile, "time", row.lost_ms / step, title, why + reason, **copied))
    return found


def _together(actions: list[Action]) -> list[Action]:
    """What one remedy helps is one action: it is done once, and gives back what all of them lose."""
    merged: dict[tuple[Any, ...], Action] = {}
    for action in actions:
        key = action["command"], action["python"], action["title"]
        if key in merged:
            first, (row, _, reason) = merged[key], action["why"].partition(": ")
            rows, _, same = first["why"].partition(": ")
            before, _, helps = first["why"].rpartition("; ")
            if reason == same:
                why = f"{rows}, {row}: {reason}"
            elif before and action["why"].endswith(f"; {helps}"):  # how it helps is told once
                why = f"{before}; {action['why']}"
            else:
                why = f"{first['why']}; {action['why']}"
            action = first | {"gain": first["gain"] + action["gain"], "why": why}
        merged[key] = action
    return list(merged.values())


def _remedy(row: Any, profile: Profile) -> tuple[str, str, dict[str, Any]]:
    """(title, why it helps, what to copy)."""
    compiled = {"option": "--backend inductor", "python": 'backend="inductor"'}
    larger = "Use a larger batch", _larger_batch(profile) | {"exact": False}
    may_compile = profile.backend == profile.asked_backend == "interpret"  # else compiled code was tried, and lost
    if may_compile and row.kind in ("elementwise", "reduction", "movement"):
        return (
            "Compile the step",
            f"{row.bound}-bound and run by itself; compiled code fuses it with its neighbours",
            compiled,
        )
    if profile.backend == "eager" and row.kind in ("elementwise", "reduction", "movement", "optimizer"):
        own = {"option": "--system wholestep", "python": 'backend="inductor"'}
        return "Compile the step", "run by itself; a compiled step fuses it with its neighbours", own
    if row.calls and row.ms / row.calls < 0.05:
        return larger[0], "each call is under 0.05 ms, too small to fill the device", larger[1]
    if row.kind in ("matmul", "convolution", "attention"):
        formats = profile.device["peaks"]
        if profile.settings.get("precision") == "fp32" and formats.get("bf16", 0) > 1.5 * formats.get("fp32", 1):
            more = (
                f"bf16 has {formats['bf16'] / formats['fp32']:.1f} times the peak of fp32 here; it rounds differently"
            )
            copied = {"option": "--precision bf16", "python": 'precision="bf16"', "exact": False}
            return "Compute in bf16", more, copied
        return larger[0], "sizes that are multiples of 64 and a larger batch use the units better", larger[1]
    if row.kind == "optimizer":
        if may_compile:
            return "Compile the step", "compiled steps take torch's fused update, one pass over memory", compiled
        return larger[0], f"its time does not grow with the batch: more {profile.unit} per update spread it", larger[1]
    if row.bound == "memory":
        most = profile.device["bandwidth"] / 1e9
        moved = f"it moves {row.gb_per_second:.3g} of {most:.3g} GB/s; smaller values help"
        copied = {"option": "--precision bf16", "python": 'precision="bf16"', "exact": False}
        if profile.settings.get("precision") == "fp32":
            return "Compute in bf16", moved, copied
        return larger[0], f"it moves {row.gb_per_second:.3g} of {most:.3g} GB/s", larger[1]
    peak = max(
        profile.device["peaks"].get(profile.settings.get("precision") or "fp32", 0.0), profile.device["vector_peak"]
    )
    reached = 1e12 * (row.tflops_per_second or 0.0) / peak
    return (
        larger[0],
        f"it reaches {reached:.0%} of the peak of arithmetic; a larger batch fills the units better",
        larger[1],
    )


def _gaps(profile: Profile) -> list[Action]:
    on_gpu = profile.shares["gpu_busy"] is not None
    idle = 1 - (profile.shares["gpu_busy"] or 0.0) if on_gpu else profile.shares["between_calls"] or 0.0
    if on_gpu:
        why = f"the GPU is idle {idle:.0%} of the step, waiting for launches; a CUDA graph or a larger batch helps"
        return [_action(profile, "time", idle, "Record the step as a CUDA graph", why, python="cuda_graph=True")]
    why = f"{idle:.0%} of the step is spent between {'operators' if profile.backend in ('interpret', 'eager') else 'calls'}"
    if profile.backend == profile.asked_backend == "interpret":
        copied: dict[str, Any] = {"option": "--backend inductor", "python": 'backend="inductor"'}
        return [_action(profile, "time", idle, "Compile the step", why, **copied)]
    larger = _larger_batch(profile)
    return [
        _action(profile, "time", idle, "Use a larger batch", f"{why}; a larger batch spreads it", exact=False, **larger)
    ]


def _data(profile: Profile) -> list[Action]:
    share, taken = profile.shares["data_wait"] or 0.0, profile.step_ms["data_median"]
    why = f"waiting for a batch takes {taken:.3g} ms, {share:.0%} of the time"
    line = "loader = DataLoader(dataset, num_workers=2, prefetch_factor=2)"
    return [_action(profile, "data", share, "Fetch the next batch while the step runs", why, python=line)]
