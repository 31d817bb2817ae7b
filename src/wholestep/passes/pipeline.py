"""The pipeline: an ordered table of passes and the runner that owns what is common to them.

A pass is a plain function `TrainingGraph -> TrainingGraph`, decorated with the tier of its numerics. The runner checks the
graph after each, times it, dumps it, and can leave passes out by name. Adding a pass: one file, one row, one test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from wholestep.graph.check import check
from wholestep.graph.printer import dump as dump_graph
from wholestep.graph.training_graph import TrainingGraph

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture

Pass = Callable[[TrainingGraph], TrainingGraph]


def compiler_pass(*, numerics: str) -> Callable[[Pass], Pass]:
    """Declares a pass and its tier: "bitwise" keeps every bit, "rounding" may change the last ones."""
    if numerics not in ("bitwise", "rounding"):
        raise ValueError(f"numerics={numerics!r}: use 'bitwise' or 'rounding'")

    def declare(function: Pass) -> Pass:
        function.numerics = numerics  # type: ignore[attr-defined]
        return function

    return declare


def name_of(one: Pass) -> str:
    return getattr(one, "__name__", type(one).__name__)


class Pipeline:
    """An ordered list of passes."""

    def __init__(self, passes: Sequence[Pass]) -> None:
        self.passes = tuple(passes)

    def __iter__(self) -> Any:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def first(self, count: int) -> Pipeline:
        """Only the first `count` passes; verify bisects with it."""
        return Pipeline(self.passes[:count])

    def without(self, *names: str) -> Pipeline:
        """All but the named ones; an unknown name is an error."""
        known = [name_of(p) for p in self.passes]
        for name in names:
            if name not in known:
                raise ValueError(f"no pass named {name!r}; there are {', '.join(known)}")
        return Pipeline([p for p in self.passes if name_of(p) not in names])

    def insert_after(self, name: str, one: Pass) -> Pipeline:
        """A new pipeline with `one` right after the pass called `name`."""
        known = [name_of(p) for p in self.passes]
        if name not in known:
            raise ValueError(f"no pass named {name!r}; there are {', '.join(known)}")
        at = known.index(name) + 1
        return Pipeline([*self.passes[:at], one, *self.passes[at:]])

    def run(self, graph: TrainingGraph, *, dump: str | None = None) -> tuple[TrainingGraph, list[str]]:
        """All passes in order; the rewritten graph and one line per pass that changed something."""
        check(graph)
        if dump is not None:
            dump_graph(graph, dump, "captured", 0)
        lines = []
        for number, one in enumerate(self.passes, start=1):
            before, began = len(graph.graph.nodes), time.perf_counter()
            graph = one(graph)
            graph.made_by, graph.seconds = name_of(one), time.perf_counter() - began
            check(graph)
            after = len(graph.graph.nodes)
            effect = f"{before} -> {after} nodes" if before != after else "same number of nodes"
            if dump is not None:
                dump_graph(graph, dump, name_of(one), number, effect)
            if before != after:
                lines.append(f"pass {name_of(one)}: {effect}, {graph.seconds:.2f} s")
        return graph, lines

    def run_on(self, capture: Capture, *, dump: str | None = None) -> list[str]:
        """Rewrite a capture's graph in place (its update graph has nothing to rewrite yet); the lines to report."""
        capture.graph, lines = self.run(capture.graph, dump=dump)
        return lines


def default_pipeline(extra: Sequence[Pass] = ()) -> Pipeline:
    """The passes every step goes through, in order; `extra` ones follow."""
    from wholestep.passes.fuse_loss import fuse_loss
    from wholestep.passes.recognise_masks import recognise_masks

    return Pipeline(
        [
            recognise_masks,  # first: it makes whole mask computations dead
            fuse_loss,  # before whatever decides about memory: it moves the gradients of the head to the end of the forward
            *extra,
        ]
    )
