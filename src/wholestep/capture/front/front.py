"""Front: calls the user's loss through the graphs that Dynamo made of it, and has a new one made when none holds.

In: a batch. What runs in place of a graph is given by the caller (`run`): a captured step, a check, a dry capture. Dynamo's
code around it then does to Python objects what the user's code does: counters, lists, attributes, logs. Nothing of that
happens while a graph is only captured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import fx

from wholestep import compat
from wholestep.capture.front import dynamo as private
from wholestep.capture.front.loss_graph import LossGraph
from wholestep.capture.front.modes_left import about_derivatives
from wholestep.capture.front.replay import user_line
from wholestep.capture.front.sparse import detach_parts
from wholestep.capture.front.traced import traced
from wholestep.capture.front.unguardable import refuse_surroundings
from wholestep.capture.front.unguarded import Unguarded
from wholestep.capture.front.written import read_by_the_update
from wholestep.capture.subject import Subject, model_loss, no_loss
from wholestep.capture.target import capturing_for
from wholestep.capture.undo import RandomStates
from wholestep.errors import BadLoss, CaptureRefused, WholestepError
from wholestep.frames import in_one_piece
from wholestep.graph.notes import Note

SAME_GUARD = 4
"""Captures that one and the same guard may cause."""
MOST_CAPTURES = 16
"""Captures in all."""

Run = Callable[[LossGraph, tuple], tuple]


class KeepsChanging(CaptureRefused):
    """A value that the loss reads is another one at every step."""


@dataclasses.dataclass(eq=False, slots=True)
class Entry:
    """One graph, and when it holds."""

    frame: private.Frame
    graph: LossGraph
    unguarded: Unguarded


class Front:
    """The graphs of one subject's loss."""

    def __init__(
        self, subject: Subject, *, dynamic: bool | None = None, note: Callable[[Note], None] = lambda note: None
    ) -> None:
        self.subject, self.dynamic, self.note = subject, dynamic, note
        self.entries: list[Entry] = []
        self.current: Entry | None = None
        """The one that was called last."""
        self.misses: Counter[str] = Counter()
        self.seconds = 0.0
        self.specialised = False
        self.lists: set[str] = set()
        """Lists that were seen to grow, as Dynamo names them."""
        self._loggers = private.IgnoredLoggers()
        self._name = private.fresh_name()
        self._function = private.copied(traced, self._name)
        self._run: Run | None = None

    def __call__(self, batch: Any, run: Run, *, known_only: bool = False) -> Any:
        """What the loss function returned, its graph run by `run`; raises CaptureRefused where there can be none."""
        if (
            not torch.is_grad_enabled() or torch.is_inference_mode_enabled()
        ):  # of the caller: a step trains all the same
            with torch.inference_mode(False), torch.enable_grad():
                return self(batch, run, known_only=known_only)
        refuse_surroundings()
        try:
            with self.subject.edits.applied():
                return self._call(batch, run, known_only)
        finally:
            detach_parts()

    def _call(self, batch: Any, run: Run, known_only: bool) -> Any:
        arguments = self._arguments(batch)
        entry = self._find(arguments)
        if entry is None:
            if known_only:
                raise CaptureRefused("no captured graph holds")
            if self.subject.dry is None:
                self.subject.refresh()  # parameters may have been put in the place of others
                arguments = self._arguments(batch)
            entry = self._capture(arguments)
        self.current = entry
        kept, self._run = self._run, run
        try:
            return entry.frame.function(**arguments)
        finally:
            self._run = kept

    def look(self, batch: Any, take: Callable[[LossGraph, tuple], Any]) -> Any:
        """What `take` makes of the graph for a batch. Neither it nor what the Python does beside it runs; no generator moves."""
        found: list[Any] = []

        def run(graph: LossGraph, args: tuple) -> tuple:
            found.append(take(graph, args))
            raise private.Stopped

        randomness = RandomStates()
        with contextlib.suppress(private.Stopped):
            try:
                self(batch, run)
            finally:
                randomness.restore()
        return found[0]

    def _arguments(self, batch: Any) -> dict[str, Any]:
        subject = self.subject
        autocast = None
        if subject.precision != "fp32":
            autocast = (subject.device.type, torch.float16 if subject.precision == "fp16" else torch.bfloat16)
        return dict(
            loss_fn=subject.loss_fn, model=subject.model, batch=batch, hooked=hooked_parameters(subject), autocast=autocast,
            share=1.0 / subject.accumulate,
        )  # fmt: skip

    def _find(self, arguments: dict[str, Any]) -> Entry | None:
        for entry in self.entries:
            if entry.frame.holds(arguments) and entry.graph.holds and entry.unguarded.changed() is None:
                if entry is not self.entries[0]:
                    self.entries.remove(entry)
                    self._insert(entry)
                return entry
        return None

    def _insert(self, entry: Entry) -> None:
        """The one that held last is asked first; one for any size only after those for one size each."""
        place = 0
        if entry.graph.has_sizes:
            place = sum(not known.graph.has_sizes for known in self.entries)
        self.entries.insert(place, entry)

    def forget(self) -> None:
        """Every graph is void: the model itself changed."""
        self.entries.clear()
        self._function = private.copied(traced, self._name)

    # ---- capturing ----

    @in_one_piece
    def _capture(self, arguments: dict[str, Any]) -> Entry:
        off = private.switched_off()
        if off is not None:
            raise CaptureRefused(off)
        if self.entries:
            self._count_miss(arguments)
        try:
            return self._captured(arguments)
        except CaptureRefused as refused:
            if not self.entries or self.specialised or not isinstance(refused.__cause__, Exception):
                raise
            self.specialised = (
                True  # what Dynamo could follow before may hold a number that it takes for one that varies now
            )
            try:
                return self._captured(arguments)
            except CaptureRefused:
                raise refused from refused.__cause__

    def _captured(self, arguments: dict[str, Any]) -> Entry:
        began = time.perf_counter()
        made: list[LossGraph] = []
        failed: list[Exception] = []
        front = weakref.ref(self)  # Dynamo keeps what is called in place of a graph where no collector sees cycles

        def take(graph: fx.GraphModule) -> Callable[..., Any]:
            try:
                paths = {id(module): path for path, module in self.subject.root.named_modules()}
                made.append(LossGraph(graph, paths, self._rewritten))
            except (WholestepError, CaptureRefused) as error:  # raised here, Dynamo would wrap it
                failed.append(error)
            return lambda *args: front()._run(made[0], args)  # type: ignore[misc,union-attr]

        more = private.SPECIALISED if self.specialised else {}
        try:
            # oneDNN's whole-layer LSTM has other shapes, on tensors without data, than it has (torch 2.11)
            with compat.no_collection(), compat.without_onednn(), capturing_for(self.subject.target):
                frame = private.capture_call(
                    self._function,
                    arguments,
                    take,
                    dynamic=self.dynamic,
                    loggers=self._loggers,
                    lists=self.lists,
                    update=read_by_the_update(self.subject.optimizer),
                    **more,
                )
            if failed and isinstance(failed[0], BadLoss) and self.subject.loss_fn is model_loss:
                raise no_loss(self.subject.model)
            if failed:
                raise failed[0]
            if frame is None or not made:
                raise CaptureRefused("the loss makes no graph: it computes nothing with tensors")
            entry = Entry(frame, made[0], Unguarded(self.subject, frame.read, frame.codes))
            frame.watch_lives()
        except BaseException as error:
            self._function = private.copied(traced, self._name)  # what Dynamo keeps of this attempt is of no use
            if isinstance(error, WholestepError | CaptureRefused) or not isinstance(error, Exception):
                raise
            raise refusal(error) from error
        finally:
            self.seconds += time.perf_counter() - began
        self._insert(entry)
        self._note_loggers()
        return entry

    def _rewritten(self, graph: fx.GraphModule) -> None:
        """Dynamo's graph as a recipe wants it, in place."""
        paths = {id(module): path for path, module in self.subject.root.named_modules()}
        for rewrite in self.subject.edits.rewrites:
            rewrite(graph, paths)

    def specialise(self, refused: CaptureRefused) -> bool:
        """Where an operator takes Python numbers only, every value of one gets a graph of its own from now on; False where that
        is not what was refused, or is so already."""
        takes_numbers = self.current is not None and bool(self.current.graph.host.integer) and not refused.curable
        if self.specialised or not takes_numbers:
            return False
        self.specialised = True
        self.forget()
        return True

    def _count_miss(self, arguments: dict[str, Any]) -> None:
        """Name what changed; too often the same, or too much in all, and nothing more is captured."""
        latest = self.current or self.entries[0]
        missed = latest.frame.missed(arguments) or latest.unguarded.changed() or "something that was read"
        if any(entry.frame.dead or entry.frame.holds(arguments) for entry in self.entries):
            self._function = private.copied(traced, self._name)  # Dynamo itself would find nothing to capture
        place = guarded_place(missed)
        grown = re.match(r"(?:len\((.+)\)|not (.+))$", place)
        if grown:
            self.lists.add(grown[1] or grown[2])
        self.misses[place] += 1
        variables = closure_of(self.subject.loss_fn)
        self.note(Note("capture", f"captured anew because {described(missed, variables)}"))
        if self.misses[place] > (MOST_CAPTURES if "size" in place else SAME_GUARD):
            raise KeepsChanging(
                f"{described(place, variables)} is another one again and again; pass such a value as a tensor in the batch, or "
                "keep it out of the loss",
                compiled=True,
            )
        if sum(self.misses.values()) >= MOST_CAPTURES:
            raise KeepsChanging(
                f"captured {MOST_CAPTURES} times, the last time because {described(missed, variables)}", compiled=True
            )

    def _note_loggers(self) -> None:
        own = sorted(name for name in self._loggers.names if not name.startswith(("transformers", "torch")))
        if own:
            self.note(Note("capture", f"log lines by {', '.join(own[:3])} are left out of captured steps"))
            self._loggers.names.clear()


