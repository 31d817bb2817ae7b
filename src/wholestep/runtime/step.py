"""Step: the compiled training step a user calls in their loop.

It keeps the variants captured so far, finds the one that fits the batch and the present state of modules and optimizer, and
runs it. What changes between steps and is burned into a graph leads to another capture; what moved is bound anew.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wholestep import compat
from wholestep.capture.batch import BatchSpec, flatten, split_batch
from wholestep.capture.guards import Guards
from wholestep.capture.ladder import Climb, Fall
from wholestep.capture.subject import Subject
from wholestep.capture.trace import Capture
from wholestep.errors import BadBatch, WholestepError, WholestepWarning
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph
from wholestep.runtime import shapes as shape_rules
from wholestep.runtime.binding import StateMoved
from wholestep.runtime.eager import eager_step
from wholestep.runtime.variant import Variant

MAX_PYTHON_CAPTURES = 6
"""Captures caused by changed Python values before the step stays eager: a value that changes at every step is data."""
MOST_STATIC_SHAPES = 16
"""Shapes captured one by one where sizes cannot be symbolic; each costs seconds, so the rest runs in eager PyTorch."""
USES_BEFORE_COMPILING = 8
"""A rare shape that keeps coming back is compiled after so many interpreted runs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How a Step compiles; given by `wholestep.compile`."""

    capture: Callable[..., Climb]
    """(subject, tensors, spec, dynamic) -> Climb."""
    lower: Callable[[TrainingGraph, str], Any]
    """(graph, backend) -> Runner."""
    backend: str
    dynamic: bool | None = None
    check: Callable[[Step, Variant, list[list[torch.Tensor]], BatchSpec], Callable[[Any], None] | None] | None = None
    """Called before the first live step of a variant; what it returns is called with the step's result after it."""
    make_room: Callable[[Variant | None, list[Any]], None] | None = None
    """(variant that will run, or None for one that is not made yet; the recordings of others): for a memory budget."""


