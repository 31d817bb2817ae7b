"""What to say when memory runs out: a profile or a graph in, the text of the error out, with fixes and what each would buy.

Every figure is a peak computed from the blocks of the profile (`peak_if`): sizes are changed as the fix would change them,
or blocks left out where the fix would not hold them, and the peak is taken anew over the whole step, wherever it then lies.
How sizes change is stated beside each fix. Recomputing and accumulating train the same; bf16 and a smaller batch do not.
"""

from __future__ import annotations

from collections import defaultdict

from wholestep.graph.bytes import show_bytes
from wholestep.graph.layers import layer_pattern
from wholestep.graph.training_graph import TrainingGraph
from wholestep.lower.footprint.blocks import BATCH, GRADIENTS, LASTING, SAVED, WEIGHTS, Block, MemoryProfile, peak_if
from wholestep.lower.footprint.predict import predict_profile
from wholestep.profile.memory.budget_fix import Fix, asked_for, budget_fix

_BF16_OPERATORS = (
    "mm", "conv", "attention", "linear", "gelu", "relu", "silu", "tanh", "sigmoid", "dropout", "layer_norm", "batch_norm",
)  # fmt: skip
"""Parts of the names of operators whose results autocast leaves in bf16, or which reach a matrix product cast to it. Sums
along the residual stream, softmax and losses stay as they are."""


MOST_BLOCKS, MOST_FIXES = 5, 3
"""Named in the text of an error."""


def explain_oom(subject: MemoryProfile | TrainingGraph, *, limit_bytes: int | None = None) -> str:
    """The text of an out-of-memory error: where the bytes are, and up to three fixes, best first."""
    profile = subject if isinstance(subject, MemoryProfile) else predict_profile(subject)
    said = "predicted" if profile.system == "predicted" else "measured"
    phase = next((p.name for p in profile.phases if p.start <= profile.peak_instant < p.end), "forward")
    against = "" if limit_bytes is None else f", {show_bytes(limit_bytes)} allowed"
    lines = [f"the step needs {show_bytes(profile.peak_bytes)} ({said} peak, in the {phase} pass{against})"]
    split = sorted(((n, c) for c, n in profile.at_peak.items() if n), reverse=True)
    lines.append("  " + ", ".join(f"{name} {show_bytes(count)}" for count, name in split))
    lines.append("largest at the peak:")
    lines += [f"  {show_bytes(count):>9}  {text}" for count, text in _largest(profile)]
    graph = subject if isinstance(subject, TrainingGraph) else None
    fixes = ranked_fixes(profile, limit_bytes=limit_bytes, graph=graph)[:MOST_FIXES]
    if fixes:
        lines.append("what would help:")
        for number, fix in enumerate(fixes, start=1):
            fits = "" if limit_bytes is None else " (fits)" if fix.peak_bytes <= limit_bytes else " (not enough alone)"
            lines.append(f"  {number}. {fix.name}: {show_bytes(fix.peak_bytes)}{fits}; {fix.how}")
    else:
        lines.append("nothing in the step depends on the batch: use a smaller model or optimizer state")
    return "\n".join(lines)


def ranked_fixes(
    profile: MemoryProfile, *, limit_bytes: int | None = None, graph: TrainingGraph | None = None
) -> list[Fix]:
    """Fixes that lower the peak: first those that fit the limit, exact ones before others, then by how much they save.

    With the graph of the step the planner itself is asked what a budget would give.
    """
    planned = None if graph is None else budget_fix(graph, profile.peak_bytes, limit_bytes=limit_bytes)
    fixes = [fix for fix in (planned or _recompute(profile), _bf16(profile)) if fix is not None]
    fixes += [
        fix for fix in (_accumulate(profile, limit_bytes), _smaller_batch(profile, limit_bytes)) if fix is not None
    ]
    helpful = [fix for fix in fixes if fix.peak_bytes < profile.peak_bytes]
    return sorted(
        helpful,
        key=lambda fix: (limit_bytes is not None and fix.peak_bytes > limit_bytes, not fix.exact, fix.peak_bytes),
    )


def batch_rows(profile: MemoryProfile) -> int:
    """Rows of the batch the profile was made with; 1 when it has none."""
    leading = [block.shape[0] for block in profile.blocks if block.category == BATCH and block.shape]
    return max(leading, key=leading.count, default=1)


