"""Implementations that a plan names are written into the calls that choose between several: `implementation="flash"`.

In: a graph, and a Plan whose `kernel` says value or module -> name. Out: the graph whose attentions and chunked losses name their
implementation, the backward that of its forward. What no plan names is left to the tuner (ops/tuner.py). A name that there is
not, or that does not support the call on this machine, is one clear error.
"""

from __future__ import annotations

from wholestep.errors import BadOption, did_you_mean
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph
from wholestep.ops.tuned import Asking, calls_that_ask
from wholestep.passes.pipeline import compiler_pass


@compiler_pass(numerics="rounding")
def take_kernels(graph: TrainingGraph, plan: Plan) -> TrainingGraph:
    """attention(...) => attention(..., implementation="flash") for every call that `plan.kernel` fits; the last one counts."""
    if not plan.kernel:
        return graph
    calls = list(calls_that_ask(graph))
    _refuse_unknown(plan, calls)
    for call in calls:
        named = [name for place, name in plan.kernel.items() if call.fits(place)]
        if named:
            call.refuse_unusable(named[-1])
            call.node.kwargs = {**call.node.kwargs, "implementation": named[-1]}
    return graph


def _refuse_unknown(plan: Plan, calls: list[Asking]) -> None:
    known = sorted({call.key for call in calls})
    for place, name in plan.kernel.items():
        if not any(call.fits(place) for call in calls):
            hint = did_you_mean(place, known, f"there is a choice in {', '.join(known[:3]) or 'no call of it'}")
            raise BadOption(f"the plan names kernel {name!r} for {place!r}, where the step has no choice", hint=hint)
