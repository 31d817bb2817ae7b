"""A Recipe: wishes about how a model runs, one verb a line, as data. It knows no model until it is checked against one.

In: lines, by hand (`schedule.py`) or from a file (`recipe_file.py`). Out: a value that can be compared, and that `resolve.py` turns
into edits of modules, rewrites of the forward pass and decisions of a Plan. Two lines that ask for different things of one
module are a conflict, and the error names both, unless one of them is about fewer modules: the narrower one counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from wholestep.errors import BadOption
from wholestep.schedule.modules import Modules, inside
from wholestep.schedule.verb import Verb


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Lines, and what they expect of a model."""

    lines: tuple[Verb, ...] = ()
    expects: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    """Address -> what was found there when the recipe was written; the empty address is the model's class."""
    source: str = dataclasses.field(default="the recipe", compare=False)
    """Where it comes from, for people."""
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    """Line as it is printed -> why it is there; `... stays whole` -> why there is no line. Comments in a file."""

    def __iter__(self) -> Iterator[Verb]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def of(self, name: str) -> list[Verb]:
        """The lines of one verb."""
        return [line for line in self.lines if line.name == name]

    def place(self, line: Verb) -> str:
        """`line 3 of recipe.toml (recompute layers.*)`."""
        number = next(i for i, own in enumerate(self.lines, start=1) if own is line)
        return f"line {number} of {self.source} ({line})"

    def check(self, modules: Modules) -> None:
        """Raise for a line that does not fit the model, and for two that contradict each other."""
        for line in self.lines:
            try:
                line.check(modules)
            except BadOption as error:
                raise BadOption(f"{self.place(line)}: {error.what}", hint=error.hint) from None
        for i, later in enumerate(self.lines):
            for earlier in self.lines[:i]:
                both = later.conflict(earlier, modules) if earlier.name == later.name else ""
                both = both or _shared_place(earlier, later, modules)
                if both:
                    hint = "keep one of them, or name other modules in one of them"
                    raise BadOption(f"{self.place(later)} contradicts {self.place(earlier)}: {both}", hint=hint)


def _shared_place(earlier: Verb, later: Verb, modules: Modules) -> str:
    """A module whose forward two lines change, in one of them perhaps as part of another."""
    second = later.places(modules)
    for one, module in earlier.places(modules).items() if second else ():
        for other, same in second.items():
            if inside(one, other) or inside(other, one) or module is same:  # one module may have two names
                return f"both change {max(one, other, key=len) or 'the model'}"
    return ""
