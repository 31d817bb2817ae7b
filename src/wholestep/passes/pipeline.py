"""The pipeline: an ordered table of passes and the runner that owns what is common to them.

The table has two parts. A pass of the *prepare* part is a plain function `TrainingGraph -> TrainingGraph` and runs before
planning. A pass of the *apply* part is `(TrainingGraph, Plan) -> TrainingGraph`: it carries out a plan. `Pipeline.bound(plan)`
turns the second kind into the first by closing over the plan, so there is one runner, and verify can bisect over all of them.

The runner checks the graph after each pass, times it, reports and dumps it, and can leave passes out by name. Adding a pass:
one file, one row, one test; file, function and row have the same name.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, Literal

from wholestep.errors import BadOption, did_you_mean
from wholestep.frames import in_one_piece
from wholestep.graph.notes import Note
from wholestep.graph.plan import Plan

if TYPE_CHECKING:  # the names of passes are read before torch is loaded
    from wholestep.capture.trace import Capture
    from wholestep.graph.training_graph import TrainingGraph

Pass = Callable[["TrainingGraph"], "TrainingGraph"]
ApplyPass = Callable[["TrainingGraph", Plan], "TrainingGraph"]


@dataclasses.dataclass(frozen=True, slots=True)
class PassRow:
    """One line of the table: the pass called `name`, found in the file of that name."""

    name: str
    part: Literal["prepare", "apply"]
    what: str
    """It does, for people."""
    reason: str
    """Why it stands where it stands."""

    def load(self) -> Callable[..., TrainingGraph]:
        module = importlib.import_module(f"wholestep.passes.{self.name}")
        found: Callable[..., TrainingGraph] = getattr(module, self.name)
        return found


# fmt: off
TABLE: tuple[PassRow, ...] = (
    PassRow("recognise_masks", "prepare", "attention with a computed mask becomes attention that knows it is causal or unmasked",
        "first: it makes whole mask computations dead"),
    PassRow("fuse_loss", "prepare", "a chunked loss and its gradients in one go",
        "before the folds, which would have to keep forward and backward of the loss alike"),
    PassRow("fold_constants", "prepare", "operators that read no input and give one number become `full`",
        "before the folds that look for plain numbers"),
    PassRow("fold_views", "prepare", "chains of views shorten; clones, `x * 1`, dropouts of nothing go",
        "before fold_casts: a view between two casts hides that they cancel"),
    PassRow("fold_casts", "prepare", "casts that cancel exactly go; a parameter is cast once per phase",
        "before share_equal: a shorter chain is more often equal to another"),
    PassRow("share_equal", "prepare", "equal values are computed once, where no lifetime grows",
        "after all folds: equal values are then written in equal ways"),
    PassRow("bound_counts", "prepare", "counts of chosen places become sums that wait for no host, on a GPU",
        "after the folds, so that fewer views lie between a choice and its count"),
    PassRow("share_scatters", "prepare", "gradients of gathers by a shared index become products, on a GPU",
        "after the folds, which leave one expansion of an index and plain zeros"),
    PassRow("share_bias", "prepare", "a bias that repeats along the batch (shifted windows) is given to attention once",
        "after the folds, which leave few views between a mask and its expansion"),
    PassRow("lean_gradients", "prepare", "gradients wait as narrow as they were made",
        "before gradients are weighed: it halves them"),
    PassRow("patch_products", "prepare", "a convolution of patches that do not overlap is a product, in the order of tokens",
        "before channels_last, for which there is nothing to turn in a product"),
    PassRow("channels_last", "prepare", "convolutions and what stands between them in the memory order that tensor cores want",
        "after lean_gradients and the folds, which look for casts that keep the layout"),
    PassRow("order_for_peak", "prepare", "cheap nodes, and gradients of gates, to where less is alive",
        "after lean_gradients, whose narrow values it keeps waiting instead of wide ones"),
    PassRow("remove_dead", "prepare", "what nobody reads",
        "last: what the others left unread goes, so that the planner sees only what runs"),
    PassRow("take_kernels", "apply", "attentions and chunked losses take the implementation that the plan names",
        "before recompute, whose copies are to take the same"),
    PassRow("mark_regions", "apply", "what the plan fuses becomes a region of its own",
        "before recompute, whose copies belong to the region of what they repeat"),
    PassRow("recompute", "apply", "what the plan does not keep is recomputed in the backward",
        "after all that reads the names of values; after it nothing may merge equal ones"),
    PassRow("cut_layers", "apply", "layers are cut in pieces where the plan moves values, so that copies stand within them too",
        "after recompute, whose copies count; before offload, which puts copies between the pieces"),
    PassRow("offload", "apply", "what the plan moves waits in the host's memory or in files",
        "after recompute, whose copies read what comes back"),
    PassRow("update_early", "apply", "each layer updated right behind its backward",
        "after recompute, which reads parameters once more before they are replaced"),
    PassRow("stream_state", "apply", "optimizer state that the plan leaves on the host comes for its update alone",
        "after update_early, whose updates it feeds"),
)
# fmt: on


def compiler_pass(
    *, numerics: str, for_updates: bool = False
) -> Callable[[Callable[..., TrainingGraph]], Callable[..., TrainingGraph]]:
    """Declares a pass and its tier: "bitwise" keeps every bit, "rounding" may change the last ones.

    With `for_updates` it also rewrites the separate update graph of an accumulating step.
    """
    if numerics not in ("bitwise", "rounding"):
        raise ValueError(f"numerics={numerics!r}: use 'bitwise' or 'rounding'")

    def declare(function: Callable[..., TrainingGraph]) -> Callable[..., TrainingGraph]:
        function.numerics = numerics  # type: ignore[attr-defined]
        function.for_updates = for_updates  # type: ignore[attr-defined]
        return function

    return declare


def name_of(one: Callable[..., TrainingGraph]) -> str:
    """The name of a pass; a `functools.partial` has that of its function."""
    while isinstance(one, functools.partial):
        one = one.func
    return getattr(one, "__name__", type(one).__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class PassReport:
    """What one pass did."""

    name: str
    nodes_before: int
    nodes_after: int
    seconds: float
    said: tuple[str, ...] = ()
    """What the pass itself has to say."""

    @property
    def told(self) -> list[Note]:
        """What is worth telling: a changed number of nodes, and what the pass itself has to say."""
        own = [Note("pass", f"pass {self.name}: {said}", {"pass": self.name, "said": said}) for said in self.said]
        if self.nodes_before == self.nodes_after:
            return own
        nodes = {"before": self.nodes_before, "after": self.nodes_after}
        return [Note("pass", str(self), {"pass": self.name, **nodes}), *own]

    @property
    def effect(self) -> str:
        if self.nodes_before == self.nodes_after:
            return "same number of nodes"
        return f"{self.nodes_before} -> {self.nodes_after} nodes"

    def __str__(self) -> str:
        return f"pass {self.name}: {self.effect}, {self.seconds:.2f} s"


class Pipeline:
    """An ordered list of passes, and of those that wait for a plan; every edit makes a new pipeline."""

    def __init__(self, passes: Sequence[Pass], apply: Sequence[ApplyPass] = ()) -> None:
        self.passes = tuple(passes)
        self.apply = tuple(apply)

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    # ---- editing ----

    def first(self, count: int) -> Pipeline:
        """Only the first `count` passes; verify bisects with it."""
        return Pipeline(self.passes[:count])

    def without(self, *names: str) -> Pipeline:
        """All but the named ones; an unknown name is an error."""
        for name in names:
            self._find(name)
        return Pipeline(
            [p for p in self.passes if name_of(p) not in names], [p for p in self.apply if name_of(p) not in names]
        )

    def insert_after(self, name: str, one: Callable[..., TrainingGraph]) -> Pipeline:
        """A new pipeline with `one` right after the pass called `name`, in the same part."""
        return self._inserted(name, one, 1)

    def insert_before(self, name: str, one: Callable[..., TrainingGraph]) -> Pipeline:
        """A new pipeline with `one` right before the pass called `name`, in the same part."""
        return self._inserted(name, one, 0)

    def at_the_place_of(self, name: str, one: Callable[..., TrainingGraph]) -> Pipeline:
        """`one` right before a prepare pass of the table, or, where that pass is left out, behind those that come before it."""
        if any(name_of(kept) == name for kept in self.passes):
            return self.insert_before(name, one)
        earlier = {row.name for row in itertools.takewhile(lambda row: row.name != name, TABLE)}
        at = max((i for i, kept in enumerate(self.passes, start=1) if name_of(kept) in earlier), default=0)
        return Pipeline([*self.passes[:at], one, *self.passes[at:]], self.apply)

    def replaced(self, name: str, one: Callable[..., TrainingGraph]) -> Pipeline:
        """A new pipeline with `one` in the place of the pass called `name`."""
        index, applies = self._find(name)
        part: list[Any] = list(self.apply if applies else self.passes)
        part[index] = one
        return Pipeline(self.passes, part) if applies else Pipeline(part, self.apply)

    def bound(self, plan: Plan) -> Pipeline:
        """All passes as plain ones: those of the apply part close over `plan` and follow the others."""
        return Pipeline([*self.passes, *(_closed_over(one, plan) for one in self.apply)])

    def settled(self, settle: Callable[[Plan, TrainingGraph], Plan]) -> Pipeline:
        """The same, which carries out what `settle` makes of a plan for a graph."""
        return _Settled(self.passes, self.apply, settle)

    def carry_out(self, graph: TrainingGraph, plan: Plan) -> TrainingGraph:
        """Only the passes of the apply part, on a prepared graph."""
        for one in self.apply:
            graph = one(graph, plan)
            graph.made_by = name_of(one)
        return graph

    def _inserted(self, name: str, one: Callable[..., TrainingGraph], offset: int) -> Pipeline:
        index, applies = self._find(name)
        part: list[Any] = list(self.apply if applies else self.passes)
        part.insert(index + offset, one)
        return Pipeline(self.passes, part) if applies else Pipeline(part, self.apply)

    def _find(self, name: str) -> tuple[int, bool]:
        """Where a pass stands, and whether in the apply part."""
        known = [*map(name_of, self.passes), *map(name_of, self.apply)]
        _refuse_unknown(name, known)
        at = known.index(name)
        return (at, False) if at < len(self.passes) else (at - len(self.passes), True)

    # ---- running ----

    def run(self, graph: TrainingGraph, *, dump: str | None = None, first: int = 1) -> tuple[TrainingGraph, list[Note]]:
        """All passes in order; the rewritten graph and a note per pass that changed something."""
        graph, reports = self.run_reporting(graph, dump=dump, first=first)
        return graph, [note for report in reports for note in report.told]

    @in_one_piece
    def run_reporting(
        self, graph: TrainingGraph, *, dump: str | None = None, first: int = 1
    ) -> tuple[TrainingGraph, list[PassReport]]:
        """All passes in order, each checked, timed and (with `dump`) written out, numbered from `first`; what each did."""
        from wholestep.graph.check import check, looked_at
        from wholestep.graph.printer import dump as dump_graph

        check(graph)
        checked = looked_at(graph)
        if dump is not None and first == 1:
            dump_graph(graph, dump, "captured", 0)
        reports = []
        for number, one in enumerate(self.passes, start=first):
            before, began = len(graph.graph.nodes), time.perf_counter()
            graph = one(graph)
            graph.made_by, graph.seconds = name_of(one), time.perf_counter() - began
            found = looked_at(graph)
            if len(found) != len(checked) or not all(
                map(is_, found, checked)
            ):  # most passes find nothing in most models
                check(graph)
                checked = found
            said = tuple(graph.notes)
            graph.notes.clear()
            reports.append(PassReport(name_of(one), before, len(graph.graph.nodes), graph.seconds, said))
            if dump is not None:
                dump_graph(graph, dump, name_of(one), number, reports[-1].effect)
        return graph, reports

    def prepare(self, capture: Capture, *, dump: str | None = None) -> list[Note]:
        """Rewrite a capture's graph by the passes that need no plan; what to report."""
        return self.run_on(capture, dump=dump)

    def carry_out_on(self, prepared: Capture, plan: Plan, *, dump: str | None = None) -> list[Note]:
        """The same by those that carry a plan out."""
        closed = Pipeline([_closed_over(one, plan) for one in self.apply])
        return closed.run_on(prepared, dump=dump, first=len(self.passes) + 1)

    def run_on(self, capture: Capture, *, dump: str | None = None, first: int = 1) -> list[Note]:
        """Rewrite a capture's graph in place, and its update's graph by the passes that know of it; what to report."""
        capture.graph, notes = self.run(capture.graph, dump=dump, first=first)
        of_updates = [one for one in self.passes if getattr(one, "for_updates", False)]
        if capture.update is not None and of_updates:
            capture.update, more = Pipeline(of_updates).run(capture.update)
            notes += more
        return notes