def hooked_parameters(subject: Subject) -> tuple:
    """(parameter, its hooks) of all trained parameters, where one of them has a hook."""
    if not subject.gradient_hooks():
        return ()
    trained = subject.trained.values()
    return tuple((p, tuple((p._backward_hooks or {}).values())) for p in trained)


_COMMENT = re.compile(r"\s+#.*$")
_HELP = {
    "ata-dependent": "select by torch.where or a mask instead",
    "ackward hooks": "a hook on a parameter, or on the output tensor, is captured",
    "requires_grad_": "give the gradient to a value of the loss's own: x = x.detach().requires_grad_()",
    "next()": "pass what it yields in the batch",
    "`open`": "read the file outside of the loss and pass the value in the batch",
    "ContextVar": "pass the value in the batch",
    "deque": "use a list",
    "numpy": "use torch, or compute it outside of the loss and pass it in the batch",
    "andom": "draw it outside of the loss and pass it in the batch",
}
"""A word of what Dynamo met -> what would help."""
_EAGER_ONLY = (
    "_getframe", "saved_tensors_hooks", "`Optimizer.", "Tensor.backward", "autograd.backward", "`now`", "`today`", "`utcnow`",
    "`setattr`", "not traced", "groups of the optimizer", "written by the loss", "not replayed", "__dict__", "a gradient is given",
    "default dtype", "is a key",
)  # fmt: skip
"""What torch.compile with graph breaks does in another way than eager: frames are cut, what is saved is not what eager saves,
an update or a backward inside of the loss meets graphs that were made before it, dates are compared once for all, a class's own
counter is counted once for all (torch 2.11), and so is what code of a class answers (`own_code.py`, `written.py`)."""