class Step:
    """step(batch) -> loss, or (loss, aux). The modules and the optimizer stay the owners of all state."""

    def __init__(self, subject: Subject, settings: Settings, seed: int | None = None) -> None:
        self.subject, self.settings = subject, settings
        self.seed = torch.initial_seed() & (2**63 - 1) if seed is None else seed
        self.count = 0
        self.grad_norm: torch.Tensor | None = None
        self.captures = 0
        self.compilations = 0
        self.falls: tuple[Fall, ...] = ()
        self.notes: list[str] = []
        self.rung = "not captured yet"
        self.seconds: dict[str, float] = {"capture": 0.0, "lower": 0.0}
        self._guards = Guards(subject)
        self._worlds: list[list[Any]] = []
        """Readings of the guards; a world is known by its place here."""
        self._world = -1
        self._variants: dict[tuple, Variant | None] = {}
        self._symbolic: list[tuple[tuple, Variant, Any, Any]] = []
        self._seen: dict[tuple, list[Any]] = {}
        self._static: set[tuple] = set()
        """Structures of batch whose sizes could not be made symbolic."""
        self._stays_eager: str | None = None
        self._structure: BatchSpec | None = None
        """Of the example batch."""
        self._latest: Variant | None = None
        self._running: Variant | None = None

    # ---- the call ----

    def __call__(self, batch: Any) -> Any:
        micro = self._micro_batches(batch)
        flat = [flatten(b) for b in micro]
        spec = flat[0][1]
        if any(other != spec for _, other in flat[1:]):
            raise BadBatch("the micro-batches of one step differ in structure")
        tensors = [t for t, _ in flat]
        try:
            (loss, aux), self.grad_norm = self._run(micro, tensors, spec)
        except Exception as error:
            self._blame_structure(spec, error)
            raise
        self.count += 1
        return (loss, aux) if aux else loss

    def _blame_structure(self, spec: BatchSpec, error: Exception) -> None:
        """A batch of another structure than the example, with which the user's own code fails: say how it differs."""
        first = self._structure
        if first is None or spec.tree == first.tree or isinstance(error, WholestepError):
            return
        lacking = [name for name in first.names if name not in spec.names]
        new = [name for name in spec.names if name not in first.names]
        parts = [f"{what} {', '.join(map(repr, names))}" for what, names in (("lacks", lacking), ("adds", new)) if names]
        how = " and ".join(parts) or "has other values beside its tensors"
        raise BadBatch(
            f"the batch {how}, compared with the example batch, and the step fails with it: {type(error).__name__}: {error}",
            hint=f"the step was compiled for tensors {', '.join(map(repr, first.names))}",
        ) from error

    def _micro_batches(self, batch: Any) -> list[Any]:
        count = self.subject.accumulate
        if count == 1:
            return [batch]
        if isinstance(batch, list) and len(batch) == count and _alike(batch):
            return batch
        return split_batch(batch, count)

    def _run(self, micro: list[Any], tensors: list[list[torch.Tensor]], spec: BatchSpec) -> Any:
        for _ in range(2):
            variant = self.variant_for(tensors[0], spec)
            if variant is None:
                return eager_step(self.subject, micro)
            if any(shape_rules.shapes_of(t) != shape_rules.shapes_of(tensors[0]) for t in tensors):
                self._note("micro-batches of unequal shapes run in eager PyTorch: pad them to one shape")
                return eager_step(self.subject, micro)
            self._make_room(variant)
            try:
                check = self.settings.check if variant.uses == 0 else None
                afterwards = check(self, variant, tensors, spec) if check is not None else None
                result = variant.run(tensors, self.seed, self.count)
                if afterwards is not None:
                    afterwards(result)
                return result
            except StateMoved as moved:
                self._forget(str(moved))
        return eager_step(self.subject, micro)

    def _make_room(self, variant: Variant | None) -> None:
        """Where memory is short, recordings of other sizes go before this one runs, or is made."""
        if self.settings.make_room is None or (variant is not None and variant is self._running):
            return
        others = {id(other): other for other in self._variants.values() if other is not None and other is not variant}
        self.settings.make_room(variant, [recording for other in others.values() for recording in other.recordings])
        self._running = variant

    def compiled_for(self, spec: BatchSpec) -> None:
        """The structure that batches are expected to have; others are captured when they come."""
        self._structure = spec

    # ---- finding or making the variant ----

    def variant_for(self, tensors: Sequence[torch.Tensor], spec: BatchSpec) -> Variant | None:
        """The variant that fits now; None means eager."""
        if self._stays_eager is not None:
            return None
        if self._guards.restructured():
            self._forget("a submodule was replaced, added or removed")
        world = self._current_world()
        shapes = shape_rules.shapes_of(tensors)
        base = (world, spec, shape_rules.rank_signature(tensors))
        key = (base, shapes)
        if key in self._variants:
            variant = self._variants[key]
            if variant is not None and variant.provisional and variant.uses >= USES_BEFORE_COMPILING:
                variant = self._variants[key] = self._lowered(variant.capture, self.settings.backend)
            return variant
        for symbolic_base, variant, dims, template in self._symbolic:
            if symbolic_base == base and shape_rules.fits(
                shapes, dims, template, variant.capture.symbols, variant.capture.guards
            ):
                return variant
        if self._stays_eager is not None:
            return None
        return self._make(base, shapes, tensors, spec)

    def _make(self, base: tuple, shapes: Any, tensors: Sequence[torch.Tensor], spec: BatchSpec) -> Variant | None:
        self._make_room(None)
        seen = self._seen.setdefault(base, [])
        seen.append(shapes)
        dims = None
        if base in self._static:
            if len(seen) > MOST_STATIC_SHAPES:
                self._note(f"shapes beyond the first {MOST_STATIC_SHAPES} run in eager PyTorch: their sizes cannot be symbolic")
                return None
        elif self.settings.dynamic is not False and len(seen) >= shape_rules.SIZES_BEFORE_SYMBOLIC:
            dims = shape_rules.symbolic_dims(seen)
        elif self.settings.dynamic is True:
            dims = [{d: f"size{i}_{d}" for d in range(t.dim())} for i, t in enumerate(tensors)]
        if dims is not None and all(shapes[leaf][d] > 1 for leaf, found in enumerate(dims) for d in found):
            variant = self._capture_symbolic(base, shapes, tensors, spec, dims)
            if variant is not None:
                return variant
        variant = self._capture_static(tensors, spec, provisional=len(seen) > 1 and self.settings.dynamic is not False)
        for known in self._bases(base, variant.capture if variant else None):
            self._variants[(known, shapes)] = variant
        return variant

    def _bases(self, base: tuple, capture: Capture | None) -> list[tuple]:
        """Where a capture holds: here, and in the world as the forward itself will leave it at its first live run."""
        if capture is None or not capture.settled:
            return [base]
        values = self._guards.with_attributes(self._worlds[base[0]], capture.settled)
        if values not in self._worlds:
            self._worlds.append(values)
        settled = (self._worlds.index(values), *base[1:])
        self._seen.setdefault(settled, self._seen[base])  # one list: sizes count wherever they were met
        return [base, settled]

    def _capture_symbolic(self, base: tuple, shapes: Any, tensors: Any, spec: BatchSpec, dims: Any) -> Variant | None:
        climb = self._climb(tensors, spec, dims)
        if climb.capture is None:
            self._note(f"sizes stay static: {climb.falls[-1]}")
            self._static.add(base)
            return None
        capture = climb.capture
        self.rung, self.falls = capture.rung, climb.falls
        variant = self._lowered(capture, self.settings.backend)
        # read again: passes and compiling may have relied on more facts about the sizes than tracing did
        capture.guards = compat.shape_guards(capture.fake_mode)
        if not all(shape_rules.fits(s, dims, shapes, capture.symbols, capture.guards) for s in self._seen[base]):
            self._note("sizes stay static: the step relies on a size that should vary")
            self._static.add(base)
            return None
        self._symbolic += [(known, variant, dims, shapes) for known in self._bases(base, capture)]
        fitting = self._bases(base, capture)  # these sizes need not be interpreted any more
        for key in [k for k, v in self._variants.items() if k[0] in fitting and v is not None and v.provisional]:
            del self._variants[key]
        varying = sorted({name for found in dims for name in found.values()})
        self._note(f"{len(varying)} batch dimension(s) seen with several sizes are symbolic now")
        return variant

    def _capture_static(self, tensors: Any, spec: BatchSpec, *, provisional: bool) -> Variant | None:
        climb = self._climb(tensors, spec, None)
        self.falls = climb.falls
        if climb.capture is None:
            self.rung = "eager"
            reasons = "; ".join(str(f) for f in climb.falls)
            warnings.warn(f"the step runs in eager PyTorch: {reasons}", WholestepWarning, stacklevel=4)
            return None
        self.rung = climb.capture.rung
        return self._lowered(climb.capture, "interpret" if provisional else self.settings.backend, provisional)

    def _climb(self, tensors: Any, spec: BatchSpec, dims: Any) -> Climb:
        began = time.perf_counter()
        climb = self.settings.capture(self.subject, tensors, spec, dims)
        self.captures += 1
        self.seconds["capture"] += time.perf_counter() - began
        for note in climb.notes + tuple(climb.capture.notes if climb.capture else ()):
            self._note(note)
        if climb.capture:
            rewritten = {n.split(" changes in every forward")[0] for n in climb.capture.notes if " changes in every" in n}
            if rewritten:
                self._guards.exclude(rewritten)
                self._worlds[self._world] = self._guards.values()
        return climb

    def _lowered(self, capture: Capture, backend: str, provisional: bool = False) -> Variant:
        began = time.perf_counter()
        variant = Variant(self.subject, capture, lambda graph: self.settings.lower(graph, backend), provisional)
        self.compilations += 0 if provisional else 1
        self.seconds["lower"] += time.perf_counter() - began
        self._latest = variant
        return variant

    def _current_world(self) -> int:
        """A number for the present Python values; a new value of any of them is a new world."""
        values = self._guards.values()
        if self._world >= 0 and values == self._worlds[self._world]:
            return self._world
        if values in self._worlds:
            self._world = self._worlds.index(values)
            return self._world
        if self._worlds:
            changed = list(self._guards.differences(self._worlds[self._world], values))[:3]
            self._note(f"captured anew because {', '.join(changed)}")
            if len(self._worlds) >= MAX_PYTHON_CAPTURES:
                self._stays_eager = f"{', '.join(changed)} keeps changing; pass such a value as a tensor in the batch"
                warnings.warn(f"the step runs in eager PyTorch from now on: {self._stays_eager}", WholestepWarning, stacklevel=5)
                self.rung = "eager"
        self._world = len(self._worlds)
        self._worlds.append(values)
        return self._world

    def _forget(self, reason: str) -> None:
        """The model itself changed: all variants are void."""
        self._note(f"captured anew because {reason}")
        self.subject.refresh()
        self._guards = Guards(self.subject)
        self._worlds, self._world = [], -1
        self._variants.clear()
        self._symbolic.clear()
        self._seen.clear()
        self._static.clear()

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # ---- what it tells ----

    @property
    def graph(self) -> TrainingGraph | None:
        """The captured graph in use."""
        return self._latest.capture.graph if self._latest else None

    @property
    def plan(self) -> Plan | None:
        """What was decided about memory, for the captured graph in use."""
        return self._latest.capture.plan if self._latest else None

    @property
    def update_graph(self) -> TrainingGraph | None:
        """With accumulation, the graph of the update."""
        return self._latest.capture.update if self._latest else None

    @property
    def regions(self) -> dict[str, Any]:
        """Facts about the lowering in use."""
        return self._latest.runner.describe() if self._latest else {}

    @property
    def loss_scale(self) -> torch.Tensor | None:
        """The present loss scale of precision "fp16", a 0-d tensor on the device."""
        found = self.subject.loss_scale
        return None if found is None else found.numbers[0].clone()

    def state_dict(self) -> dict[str, Any]:
        """Seed and step count: with them the random numbers of the following steps are the same. In fp16 the loss scale too."""
        state: dict[str, Any] = {"seed": self.seed, "count": self.count}
        if self.subject.loss_scale is not None:
            state["loss_scale"] = self.subject.loss_scale.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed, self.count = int(state["seed"]), int(state["count"])
        if self.subject.loss_scale is not None and "loss_scale" in state:  # a run in another precision has none
            self.subject.loss_scale.load_state_dict(state["loss_scale"])

    def explain(self) -> str:
        """What was captured, what fell back and why, how it runs."""
        from wholestep.runtime.explain import explain

        return explain(self)

    def __repr__(self) -> str:
        return f"Step({self.rung}, backend {self.settings.backend}, {self.count} steps, {self.captures} captures)"


def _alike(parts: list[Any]) -> bool:
    """Whether a list can be one of micro-batches: bare tensors of several kinds are the parts of one batch, [x, y]."""
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return True
    return len({(part.dtype, part.dim()) for part in parts}) == 1
