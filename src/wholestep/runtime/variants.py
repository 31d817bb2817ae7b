"""The captured forms of one LossGraph, by the sizes of what a call brings.

The first shape is captured and compiled as it is. A second one (the last, ragged batch) is captured and interpreted at once.
A dimension that was seen with three sizes becomes a symbol, and one compiled graph serves all. What moved is bound anew; an
argument that is another tensor at every call becomes an input like those of the batch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, Protocol

import torch

from wholestep import compat
from wholestep.capture.front import LossGraph
from wholestep.capture.reading import Reading, read
from wholestep.capture.subject import Subject
from wholestep.capture.trace import Capture
from wholestep.errors import CaptureRefused
from wholestep.graph.notes import Note
from wholestep.graph.strides import is_dense
from wholestep.graph.training_graph import Input, Role, TrainingGraph
from wholestep.options import Options
from wholestep.runtime import shapes as shape_rules
from wholestep.runtime.variant import Variant

MOST_STATIC_SHAPES = 16
"""Shapes captured one by one where sizes cannot be symbolic; each costs seconds, so the rest runs in eager PyTorch."""
USES_BEFORE_COMPILING = 8
"""A rare shape that keeps coming back is compiled after so many interpreted runs."""
MOVES = 2
"""An argument that was replaced so often by another tensor is expected to be another one again."""


class TooManyShapes(CaptureRefused):
    """This call runs in eager PyTorch; others do not."""


class Builder(Protocol):
    """What makes programs for a Step: the Compiler, which comes after this folder."""

    subject: Subject
    options: Options

    def program(self, reading: Reading | None, batch: Any, dims: Any = None) -> Capture:
        """Captured to applied; raises CaptureRefused."""

    def lower(self, graph: TrainingGraph, backend: str | None = None) -> Any:
        """A Runner."""

    @property
    def make_room(self) -> Callable[..., None] | None:
        """Takes memory from what does not run; None where nothing is short."""


@dataclasses.dataclass(slots=True)
class Making:
    """How a Step captures and lowers, and what it counts."""

    builder: Builder
    note: Callable[[Note], None]
    make_room: Callable[[Any], None] = lambda variant: None
    """Called before a variant is made."""
    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: {"capture": 0.0, "lower": 0.0})
    captures: int = 0
    compilations: int = 0
    gradients: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Where micro-batches add up."""
    shapes_seen: dict[Any, list[tuple]] = dataclasses.field(default_factory=dict)
    """By what the inputs of a call are: sizes count wherever they were met."""

    @property
    def subject(self) -> Subject:
        return self.builder.subject

    @property
    def backend(self) -> str:
        return self.builder.options.backend

    @property
    def dynamic(self) -> bool | None:
        return self.builder.options.dynamic

    def captured(self, reading: Reading | None, batch: Any, dims: Any = None) -> Capture:
        began = time.perf_counter()
        try:
            with compat.ONE_AT_A_TIME:
                made = self.builder.program(reading, batch, dims)
        finally:
            self.captures += 1
            self.seconds["capture"] += time.perf_counter() - began
        for note in made.notes:
            self.note(note)
        return made

    def lowered(self, capture: Capture, reading: Reading | None, backend: str, provisional: bool = False) -> Variant:
        began = time.perf_counter()
        with compat.ONE_AT_A_TIME:
            variant = Variant(
                self.subject,
                capture,
                reading,
                lambda graph: self.builder.lower(graph, backend),
                provisional,
                self.gradients,
            )
        self.compilations += 0 if provisional else 1
        self.seconds["lower"] += time.perf_counter() - began
        return variant