def guarded_place(missed: str) -> str:
    """What a failed guard looked at, without its value: equal for two values of one thing."""
    text = _COMMENT.sub("", missed)
    found = re.match(r"tensor '(.+?)' (size|stride|dtype|requires_grad|rank)", text)
    if found:
        return f"{found[2]} of {found[1]}"
    return re.split(r" == | is | != |\.startswith|, ", text)[0].strip()


def closure_of(loss_fn: Any) -> Sequence[str]:
    """The names of the variables that a function has from around it."""
    return getattr(getattr(loss_fn, "__code__", None), "co_freevars", ())


def described(missed: str, variables: Sequence[str] = ()) -> str:
    """A guard as a user would name it: `model.scale == 1.0 (net.py:12)`; `variables` are those of the loss function's closure."""
    text, _, comment = missed.partition("  #")
    line = re.search(r"([\w.-]+\.py:\d+)", comment)
    text = re.sub(r"L\['(\w+)'\]", r"\1", text.strip())
    text = re.sub(r"\._modules\['([^']+)'\]", r".\1", text)
    text = re.sub(r"\._(?:parameters|buffers)\['([^']+)'\]", r".\1", text)
    for i, name in enumerate(variables):
        text = text.replace(f"loss_fn.__closure__[{i}].cell_contents", name)
    return f"{text[:160]} ({line[1]})" if line else text[:160]


def _as_written(raised: str) -> str:
    """`ValueError('no')` of `ValueError([ConstantVariable(str: 'no')])`, as torch 2.11 has it."""
    return re.sub(r"ConstantVariable\(\w+: ('[^']*'|[^()]*)\)", r"\1", raised).replace("([", "(").replace("])", ")")


def refusal(error: Exception) -> CaptureRefused:
    """What Dynamo met, where in the user's code, and what would help."""
    stack = getattr(error, "real_stack", None)
    where = user_line("".join(stack.format())) if stack else user_line(str(error))
    if "data-dependent expression" in str(error) or "PendingUnbackedSymbolNotFound" in str(error):
        return CaptureRefused(compat.about_picked_places(error), where=where, curable=True, compiled=True)
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith("raised:"):  # "backend='backend' raised:", and below it what
        lines = lines[1:]
    what = lines[0] if lines else type(error).__name__
    told = about_derivatives(str(error))
    if told is not None:
        return CaptureRefused(told, where=where, curable=True, compiled=True)
    if private.SKIPPED_AT_RANDOM in str(error):
        what, lines = private.SKIPPED_AT_RANDOM, []
    raised = re.search(r"raised exception (\w+\(.*\))", str(error))
    if raised:
        what, lines = f"it raises {_as_written(raised[1])} while it is traced", []
    explained = next(
        (line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")), ""
    )
    explained = re.split(r"(?<!e\.g)\. ", explained)[0]
    if (
        "VariableTracker" in explained or what.casefold() in explained.casefold()
    ):  # Dynamo's own matters; the same once more
        explained = ""
    helped = next((text for word, text in _HELP.items() if word in what or word in explained), "")
    name = "" if isinstance(error, dynamo.exc.Unsupported) else f"{type(error).__name__}: "
    parts = [f"{name}{what}"[:240], explained[:200], helped]
    reason = ". ".join(part.rstrip(".") for part in parts if part)
    return CaptureRefused(reason, where=where, curable=True, compiled=not any(word in reason for word in _EAGER_ONLY))