def peak_with_rows(profile: MemoryProfile, rows: int) -> int:
    """The peak with another number of rows: what grows with the batch, in proportion."""
    now = batch_rows(profile)
    return peak_if(profile, lambda block: block.bytes * rows // now if block.scales else block.bytes)


def _smaller_batch(profile: MemoryProfile, limit: int | None) -> Fix | None:
    now = batch_rows(profile)
    halves = [now >> power for power in range(1, now.bit_length()) if now >> power]
    if not halves:
        return None
    rows = next((r for r in halves if limit is not None and peak_with_rows(profile, r) <= limit), None)
    rows = rows or (halves[0] if limit is None else halves[-1])
    how = "what grows with the batch, in proportion; gradients are of fewer rows"
    name, python = f"batch {rows} instead of {now}", f"loader = DataLoader(dataset, batch_size={rows})"
    return Fix(name, peak_with_rows(profile, rows), how, False, f"--batch {rows}", python)


def _accumulate(profile: MemoryProfile, limit: int | None) -> Fix | None:
    now = batch_rows(profile)
    parts = [n for n in (2, 4, 8, 16, 32, 64) if now % n == 0]
    if not parts:
        return None
    gradients = sum(block.bytes for block in profile.blocks if block.category == GRADIENTS)

    def peak(parts: int) -> int:
        def size(block: Block) -> int:
            return block.bytes // parts if block.scales and block.category != BATCH else block.bytes

        return peak_if(profile, size) + gradients

    n = next((n for n in parts if limit is not None and peak(n) <= limit), parts[0] if limit is None else parts[-1])
    how = f"the same training from {n} micro-batches of {now // n}; {show_bytes(gradients)} more for summed gradients"
    return Fix(f"accumulate={n}", peak(n), how, True, f"--set accumulate={n}", f"accumulate={n}")


def _bf16(profile: MemoryProfile) -> Fix | None:
    def halved(block: Block) -> bool:
        named = any(part in block.operator for part in _BF16_OPERATORS)
        return (
            block.scales and block.dtype == "float32" and block.category not in (*LASTING, BATCH, GRADIENTS) and named
        )

    if not any(halved(block) for block in profile.blocks) or any(
        b.dtype in ("bfloat16", "float16") for b in profile.blocks
    ):
        return None  # nothing to halve, or halved already
    weights = [
        b for b in profile.blocks if b.category == WEIGHTS and b.dtype == "float32" and b.shape and len(b.shape) > 1
    ]
    copies = sum(block.bytes for block in weights) // 2
    peak = peak_if(profile, lambda block: block.bytes // 2 if halved(block) else block.bytes) + copies
    how = f"half of what matrix products and activations leave, {show_bytes(copies)} more for weights in bf16; rounds differently"
    return Fix('precision="bf16"', peak, how, False, "--precision bf16", 'precision="bf16"')


def _recompute(profile: MemoryProfile) -> Fix | None:
    def again(block: Block) -> bool:
        return block.recomputable and block.category == SAVED

    freed = sum(b.bytes for b in profile.blocks if again(b) and b.idle is not None and b.idle[1] > b.idle[0])
    if not freed:
        return None
    peak = peak_if(profile, lambda block: block.bytes, drop_idle=again)
    how = f"{show_bytes(freed)} of saved activations come from cheap operators and need not wait for the backward pass; a budget "
    how += f"of {asked_for(peak, on_gpu=profile.device.startswith('cuda'))} asks for it"
    return Fix("recompute cheap activations", peak, how, True)


def _largest(profile: MemoryProfile) -> list[tuple[int, str]]:
    """What is alive at the peak, equal things of equal layers together."""
    groups: dict[str, list[Block]] = defaultdict(list)
    for block in profile.blocks:
        if block.alive(profile.peak_instant) and block.bytes:
            layer = layer_pattern(block.module)
            shape = "" if block.shape is None else f" {block.dtype} {'x'.join(map(str, block.shape))}"
            made = f" by {block.operator} in {block.phase}" if block.operator else ""
            reason = f", for {block.why.split(' of ')[0]}" if block.category == SAVED and block.why else ""
            groups[f"{block.category}{f' of {layer}' if layer else ''}{shape}{made}{reason}"].append(block)
    totals = sorted(
        ((sum(b.bytes for b in blocks), text, len(blocks)) for text, blocks in groups.items()), reverse=True
    )
    return [(count, text + (f" (x{times})" if times > 1 else "")) for count, text, times in totals[:MOST_BLOCKS]]
