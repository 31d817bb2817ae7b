"""Parameters of layers that are left out of a trace: neither they nor their state are inputs of it, nor does it update them.

In: which layers are left out, and how parameters are updated. Out: for each such parameter the one of a traced layer that stands
for it, and, from the trace, which operators take lists with an entry per parameter. `write_out.py` then puts in what is missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence

from torch import fx

from wholestep.graph.training_graph import Input, Role


@dataclasses.dataclass(eq=False, slots=True)
class Listed:
    """An operator that takes lists with an entry per parameter: of those that were traced, and of all."""

    traced: Sequence[str]
    names: Sequence[str]


class Absent:
    """The parameters that a trace is made without."""

    def __init__(self, twins: Mapping[str, tuple[str, int]], trained: Sequence[str] = ()) -> None:
        """`twins`: parameter -> the one that stands for it, and its own layer. `trained`: all, in their order."""
        self.twins, self.trained = twins, trained
        self.lists: dict[fx.Node, Listed] = {}
        """Updates, and the norm of clipping, in the record."""

    def twin(self, entry: Input) -> Input | None:
        """The input that stands for one that is not there."""
        found = self.twins.get(owner(entry) or "")
        return None if found is None else of_another(entry, found[0])

    def with_absent(self, names: Iterable[str], there: Container[str]) -> list[str]:
        """Those of `names` that are there, or stood for by one that is."""
        twins = self.twins
        return [name for name in names if name in there or (name in twins and twins[name][0] in there)]


def owner(entry: Input) -> str | None:
    """The parameter that an input is, or is a state of."""
    if entry.role is Role.PARAMETER:
        return entry.name
    return entry.name.rpartition("/")[0] if entry.role is Role.STATE else None


def of_another(entry: Input, name: str) -> Input:
    """The same input of another parameter."""
    return Input(entry.role, name if entry.role is Role.PARAMETER else f"{name}/{entry.name.rpartition('/')[2]}")
