"""Random draws: of a cut value, every rank draws the numbers that its part has in the whole (`capture/sites.py` reads the layout of
the node), so that a mesh changes no number of a training. Whole values need nothing, for all ranks have the same keys."""

from __future__ import annotations

from typing import Any

from wholestep.schedule.sharding.program import Program
from wholestep.schedule.sharding.registry import rule
from wholestep.schedule.sharding.values import Called


@rule("dropout", "rand_like", "randn_like")
def drawn(p: Program, call: Called) -> Any:
    x = p.reduced(call.first)
    still = call.name == "dropout" and (not call.get("training", call.get("train", True)) or call.get("p", 0.5) == 0)
    if x.cut is not None and not still and len(x.cut.sizes) > 1:
        p.refuse(f"random numbers are not drawn for a value with unequal blocks ({x.cut.sizes})", p.gather_hint(x))
    return p.again(call, x.layout, p.reduced)
