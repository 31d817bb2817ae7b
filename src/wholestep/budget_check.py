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

import dataclasses
import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from wholestep.budget import Budget, held_to, limit_now
from wholestep.capture.cache import was_checked
from wholestep.errors import WholestepWarning
from wholestep.graph.bytes import show_bytes
from wholestep.graph.keys import operator_name
from wholestep.graph.liveness import tensor_bytes
from wholestep.graph.training_graph import Role, TrainingGraph, phase_of, tensors_in
from wholestep.graph.views import is_cheap_view
from wholestep.lower import give_back
from wholestep.plan.rebatch import rebatched
from wholestep.report.memory.host import available_bytes
from wholestep.report.memory.predict import predict_profile
from wholestep.runtime.variant import Variant
from wholestep.verify.compare import compute_dtype
from wholestep.verify.fewer_rows import NotComparable, check_on_rows, rows_in
from wholestep.verify.first_step import Lean

LOGIT_BYTES = 14
"""Per logit of a loss that eager has whole, at its peak: bf16 logits, float32 log-softmax, its gradient, and that of the logits."""
BESIDE_OPERATOR = 1.5
"""What lies on the device beside an operator that eager runs (a residual, what Python still names), as a share of its own."""
ALLOCATOR = 0.97
"""Of the memory there is, what the allocator can use: the rest lies between tensors."""


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that eager PyTorch takes for one step beyond parameters, buffers and batch; predicted."""

    running: int
    """At its fullest operator: what that reads and writes, and casts of weights that autocast keeps."""
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


def needs_of(graph: TrainingGraph) -> Needs:
    """What eager takes for the step that was captured as `graph`; a ValueError where sizes are symbolic."""
    most = saved = 0
    for node in graph.operations():
        if phase_of(node) == "update" or is_cheap_view(node) or node.target is operator.getitem:
            continue
        made = _bytes(node)
        saved += made if phase_of(node) == "forward" else 0
        name = operator_name(node)
        if name.startswith("linear_cross_entropy"):
            logits = _logits(node)
            saved += 4 * logits if phase_of(node) == "forward" else 0
            made = LOGIT_BYTES * logits
        most = max(most, made + sum(_bytes(entry) for entry in node.all_input_nodes))
    casts = _inputs(graph, Role.PARAMETER) // 2 if compute_dtype(graph) in (torch.bfloat16, torch.float16) else 0
    gradients = sum(_bytes(graph.node(name)) for name in graph.gradients.values())
    return Needs(int(BESIDE_OPERATOR * most) + casts, saved + casts, gradients)


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
        which = "all rows" if not reasons else "one row" if count == 1 else f"{count} rows"
        if room < 0:
            reasons.append(f"eager takes about {show_bytes(beside + needs.running)} for {which}")
        elif host is not None and needs.on_host - min(room, needs.saved) + copies > host:
            needed = needs.on_host - min(room, needs.saved) + copies
            reasons.append(f"eager takes about {show_bytes(needed)} of the host for {which}, which has {show_bytes(host)} left")
        else:
            interpret = not reasons and _fits_interpreted(graph, usable, held)
            return Decision(0 if not reasons else count, Lean(room, interpret), "; ".join(reasons[:1]))
        if rows is None or count == 1:
            return Decision(None, Lean(0, False), "; ".join(dict.fromkeys((reasons[0], reasons[-1]))))
        count = next(few for few in range(count // 2, 0, -1) if rows % few == 0)
        needs = needs_of(rebatched(graph, count / rows))


def _fits_interpreted(graph: TrainingGraph, usable: int, held: int) -> bool:
    """Whether the captured graph can be run operator by operator, with all its gradients kept to the end."""
    gradients = sum(_bytes(graph.node(name)) for name in graph.gradients.values())
    return predict_profile(graph).peak_bytes - _inputs(graph, *Role) + gradients + held <= usable


def _bytes(node: fx.Node) -> int:
    return sum(tensor_bytes(tensor) for tensor in tensors_in(node.meta.get("val")))


def _inputs(graph: TrainingGraph, *roles: Role) -> int:
    return sum(_bytes(node) for entry, node in zip(graph.inputs, graph.placeholders, strict=True) if entry.role in roles)


def _logits(node: fx.Node) -> int:
    named = dict(zip([a.name for a in node.target._schema.arguments], node.args))  # type: ignore[union-attr]
    return named["x"].meta["val"].shape[0] * named["weight"].meta["val"].shape[0]  # type: ignore[union-attr]


# ---- carrying it out ----


def check_within(budget: Budget, check: Callable[..., Any]) -> Callable[..., Any]:
    """The first step's check, as far as it fits; on a CPU, which is not held to a budget, the check itself."""

    def checked(run: Any, variant: Variant, *rest: Any) -> Any:
        device = variant.subject.device
        if device.type != "cuda" or was_checked(variant.capture):
            return check(run, variant, *rest)
        give_back()
        held = torch.cuda.memory_allocated(device)
        decision = decide_for(run, variant, rest[0], limit=limit_now(budget, device), held=held)
        return _Checked(budget, device, check).run(decision, run, variant, *rest)

    return checked


