"""Edits: how a model differs from what the user wrote, while its loss is called for a captured step.

A recipe replaces modules and rewrites the graph of the forward pass. The modules themselves stay as they are: a change is made when
the front end calls the loss and taken back when the call is over, so that two Steps of one model do not meet, validation
runs the plain module, and a reference (`set_aside`) is the model as it was written.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch import fx

from wholestep.errors import WholestepError

Rewrite: TypeAlias = Callable[[fx.GraphModule, Mapping[int, str]], object]
"""Changes Dynamo's graph of a loss in place; the second argument is id of a module -> its path."""


class Change(Protocol):
    """One module that is another while the edits hold."""

    def apply(self) -> None:
        """Make the change."""

    def undo(self) -> None:
        """Leave everything as it was."""

    def told(self) -> None:
        """Called when a call with the change is over."""


@dataclasses.dataclass(slots=True)
class Edits:
    """All changes of one recipe."""

    changes: Sequence[Change] = ()
    rewrites: Sequence[Rewrite] = ()
    lines: Sequence[str] = ()
    """Of the recipe: those by which code of the user's takes the place of modules."""
    held: bool = False

    def apply(self) -> None:
        """Until `undo`; where one of them fails, none holds."""
        done: list[Any] = []
        try:
            for change in self.changes:
                change.apply()
                done.append(change)
        except BaseException:
            for change in reversed(done):
                change.undo()
            raise
        self.held = True

    def undo(self) -> None:
        for change in reversed(self.changes):
            change.undo()
        self.held = False

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The model as the recipe wants it."""
        if self.held or not self.changes:
            yield
            return
        self.apply()
        try:
            yield
        except Exception as error:
            if self.lines and not isinstance(error, WholestepError):
                error.add_note(f"the model runs by a recipe: {'; '.join(self.lines)}")
            raise
        finally:
            self.undo()
        for change in self.changes:
            change.told()

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """The model as it was written."""
        if not self.held:
            yield
            return
        self.undo()
        try:
            yield
        finally:
            self.apply()
