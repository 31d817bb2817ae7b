"""The report of a verification: one row per value compared, and where the first one departs."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from typing import Any

from wholestep.disk import json_ready
from wholestep.graph.counted import counted

KINDS = ("ranks", "random", "loss", "aux", "gradient", "buffer", "parameter", "state")
SHOWN_ROWS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of one step: its distance from the reference in norm, and what the rule allows."""

    step: str
    """`0`, `1`, ... in train mode; `edge 0`, ...; `eval`."""
    kind: str
    name: str
    error: float
    tolerance: float
    bitwise: bool

    @property
    def ok(self) -> bool:
        return self.bitwise or self.error <= self.tolerance

    @property
    def badness(self) -> float:
        """Error in units of the tolerance."""
        if self.error == 0 or self.bitwise:
            return 0.0
        return self.error / self.tolerance if self.tolerance > 0 and not math.isnan(self.error) else math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class Departure:
    """Where the step first goes another way than eager."""

    module: str
    """Module path; empty for the loss function itself, or for what the root module owns."""
    kind: str
    """`output` (of the module's forward), or the kind of the row."""
    name: str
    step: str
    error: float
    tolerance: float
    guilty_pass: str | None = None
    """The pass (or `lower_inductor`) without which the step holds; None when the captured graph itself departs."""
    guilty_verb: str | None = None
    """The line of a recipe without which the step holds."""

    def __str__(self) -> str:
        place = self.module or ("the loss function" if self.kind in ("random", "loss", "aux") else "the root module")
        what = "its output" if self.kind == "output" else f"{self.kind} {self.name}"
        cause = f", made by {self.guilty_verb or self.guilty_pass}" if self.guilty_verb or self.guilty_pass else ""
        return f"{place}: {what} is off by {self.error:.3g} (allowed {self.tolerance:.3g}) at step {self.step}{cause}"


@dataclasses.dataclass(slots=True)
class Report:
    """What `wholestep.verify` returns; `print(report)` is made for people, `to_json` for programs."""

    rung: str
    backend: str
    rows: list[TensorRow] = dataclasses.field(default_factory=list)
    first_departure: Departure | None = None
    falls: tuple[Any, ...] = ()
    notes: list[str] = dataclasses.field(default_factory=list)
    programs: list[str] = dataclasses.field(default_factory=list)
    """Of the graphs that ran, in order: equal to `Step.program` where `compile` would run the same."""

    @property
    def ok(self) -> bool:
        """Every value is within the rule. Vacuous on rung `eager`, where nothing was captured; `notes` says so."""
        return all(row.ok for row in self.rows) and (bool(self.rows) or self.rung == "eager")

    @property
    def bitwise(self) -> bool:
        """Every loss, gradient, buffer, parameter and state is equal to eager's bit for bit."""
        return self.ok and all(row.bitwise for row in self.rows)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def to_json(self) -> str:
        """Infinite errors (a value is missing) become null: JSON has no infinity."""
        rows = [dataclasses.asdict(row) | {"ok": row.ok} for row in self.rows]
        departure = None if self.first_departure is None else dataclasses.asdict(self.first_departure)
        facts = {
            "ok": self.ok, "bitwise": self.bitwise, "rung": self.rung, "backend": self.backend,
            "first_departure": departure, "falls": [str(f) for f in self.falls], "notes": self.notes, "rows": rows,
        }  # fmt: skip
        return json.dumps(json_ready(facts), indent=1)

    def __str__(self) -> str:
        return "\n".join([self._headline(), *self._table(), *self._remarks()])

    def _headline(self) -> str:
        if self.rung == "eager":
            return "nothing was captured: the step is eager PyTorch itself"
        verdict = "equal to eager" if self.ok else "DIFFERS from eager"
        verdict += " bit for bit" if self.bitwise else ""
        steps = len({row.step for row in self.rows})
        return f"{verdict}: {counted(len(self.rows), 'value')} over {counted(steps, 'step')}, {self.rung}, backend {self.backend}"

    def _table(self) -> list[str]:
        if not self.rows:
            return []
        count, failed, bits = (collections.Counter[str]() for _ in range(3))
        for row in self.rows:
            count[row.kind] += 1
            failed[row.kind] += not row.ok
            bits[row.kind] += row.bitwise
        lines = [f"  {'kind':<10} {'values':>7} {'bitwise':>8} {'failed':>7}"]
        lines += [f"  {k:<10} {count[k]:>7} {bits[k]:>8} {failed[k]:>7}" for k in KINDS if count[k]]
        worst = [r for r in sorted(self.rows, key=lambda r: -r.badness) if r.badness > 0][:SHOWN_ROWS]
        if worst:
            lines.append(f"  {'step':<8} {'kind':<10} {'error':>10} {'allowed':>10}  name")
        for r in worst:
            mark = "" if r.ok else "  <- fails"
            lines.append(f"  {r.step:<8} {r.kind:<10} {r.error:>10.3g} {r.tolerance:>10.3g}  {r.name}{mark}")
        return lines

    def _remarks(self) -> list[str]:
        lines = [] if self.first_departure is None else [f"first departure: {self.first_departure}"]
        lines += [f"fell: {fall}" for fall in self.falls]
        return lines + [f"note: {note}" for note in self.notes]