class Variants:
    """All forms of one LossGraph."""

    def __init__(self, making: Making, graph: LossGraph, facts: Any = None) -> None:
        """`facts`: the structure of the optimizer and flags of parameters, for which the variants are."""
        self.making, self.graph, self.facts = making, graph, facts
        self.state: list[int] = []
        """Arguments that are tensors of modules."""
        self.tensors: list[torch.Tensor] = []
        """What they were at the last call."""
        self.moves: dict[int, int] = {}
        self.places: tuple[Input | None, ...] = ()
        self.brought: list[int] = []
        """Arguments that are inputs of every call."""
        self.by_shape: dict[tuple, Variant] = {}
        self.symbolic: tuple[Variant, Any, Any] | None = None
        self.seen: list[Any] = []
        self.trained: list[str] = []
        """The parameters that are trained, as of the last reading."""
        self.static = False
        """Whether sizes could not be made symbolic."""
        self.refused: CaptureRefused | None = None
        """Why the graph could not be traced: it is not tried again."""

    @property
    def all(self) -> list[Variant]:
        found = list(self.by_shape.values()) + ([self.symbolic[0]] if self.symbolic else [])
        return list({id(v): v for v in found}.values())

    def find(self, args: Sequence[Any], batch: Any) -> Variant:
        """The variant for this call, made where there is none; raises CaptureRefused where there can be none."""
        if not self.places or not all(map(is_, [args[i] for i in self.state], self.tensors)):
            self._read(args, batch)
        shapes = tuple(args[i].shape for i in self.brought)
        variant = self.by_shape.get(shapes)
        if variant is not None:
            if variant.provisional and variant.uses >= USES_BEFORE_COMPILING:
                reading = self._reading(args)
                variant = self.by_shape[shapes] = self.making.lowered(variant.capture, reading, self.making.backend)
            return variant
        if self.symbolic is not None:
            variant, dims, template = self.symbolic
            if shape_rules.fits(shapes, dims, template, variant.capture.symbols, variant.capture.guards):
                return variant
        return self._make(args, batch, shapes)

    def _read(self, args: Sequence[Any], batch: Any) -> None:
        """Look at the arguments again: a tensor of a module is another one than before."""
        moved = [i for i, t in zip(self.state, self.tensors) if args[i] is not t]
        for i in moved:
            self.moves[i] = self.moves.get(i, 0) + 1
            place = self.places[i]
            if self.moves[i] > MOVES and place is not None and place.role is not Role.PARAMETER:
                self.graph.copied_in.add(i)
        subject = self.making.subject
        subject.refresh()
        places, trained = read(subject, self.graph, args, batch).places, list(subject.trained)
        if places != self.places or trained != self.trained:
            self.trained = trained
            self.by_shape.clear()
            self.symbolic, self.static, self.refused = None, False, None
            self.places = places
        live = (Role.PARAMETER, Role.BUFFER, Role.CONSTANT)
        self.state = [i for i, place in enumerate(places) if place is not None and place.role in live]
        self.brought = [i for i, place in enumerate(places) if place is not None and place.role is Role.BATCH]
        self.tensors = [args[i] for i in self.state]
        for variant in self.all:
            variant.binding.bound = False  # a name may stand for another module's tensor now
        kinds = tuple((places[i], args[i].dim(), args[i].dtype, args[i].device) for i in self.brought)
        self.seen = self.making.shapes_seen.setdefault(kinds, [])

    def _reading(self, args: Sequence[Any]) -> Reading:
        """What is a slice of something, or expanded, is read as if it had memory of its own: the next batch may lie otherwise."""
        loose = {i for i in self.brought if args[i].layout == torch.strided and not is_dense(args[i])}
        return Reading(self.graph, [a.contiguous() if i in loose else a for i, a in enumerate(args)], self.places)

    def _make(self, args: Sequence[Any], batch: Any, shapes: tuple) -> Variant:
        making = self.making
        if shapes not in self.seen:
            self.seen.append(shapes)
        reading = self._reading(args)
        dims = None
        if self.static:
            if len(self.by_shape) >= MOST_STATIC_SHAPES:
                raise TooManyShapes(f"shapes beyond the first {MOST_STATIC_SHAPES}: their sizes cannot be symbolic")
        elif making.dynamic is not False and len(self.seen) >= shape_rules.SIZES_BEFORE_SYMBOLIC:
            dims = shape_rules.symbolic_dims(self.seen)
        elif making.dynamic is True:
            dims = shape_rules.all_symbolic(shapes)
        if dims is not None and shape_rules.may_vary(shapes, dims):
            variant = self._symbolic(reading, batch, dims, shapes)
            if variant is not None:
                return variant
        provisional = self.seen[0] != shapes and making.dynamic is not False
        if self.refused is not None:
            raise self.refused
        making.make_room(None)
        try:
            capture = making.captured(reading, batch)
        except CaptureRefused as refused:
            self.refused = refused
            raise
        variant = making.lowered(capture, reading, "interpret" if provisional else making.backend, provisional)
        self.by_shape[shapes] = variant
        return variant

    def _symbolic(self, reading: Reading, batch: Any, dims: Any, shapes: tuple) -> Variant | None:
        making = self.making
        try:
            capture = making.captured(reading, batch, dims)
        except CaptureRefused as refused:
            making.note(Note("sizes", f"sizes stay static: {refused}"))
            self.static = True
            return None
        variant = making.lowered(capture, reading, making.backend)
        # read again: passes and compiling may have relied on more facts about the sizes than tracing did
        capture.guards = compat.shape_guards(capture.fake_mode)
        if not all(shape_rules.fits(s, dims, shapes, capture.symbols, capture.guards) for s in self.seen):
            making.note(Note("sizes", "sizes stay static: the step relies on a size that should vary"))
            self.static = True
            return None
        self.symbolic = (variant, dims, shapes)
        self.by_shape = {known: v for known, v in self.by_shape.items() if not v.provisional}
        varying = sorted({name for found in dims for name in found.values()})
        making.note(Note("sizes", f"{len(varying)} batch dimension(s) seen with several sizes are symbolic now"))
        return variant
