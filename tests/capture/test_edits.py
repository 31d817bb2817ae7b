"""Edits hold while they are applied, are set aside for references, and are taken back whatever happens."""

from __future__ import annotations

import dataclasses

import pytest

from wholestep.capture.edits import Edits


@dataclasses.dataclass
class Noted:
    """A change that writes down what becomes of it."""

    log: list[str]
    name: str
    fails: bool = False

    def apply(self) -> None:
        if self.fails:
            raise RuntimeError(self.name)
        self.log.append(f"+{self.name}")

    def undo(self) -> None:
        self.log.append(f"-{self.name}")

    def told(self) -> None:
        self.log.append(f"told {self.name}")


def test_edits_are_taken_back_in_reverse_and_once() -> None:
    log: list[str] = []
    edits = Edits([Noted(log, "a"), Noted(log, "b")])
    with edits.applied(), edits.applied():
        assert log == ["+a", "+b"] and edits.held
        with edits.set_aside(), edits.set_aside():
            assert log[2:] == ["-b", "-a"] and not edits.held
        assert edits.held
    assert log[4:] == ["+a", "+b", "-b", "-a", "told a", "told b"] and not edits.held


def test_edits_are_taken_back_after_an_error() -> None:
    log: list[str] = []
    edits = Edits([Noted(log, "a")])
    with pytest.raises(KeyError), edits.applied():
        raise KeyError
    assert log == ["+a", "-a"] and not edits.held
    half = Edits([Noted(log, "b"), Noted(log, "c", fails=True)])
    with pytest.raises(RuntimeError, match="c"), half.applied():
        pass
    assert log[2:] == ["+b", "-b"] and not half.held


def test_without_changes_nothing_happens() -> None:
    edits = Edits()
    with edits.set_aside(), edits.applied():
        assert not edits.held
