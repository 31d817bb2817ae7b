"""The first step's comparison with eager PyTorch within a memory budget: as much of it as the budget leaves room for.

In: a budget, a captured step. What eager would take of the device is predicted from the captured graph (`needs_of`); by that is
decided (`decide`), and told in `step.explain()`:

- whole    eager runs on all rows. What it saves for its backward stays on the device as far as there is room and waits on the host
           beyond that, as do its gradients and the copies of the state; so it needs the model and one operator at a time.
- reduced  one operator is too much (the logits of a large vocabulary, which the captured step never has whole): eager runs on a few
           rows, the compiled step on those rows over and over (verify/fewer_rows.py).
- left out not even that; a warning says so.

A prediction that was too low shows as a lack of memory, for the allocator is held to the budget meanwhile: the next of the three
is taken then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from wholestep.capture.cache import was_checked
from wholestep.errors import WholestepWarning
from wholestep.graph.bytes import show_bytes
from wholestep.graph.liveness import node_bytes
from wholestep.graph.notes import check_note
from wholestep.graph.training_graph import Role, TrainingGraph, phase_of
from wholestep.graph.views import is_cheap_view_or_entry
from wholestep.lower import give_back
from wholestep.lower.footprint.predict import predict_profile
from wholestep.ops.call import read_call
from wholestep.ops.record import record_of
from wholestep.plan.budget import Budget, limit_now
from wholestep.plan.host import available_bytes
from wholestep.plan.rebatch import at_traced_sizes, rebatched, sized_by_data
from wholestep.runtime.enforce import held_to
from wholestep.runtime.variant import Variant
from wholestep.verify.compare import compute_dtype
from wholestep.verify.fewer_rows import NotComparable, check_on_rows, rows_in
from wholestep.verify.first_step import Lean

LOGIT_BYTES = 12
"""Per logit of a loss that eager has whole, at its peak: log-softmax in float32, its gradient, and that of the logits."""
ALLOCATOR = 0.97
"""Of the memory there is, what the allocator can use: the rest lies between tensors."""


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that eager PyTorch takes for one step beyond parameters, buffers and batch; predicted."""

    running: int
    """At its fullest operator, at least: what that reads and writes, and casts of weights that autocast keeps."""
    beside: int
    """What may lie beside that operator: a residual, what Python still names."""
    saved: int
    """What waits for the backward pass, at most."""
    gradients: int

    @property
    def on_host(self) -> int:
        return self.saved + self.gradients


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """How much of the check is done."""

    rows: int | None
    """All rows of the batch (0), a few of them, or None: it is left out."""
    lean: Lean
    reason: str = ""


def needs_of(graph: TrainingGraph, share: float = 1.0) -> Needs:
    """What eager takes for the step that was captured as `graph`, on a share of its rows; a ValueError where sizes are symbolic."""
    # not by the rows that a loss is said to have there: their shape may be that of a weight, which does not shrink
    logits = int(share * max(map(_logits, graph.operations()), default=0))
    most = saved = 0
    for node in (graph if share == 1.0 else rebatched(graph, share)).operations():
        if phase_of(node) == "update" or is_cheap_view_or_entry(node):
            continue
        saved += node_bytes(node) if phase_of(node) == "forward" else 0
        most = max(most, node_bytes(node) + sum(node_bytes(entry) for entry in node.all_input_nodes))
    casts = _inputs(graph, Role.PARAMETER) // 2 if compute_dtype(graph) in (torch.bfloat16, torch.float16) else 0
    gradients = sum(node_bytes(graph.node(name)) for name in graph.gradients.values())
    return Needs(max(most, LOGIT_BYTES * logits) + casts, most, saved + 4 * logits + casts, gradients)


def decide(
    graph: TrainingGraph, *, limit: int, held: int, fresh: int = 0, rows: int | None = None, host: int | None = None
) -> Decision:
    """How much of the check fits.

    Args:
        limit: bytes that may be reserved on the device.
        held: what is allocated there before the check.
        fresh: how much of that is state of zeros, which gives way meanwhile.
        rows: of the batch; None where a few rows cannot stand for all.
        host: bytes free there; None where that is not known.
    """
    usable = int(ALLOCATOR * limit)
    beside = held - fresh
    copies = _inputs(graph, Role.PARAMETER, Role.BUFFER, Role.STATE) - fresh
    needs, count = needs_of(graph), rows or 1
    reasons: list[str] = []
    while True:
        room = usable - beside - needs.running
        near = min(max(room - needs.beside, 0), needs.saved)
        which = "all rows" if not reasons else "one row" if count == 1 else f"{count} rows"
        if room < 0:
            reasons.append(f"eager takes about {show_bytes(beside + needs.running)} for {which}")
        elif host is not None and (far := needs.on_host - near + copies) > host:
            reasons.append(
                f"eager takes about {show_bytes(far)} of the host for {which}, which has {show_bytes(host)} left"
            )
        else:
            interpret = not reasons and _fits_interpreted(graph, usable, held)
            return Decision(
                0 if not reasons else count, Lean(max(room - needs.beside, 0), interpret), "; ".join(reasons[:1])
            )
        if rows is None or count == 1:
            return Decision(None, Lean(0, False), "; ".join(dict.fromkeys((reasons[0], reasons[-1]))))
        count = fewer(count, rows)
        needs = needs_of(graph, count / rows)