class _Settled(Pipeline):
    """A pipeline that has the last word on plans."""

    def __init__(
        self, passes: Sequence[Pass], apply: Sequence[ApplyPass], settle: Callable[[Plan, TrainingGraph], Plan]
    ) -> None:
        super().__init__(passes, apply)
        self.settle = settle

    def carry_out(self, graph: TrainingGraph, plan: Plan) -> TrainingGraph:
        return super().carry_out(graph, self.settle(plan, graph))


def _closed_over(one: ApplyPass, plan: Plan) -> Pass:
    def carried_out(graph: TrainingGraph) -> TrainingGraph:
        return one(graph, plan)

    carried_out.__name__ = name_of(one)
    carried_out.numerics = getattr(one, "numerics", "rounding")  # type: ignore[attr-defined]
    carried_out.for_updates = getattr(one, "for_updates", False)  # type: ignore[attr-defined]
    return carried_out


def default_pipeline(extra: Sequence[Pass] = ()) -> Pipeline:
    """The passes every step goes through, in the order of the table; `extra` ones follow those of the prepare part."""
    prepare = [row.load() for row in TABLE if row.part == "prepare"]
    return Pipeline([*prepare, *extra], [row.load() for row in TABLE if row.part == "apply"])


def pipeline_without(names: Iterable[str] | None) -> Pipeline | None:
    """The default passes without those; None, which is all of them, where none is named."""
    return default_pipeline().without(*names) if names else None


def refuse_unknown_passes(names: Iterable[str] | None) -> None:
    """An error for a name that no pass of the table has; none of them is loaded."""
    for name in names or ():
        _refuse_unknown(name, [row.name for part in ("prepare", "apply") for row in TABLE if row.part == part])


def _refuse_unknown(name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise BadOption(f"there is no pass {name!r}", hint=did_you_mean(name, known, f"there are {', '.join(known)}"))


def table_for_docs() -> str:
    """The table as docs/architecture.md has it."""
    lines = ["| pass | part | what it does | numerics |", "|---|---|---|---|"]
    lines += [f"| `{row.name}` | {row.part} | {row.what} | {row.load().numerics} |" for row in TABLE]  # type: ignore[attr-defined]
    return "\n".join(lines)


def default_passes() -> Pipeline:
    """The default pipeline, to be edited: `compile(..., passes=default_passes().insert_after("fold_casts", mine))`."""
    return default_pipeline()