def decide_for(run: Any, variant: Variant, args: Any, *, limit: int, held: int) -> Decision:
    """The decision for a step that is about to run for the first time."""
    rows, why = None, ""
    try:
        rows = rows_in(variant, args, run.batch)
    except NotComparable as refused:
        why = f", and a few rows cannot stand for all: {refused}"
    found = decide(
        variant.capture.graph, limit=limit, held=held, fresh=_fresh_bytes(variant), rows=rows, host=available_bytes()
    )
    return dataclasses.replace(found, reason=found.reason + why) if found.rows is None else found


def _fresh_bytes(variant: Variant) -> int:
    """State that the step itself made, all zeros."""
    first = [names for plan, names in variant.binding.members.items() if variant.binding.steps.get(plan, 1) == 0]
    fresh = {name for names in first for name in names}
    graphs = [graph for graph in (variant.capture.graph, variant.capture.update) if graph is not None]
    pairs = [pair for graph in graphs for pair in zip(graph.inputs, graph.placeholders, strict=True)]
    return sum(_bytes(node) for entry, node in pairs if entry.role is Role.STATE and entry.name.rpartition("/")[0] in fresh)


class _Checked:
    """One check at work: whole, or on a few rows, or left out with a warning."""

    def __init__(self, budget: Budget, device: torch.device, check: Callable[..., Any]) -> None:
        self.budget, self.device, self.check = budget, device, check

    def run(self, decision: Decision, run: Any, variant: Variant, *rest: Any) -> Any:
        if decision.rows == 0:
            short, afterwards = self._tried(self.check, run, variant, *rest, lean=decision.lean)
            if not short:
                return afterwards and self._held(afterwards)
            decision = self._next(run, variant, rest[0])
        if decision.rows:
            reason = self._on_rows(decision, run, variant, *rest)
            if reason is None:
                return None
            decision = dataclasses.replace(decision, reason=reason)
        self._left_out(run, decision.reason)
        return None

    def _tried(self, check: Callable[..., Any], *args: Any, **options: Any) -> tuple[bool, Any]:
        """(whether memory did not suffice, what the check returned)."""
        try:
            with held_to(self.budget, self.device):
                return False, check(*args, **options)
        except torch.OutOfMemoryError:
            pass  # its frames hold tensors until here
        finally:
            give_back()
        return True, None

    def _held(self, afterwards: Callable[..., None]) -> Callable[..., None]:
        def held(run: Any, result: Any) -> None:
            with held_to(self.budget, self.device):
                afterwards(run, result)

        return held

    def _next(self, run: Any, variant: Variant, args: Any) -> Decision:
        """After a check of all rows that did not fit: on the fewest."""
        lean = Lean(0, False)
        try:
            rows_in(variant, args, run.batch)
        except NotComparable as refused:
            return Decision(None, lean, f"memory did not suffice, and a few rows cannot stand for all: {refused}")
        return Decision(1, lean)

    def _on_rows(self, decision: Decision, run: Any, variant: Variant, *rest: Any) -> str | None:
        """The reason where nothing was compared."""
        assert decision.rows
        whole = rows_in(variant, rest[0], run.batch)
        try:
            short, _ = self._tried(check_on_rows, run, variant, *rest, rows=decision.rows, lean=decision.lean)
        except NotComparable as refused:
            return str(refused)
        if short:
            return f"memory did not suffice for {decision.rows} of {whole} rows either"
        run.step._note(
            f"check: reduced: the first step was compared with eager PyTorch on {decision.rows} of {whole} rows, which is what "
            f"memory={self.budget.said} leaves room for ({decision.reason or 'all rows were tried'})"
        )
        return None

    def _left_out(self, run: Any, reason: str) -> None:
        text = f"the first step is not compared with eager PyTorch within memory={self.budget.said}: {reason}"
        run.step._note(f"check: left out: {text}")
        hint = "wholestep.verify(...) compares without a budget, check='off' asks for no comparison"
        warnings.warn(f"{text}; {hint}", WholestepWarning, stacklevel=2)
