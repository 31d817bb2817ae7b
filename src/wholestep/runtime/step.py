"""Step: the compiled training step a user calls in their loop.

It calls the user's loss through the front end, whose guards say which captured graph holds, and runs in place of that graph
the captured step: forward, backward and update. Where no graph holds and none can be made, a lower rung takes the step.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from wholestep.capture.batch import flatten, split_batch
from wholestep.capture.front import Front, LossGraph
from wholestep.capture.ladder import WHOLE, Fall
from wholestep.capture.modes import is_user_file
from wholestep.capture.preflight import notes_on
from wholestep.errors import (
    BadBatch,
    BadOption,
    CaptureRefused,
    TierFailed,
    UnsupportedModel,
    WholestepError,
    WholestepWarning,
)
from wholestep.graph.counted import counted
from wholestep.graph.notes import Note
from wholestep.graph.plan import Plan
from wholestep.graph.printer import fingerprint
from wholestep.graph.training_graph import TrainingGraph
from wholestep.lower import kernels_of
from wholestep.ops.tuner import Choice
from wholestep.options import is_whole
from wholestep.passes.stream_state import update_rounds
from wholestep.runtime.binding import StateMoved, guard_steps_by_hand
from wholestep.runtime.blame import Example, blamed
from wholestep.runtime.compiled import LowerRung
from wholestep.runtime.kept import Kept
from wholestep.runtime.one_step import OneStep
from wholestep.runtime.random import chosen_seed
from wholestep.runtime.variant import AssumptionFailed, Variant
from wholestep.runtime.variants import Builder, Making, TooManyShapes, Variants

TRIES = 2
"""Captures tried in a row where an eager step between them may help."""
MOST_WRONG = 4
"""Steps for which something about data was taken for granted that did not hold, and in which eager PyTorch met no error: so many,
and one in so many, end the attempt."""


class Step:
    """step(batch) -> loss, or (loss, aux). The modules and the optimizer stay the owners of all state."""

    def __init__(self, compiler: Builder, check: Callable[..., Any] | None = None) -> None:
        """`check`: called before the first live run of a variant; what it returns is called with the outcome after it."""
        self.subject, self.options, self.check = compiler.subject, compiler.options, check
        self.seed = chosen_seed(self.options.seed)
        self.count = 0
        self.grad_norm: torch.Tensor | None = None
        self.falls: tuple[Fall, ...] = ()
        self.notes: list[Note] = []
        self.front = Front(self.subject, dynamic=True if self.options.dynamic is True else None, note=self._note)
        self.buffers = Kept()
        """Before a step whose update may be left out."""
        self.making = Making(compiler, self._note, self.make_room)
        self.room = compiler.make_room
        """(variant that will run, or None for one that is not made yet; the recordings of others): for a memory budget."""
        self.unchecked = False
        """Whether a variant has not been compared with eager PyTorch yet."""
        self._tables: dict[LossGraph, Variants] = {}
        self._unguarded: dict[Any, Variant] = {}
        """With guards="off": by the structure and shapes of the batch."""
        self._refusals = 0
        self._assumed_wrongly = 0
        self._eager_first = False
        """Whether a real eager step comes first, in which libraries install their hooks and fill their caches."""
        self.unsound: str | None = None
        """The error between the updates of two layers, until a checkpoint is loaded."""
        self._lower: LowerRung | None = None
        self._example: Example | None = None
        self._latest: Variant | None = None
        self._running: Variant | None = None
        for note in notes_on(self.subject):
            self._note(note)

    def __reduce__(self) -> Any:
        """For copy and pickle."""
        raise UnsupportedModel(
            "a Step cannot be copied or pickled: it holds compiled code and is bound to its model and optimizer",
            hint="copy or save those (wholestep.save), and compile a step for them again",
        )

    # ---- the call ----

    def __call__(self, batch: Any) -> Any:
        self.refuse_unsound()
        micro = self._micro_batches(batch)
        optimizer = self.subject.optimizer
        num_states = 0 if optimizer is None else len(optimizer.state)
        try:
            (loss, aux), self.grad_norm = self._run(micro)
        except Exception as error:
            if optimizer is not None:
                for parameter in list(optimizer.state)[num_states:]:
                    del optimizer.state[parameter]  # made for this step, which has not been taken
            if isinstance(error, TierFailed) and self._updates_layer_by_layer():
                self.unsound = str(error)
            if isinstance(error, WholestepError):
                raise
            told = blamed(self._example, micro[0], error)
            if told is not None:
                raise told from None  # one line that names the difference and the user's own, in place of torch's forty
            raise error.with_traceback(_users_part(error.__traceback__)) from error.__cause__
        if self.count == 0 and optimizer is not None:
            guard_steps_by_hand(optimizer)
        self.count += 1
        return (loss, aux) if aux else loss

    def _run(self, micro: list[Any]) -> Any:
        if self._eager_first:
            result = OneStep(self, micro).in_torch(LowerRung(self.subject, self._note, compiled=False))
            self._eager_first, self._refusals = False, 1
            return result
        for _ in range(2):
            run, refused, moved = OneStep(self, micro), None, None
            try:
                return run.whole(known_only=self._lower is not None)
            except CaptureRefused as found:
                refused = found
            except StateMoved as found:
                moved = str(found)
            # outside of the handlers: an error of the user's own code is no consequence of what Dynamo could not do
            if moved is not None:
                # between two micro-batches eager PyTorch takes the others
                eager = LowerRung(self.subject, self._note, compiled=False)
                taken = run.in_torch(eager) if run.results else None
                self._forget(moved)
                if taken is not None:
                    return taken
            elif refused is not None and not (self._lower is None and self.front.specialise(refused)):
                return self._below(run, refused)
        return self._below(OneStep(self, micro), CaptureRefused("parameters, buffers or optimizer state keep moving"))

    def _below(self, run: OneStep, refused: CaptureRefused) -> Any:
        """This step on a lower rung; what ran of it already is kept."""
        self._refuse_below(refused)
        if isinstance(refused, TooManyShapes):
            self._note(Note("rung", f"{refused} run in eager PyTorch"))
            return run.in_torch(LowerRung(self.subject, self._note, compiled=False))
        if isinstance(refused, AssumptionFailed) and self._lower is None:
            return self._without_assumption(run, refused)
        if self._lower is None:
            if refused.curable and self._refusals + 1 < TRIES:
                result = run.in_torch(
                    LowerRung(self.subject, self._note, compiled=False)
                )  # an error here is the user's own
                self._refusals += 1
                self._note(Note("rung", f"one step in eager PyTorch, then captured again: {refused}"))
                return result
            self._fall(refused)
        assert self._lower is not None
        return run.in_torch(self._lower)

    def _refuse_below(self, refused: CaptureRefused) -> None:
        """Several ranks have no lower rung."""
        if self.subject.ranks.several:
            text = f"{self.subject.ranks.mesh} needs the whole step, which was not captured: {refused.reason}"
            raise UnsupportedModel(text, where=refused.where, hint="leave mesh out") from refused

    def _without_assumption(self, run: OneStep, refused: AssumptionFailed) -> Any:
        """This step in eager PyTorch, which mostly raises; where it does not, again and again, all following ones too."""
        result = run.in_torch(LowerRung(self.subject, self._note, compiled=False))
        self._note(Note("rung", f"a step ran in eager PyTorch: {refused}"))
        self._assumed_wrongly += 1
        if self._assumed_wrongly >= MOST_WRONG and self._assumed_wrongly * MOST_WRONG > self.count:
            self._forget_graphs()
            self._fall(refused)
        return result

    def _fall(self, refused: CaptureRefused) -> None:
        """From now on only graphs that are there already are used."""
        compiled = refused.compiled and self.options.backend == "inductor"
        self._lower = LowerRung(self.subject, self._note, compiled=compiled)
        self.falls = (*self.falls, Fall(WHOLE, refused.reason, refused.where))
        below = "through torch.compile, with graph breaks" if compiled else "in eager PyTorch"
        which = "the step runs" if self._latest is None else "steps that no captured graph holds for run"
        warnings.warn(f"{which} {below}: {self.falls[-1]}", WholestepWarning, stacklevel=5)

    def _micro_batches(self, batch: Any) -> list[Any]:
        count = self.subject.accumulate
        if count == 1:
            return [batch]
        if isinstance(batch, list) and len(batch) == count and _alike(batch):
            return batch
        if isinstance(batch, list) and self._example is not None and all(map(self._example.is_like, batch)):
            hint = f"give {count} of them, or one batch to be cut"
            raise BadBatch(f"{len(batch)} micro-batches, and accumulate={count}", hint=hint)
        return split_batch(batch, count)

    # ---- captured graphs ----

    def prepare(self, batch: Any) -> None:
        """Capture for an example batch. Nothing runs, and nothing of the user's is touched."""
        self._example = self._example or Example.of(batch)
        try:
            OneStep(self, [batch]).capture_only()
        except CaptureRefused as refused:
            if self._lower is None and self.front.specialise(refused):
                return self.prepare(batch)
            self._refuse_below(refused)
            if refused.curable:
                self._eager_first = True
                ahead = "not captured yet; one step in eager PyTorch comes first, then it is tried again"
                self._note(Note("rung", f"{ahead}: {refused}"))
            else:
                self._fall(refused)
        return None

    def variant_for(self, batch: Any) -> Variant | None:
        """The captured step for a batch, made where there is none, not run; None where a lower rung takes it."""
        self.prepare(self._micro_batches(batch)[0])
        return None if self._lower is not None else self._latest

    def variant_of(self, graph: LossGraph, args: tuple, batch: Any) -> Variant:
        """The captured step for a call of `graph`."""
        table = self._tables.get(graph)
        if table is None:
            # captured anew for what the Python does beside it, the computation is often the same (a first call that caches)
            assert self.front.current is not None
            facts = self.front.current.unguarded.facts
            known = (t for g, t in self._tables.items() if t.facts == facts and g.digest == graph.digest)
            table = self._tables[graph] = next(known, None) or Variants(self.making, graph, facts)
        before = self.making.captures
        variant = table.find(args, batch)
        if self.making.captures > before or self._latest is None:
            self.unchecked = True
            self._refusals = 0
        self._latest = variant
        return variant

    def unguarded_variant(self, batch: Any) -> tuple[Variant, list[torch.Tensor]]:
        """With guards="off": the user's code traced as it ran once, for this structure of batch."""
        tensors, spec = flatten(batch)
        key = (spec, tuple((t.shape, t.dtype, t.device) for t in tensors), self.subject.root.training)
        if key not in self._unguarded:
            capture = self.making.captured(None, batch)
            self._unguarded[key] = self.making.lowered(capture, None, self.options.backend)
            self.unchecked = True
        self._latest = self._unguarded[key]
        return self._latest, tensors

    def make_room(self, variant: Variant | None) -> None:
        """Where memory is short, recordings of other sizes go before this one runs, or is made."""
        if self.room is None or (variant is not None and variant is self._running):
            return
        every = [v for table in self._tables.values() for v in table.all]
        others = {id(other): other for other in every if other is not variant}
        self.room(variant, [recording for other in others.values() for recording in other.recordings])
        self._running = variant

    def _forget(self, reason: str) -> None:
        """The model itself changed: all variants are void."""
        self._note(Note("capture", f"captured anew because {reason}"))
        self.subject.refresh()
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        self.front.forget()
        self._tables.clear()
        self._unguarded.clear()
        self.making.gradients.clear()
        self.making.shapes_seen.clear()

    def _note(self, note: Note) -> None:
        if note not in self.notes:
            self.notes.append(note)

    # ---- what it tells ----

    @property
    def rung(self) -> str:
        """How the latest step ran, or would run."""
        if self._lower is not None and (self._latest is None or not self.front.entries):
            return self._lower.name
        if self._latest is None:
            return "not captured yet"
        return WHOLE if self._lower is None else f"{WHOLE}, else {self._lower.name}"

    @property
    def captures(self) -> int:
        return self.making.captures

    @property
    def compilations(self) -> int:
        return self.making.compilations

    @property
    def seconds(self) -> dict[str, float]:
        """Spent on capturing (Dynamo's part included) and on lowering."""
        return self.making.seconds | {"capture": self.making.seconds["capture"] + self.front.seconds}

    @property
    def graph(self) -> TrainingGraph | None:
        """The captured graph in use."""
        return self._latest.capture.graph if self._latest else None

    @property
    def plan(self) -> Plan | None:
        """What was decided about memory and kernels, for the captured graph in use."""
        plan = self._latest.capture.plan if self._latest else None
        if plan is None:
            return None
        found = {key: name for key, name in kernels_of(self.choices).items() if key not in plan.kernel}
        return dataclasses.replace(
            plan, kernel={**found, **plan.kernel}
        )  # what was asked for last, since the last counts

    @property
    def choices(self) -> dict[str, Choice]:
        """What was chosen by measuring, so far: key of a call -> its kernel; `lowering`, `cuda graph`."""
        return dict(self.regions.get("choices", {}))

    @property
    def program(self) -> str | None:
        """A name for the captured graph in use that equal graphs share."""
        return None if self.graph is None else fingerprint(self.graph)

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

    def _updates_layer_by_layer(self) -> bool:
        return self.graph is not None and len(update_rounds(list(self.graph.graph.nodes))) > 1

    def refuse_unsound(self) -> None:
        """An error where a disk failed while some layers were updated and others were not: that is the state of no step."""
        if self.unsound is not None:
            what = f"a step failed between the updates of two layers, so parameters and state are of no one step: {self.unsound}"
            hint = "load a checkpoint (wholestep.load(..., step=step)); early_update=False updates when nothing can fail any more"
            raise TierFailed(what, hint=hint)

    def state_dict(self) -> dict[str, Any]:
        """Seed and step count: with them the random numbers of the following steps are the same. In fp16 the loss scale too."""
        state: dict[str, Any] = {"seed": self.seed, "count": self.count}
        if self.subject.loss_scale is not None:
            state["loss_scale"] = self.subject.loss_scale.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or not all(is_whole(state.get(name)) for name in ("seed", "count")):
            raise BadOption("this is not the state_dict() of a Step", hint="it has whole numbers 'seed' and 'count'")
        self.seed, self.count, self.unsound = state["seed"], state["count"], None
        if self.subject.loss_scale is not None and "loss_scale" in state:  # a run in another precision has none
            self.subject.loss_scale.load_state_dict(state["loss_scale"])

    def explain(self) -> str:
        """What was captured, what fell back and why, how it runs."""
        from wholestep.runtime.explain import explain

        return explain(self)

    def __repr__(self) -> str:
        done = f"{counted(self.count, 'step')}, {counted(self.captures, 'capture')}"
        return f"Step({self.rung}, backend {self.options.backend}, {done})"


def _alike(parts: list[Any]) -> bool:
    """Whether a list can be one of micro-batches: bare tensors of several kinds are the parts of one batch, [x, y]."""
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return True
    return len({(part.dtype, part.dim()) for part in parts}) == 1


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the first line of the user's code on; all of it where it has none."""
    inner = trace
    while inner is not None and not is_user_file(inner.tb_frame.f_code.co_filename):
        inner = inner.tb_next
    return inner or trace