def fewer(count: int, rows: int) -> int:
    """At most half as many rows, which divide all of them."""
    return next(few for few in range(max(count // 2, 1), 0, -1) if rows % few == 0)


def _fits_interpreted(graph: TrainingGraph, usable: int, held: int) -> bool:
    """Whether the captured graph can be run operator by operator, with all its gradients kept to the end."""
    gradients = sum(node_bytes(graph.node(name)) for name in graph.gradients.values())
    return predict_profile(graph).peak_bytes - _inputs(graph, *Role) + gradients + held <= usable


def _inputs(graph: TrainingGraph, *roles: Role) -> int:
    return sum(
        node_bytes(node) for entry, node in zip(graph.inputs, graph.placeholders, strict=True) if entry.role in roles
    )


def _logits(node: fx.Node) -> int:
    spares = record_of(node).spares
    return 0 if spares is None else spares(read_call(node))


# ---- carrying it out ----


def check_within(budget: Budget, check: Callable[..., Any], *, whole_only: str | None = None) -> Callable[..., Any]:
    """The first step's check, as far as it fits; on a CPU, which is not held to a budget, the check itself.

    `whole_only`: why a few rows are not to be compared.
    """

    def checked(run: Any, variant: Variant, *rest: Any) -> Any:
        device = variant.subject.device
        if device.type != "cuda" or was_checked(variant.capture):
            return check(run, variant, *rest)
        held = torch.cuda.memory_allocated(device)
        decision = decide_for(run, variant, rest[0], limit=limit_now(budget, device), held=held, whole_only=whole_only)
        return _Checked(budget, device, check, whole_only).run(decision, run, variant, *rest)

    return checked


def decide_for(
    run: Any, variant: Variant, args: Any, *, limit: int, held: int, whole_only: str | None = None
) -> Decision:
    """The decision for a step that is about to run for the first time."""
    rows, why = None, ""
    try:
        rows = _rows(run, variant, args, whole_only)
    except NotComparable as refused:
        why = f", and a few rows cannot stand for all: {refused}"
    graph = variant.capture.graph
    graph = at_traced_sizes(graph) if sized_by_data(graph) else graph
    found = decide(graph, limit=limit, held=held, fresh=_fresh_bytes(variant), rows=rows, host=available_bytes())
    return dataclasses.replace(found, reason=found.reason + why) if found.rows is None else found


def _rows(run: Any, variant: Variant, args: Any, whole_only: str | None) -> int:
    if whole_only is not None:
        raise NotComparable(whole_only)
    return rows_in(variant, args, run.batch)


def _fresh_bytes(variant: Variant) -> int:
    """State that the step itself made, all zeros."""
    members, steps = variant.binding.members, variant.binding.steps
    first = [plan for plan in members if steps.get(plan, 1) == 0 and not plan.update.has_state_from_the_start]
    fresh = {name for plan in first for name in members[plan]}
    graphs = [graph for graph in (variant.capture.graph, variant.capture.update) if graph is not None]
    pairs = [pair for graph in graphs for pair in zip(graph.inputs, graph.placeholders, strict=True)]
    return sum(
        node_bytes(node) for entry, node in pairs if entry.role is Role.STATE and entry.name.rpartition("/")[0] in fresh
    )


class _Checked:
    """One check at work: whole, or on a few rows, or left out with a warning."""

    def __init__(
        self, budget: Budget, device: torch.device, check: Callable[..., Any], whole_only: str | None = None
    ) -> None:
        self.budget, self.device, self.check, self.whole_only = budget, device, check, whole_only

    def run(self, decision: Decision, run: Any, variant: Variant, *rest: Any) -> Any:
        reason: str | None = decision.reason
        if decision.rows == 0:
            short, afterwards = self._tried(self.check, run, variant, *rest, lean=decision.lean)
            if not short:
                return afterwards and self._held(afterwards)
            reason = "memory did not suffice for all rows"
        if decision.rows is not None:
            reason = self._on_rows(decision.rows, str(reason), run, variant, *rest)
        if reason is not None:
            self._left_out(run, reason)
        return None

    def _tried(self, check: Callable[..., Any], *args: Any, **options: Any) -> tuple[bool, Any]:
        """(whether memory did not suffice, what the check returned)."""
        with contextlib.suppress(torch.OutOfMemoryError), held_to(self.budget, self.device):
            return False, check(*args, **options)
        give_back()  # the frames of the error are gone only now
        return True, None

    def _held(self, afterwards: Callable[..., None]) -> Callable[..., None]:
        def held(run: Any, result: Any) -> None:
            with held_to(self.budget, self.device):
                afterwards(run, result)

        return held

    def _on_rows(self, count: int, why: str, run: Any, variant: Variant, *rest: Any) -> str | None:
        """Fewer and fewer rows, until they fit; the reason where nothing was compared. `why` not all of them: for people."""
        try:
            whole = _rows(run, variant, rest[0], self.whole_only)
            count = count or fewer(whole, whole)
            while self._tried(check_on_rows, run, variant, *rest, rows=count, lean=Lean(0, False))[0]:
                if count == 1:
                    return f"{why}, nor for one"
                count = fewer(count, whole)
        except NotComparable as refused:
            return f"{why}, and a few rows cannot stand for all: {refused}"
        text = f"the first step was compared with eager PyTorch on {count} of {whole} rows, which is what"
        run.step._note(check_note("reduced", f"{text} memory={self.budget.said} leaves room for ({why})"))
        return None

    def _left_out(self, run: Any, reason: str) -> None:
        text = f"the first step is not compared with eager PyTorch within memory={self.budget.said}: {reason}"
        run.step._note(check_note("left out", text))
        hint = "wholestep.verify(...) compares without a budget, check='off' asks for no comparison"
        warnings.warn(f"{text}; {hint}", WholestepWarning, stacklevel=2)
