"""What a memory budget would buy: a graph and a limit in, the plan worth asking for out, as a Fix with its predicted peak.

The planner is asked for the frontier of plans of the step at hand. The fastest plan that stays within the limit is told, or the
leanest where none does, as the amount that `memory=` (`--memory`) has to be given for it.
"""

from __future__ import annotations

import dataclasses

from wholestep.cost.measure import this_device
from wholestep.errors import WholestepError
from wholestep.graph.bytes import show_bytes
from wholestep.graph.training_graph import TrainingGraph, tensors_in
from wholestep.passes.pipeline import default_pipeline
from wholestep.plan.frontier import Point, card_bytes, frontier, round_up

TARGETS = 6
"""Plans to look at: advice needs no fine steps."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fix:
    """One thing to try."""

    name: str
    peak_bytes: int
    how: str
    """What is assumed, and what it costs."""
    exact: bool
    """Whether the training stays the same."""
    option: str = ""
    """For the command line: `--memory 12.3GiB`."""
    python: str = ""
    """For `wholestep.compile`: `memory="12.3GiB"`; or a line that does it."""


def asked_for(peak_bytes: int, *, on_gpu: bool) -> str:
    """`memory="12.3GiB"`: the budget in which an allocated peak lies; of the card on a GPU, of tensors on a CPU."""
    amount = show_bytes(round_up(card_bytes(peak_bytes) if on_gpu else peak_bytes))
    return f'memory="{amount.replace(" ", "")}"'


def budget_fix(
    graph: TrainingGraph, peak_bytes: int, *, limit_bytes: int | None = None, slower: float | None = None
) -> Fix | None:
    """A budget for this step, whose peak is `peak_bytes`; None where planning has nothing (more) to give.

    With `slower` the leanest plan is meant that costs at most this share of time.
    """
    on_gpu = any(t.is_cuda for node in graph.placeholders for t in tensors_in(node.meta.get("val")))
    try:
        points = frontier(
            graph, this_device("cuda" if on_gpu else "cpu"), default_pipeline().carry_out, targets=TARGETS
        )
    except (WholestepError, RuntimeError, ValueError, KeyError, MemoryError):  # advice must not fail in its turn
        return None
    peaks = [peak_bytes - (points[0].peak_bytes - point.peak_bytes) for point in points]
    chosen = len(points) - 1
    if slower is not None:
        chosen = max(i for i, point in enumerate(points) if point.seconds <= (1 + slower) * points[0].seconds)
    if limit_bytes is not None:
        takes = [card_bytes(peak) if on_gpu else peak for peak in peaks]
        chosen = next((index for index, taken in enumerate(takes) if taken <= limit_bytes), chosen)
    return None if chosen == 0 else _told(points, chosen, peaks[chosen], on_gpu)


def _told(points: list[Point], chosen: int, peak_bytes: int, on_gpu: bool) -> Fix:
    point = points[chosen]
    slower = 100 * (point.seconds / points[0].seconds - 1) if points[0].seconds else 0.0
    how = f"{len(point.plan.recompute)} values are recomputed in the backward pass, about +{slower:.0f} % time"
    python = asked_for(peak_bytes, on_gpu=on_gpu)
    option = f"--memory {python.partition('=')[2].strip(chr(34))}"
    return Fix(f"{python} (--memory)", peak_bytes, how, True, option, python)
