"""What a step has to tell, as data: a kind that code decides by, beside the text that people read.

In: a word for what a note is about, its text, and the facts in it. Out: a `Note`, and the same from JSON.

A note is a `str`, because `step.notes` is public and its entries always were: they are searched, joined, compared with texts,
shown in f-strings and written to JSON by users' code. No code of ours reads the text (a test sees to that): what it wants to
know is in `kind` and `data`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

Kind = Literal["said", "capture", "sizes", "rung", "pass", "plan", "memory", "check"]
"""
said      anything else; what was read from a file that knows no kinds
capture   how the user's code was read: what was recognised, unrolled, set aside, captured again
sizes     whether sizes of the batch are symbolic or stay static
rung      steps that run in eager PyTorch or through torch.compile
pass      what a pass did: {"pass", "before", "after"} in nodes, or what it says itself: {"pass", "said"}
plan      what was planned without a memory budget
memory    what became of a memory budget
check     how much of the first step was compared with eager PyTorch: {"done", "said"}, `done` being one of `Done`
"""
KINDS: tuple[Kind, ...] = get_args(Kind)

_NEEDS: dict[Kind, set[str]] = {"pass": {"pass"}, "check": {"done", "said"}}
"""The facts without which a note of this kind is none."""

Done = Literal["whole", "reduced", "partly", "undecided", "left out"]
Plain = str | int | float | None
"""What JSON gives back as it was."""


class Note(str):
    """One note. Equal to its text, as any str is; `kind` and `data` never change and survive pickling and `to_json`."""

    __slots__ = ("data", "kind")
    kind: Kind
    data: Mapping[str, Plain]

    def __new__(cls, kind: Kind, text: str, data: Mapping[str, Plain] | None = None) -> Note:
        if kind not in KINDS:
            raise ValueError(f"no kind of note is called {kind!r}; there are {', '.join(KINDS)}")
        facts = dict(data or {})
        for name, value in facts.items():
            if not isinstance(value, Plain):
                raise TypeError(f"{name!r} of a note is a {type(value).__name__}, not a plain value")
        if missing := _NEEDS.get(kind, set()) - set(facts):
            raise ValueError(f"a note of kind {kind!r} lacks {', '.join(sorted(missing))}")
        note = super().__new__(cls, text)
        object.__setattr__(note, "kind", kind)
        object.__setattr__(note, "data", MappingProxyType(facts))
        return note

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a note does not change: {name}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Note, (self.kind, str(self), dict(self.data))

    def to_json(self) -> dict[str, Any]:
        """Where kind and data are to be kept too; `json.dumps` of the note itself writes its text alone."""
        return {"kind": self.kind, "text": str(self), "data": dict(self.data)}

    @staticmethod
    def from_json(stored: str | Mapping[str, Any]) -> Note:
        """What `to_json` made, or a bare text; a ValueError for a kind that there is not."""
        if isinstance(stored, str):
            return Note("said", stored)
        return Note(stored["kind"], stored["text"], stored["data"])


def check_note(done: Done, said: str) -> Note:
    """How much of the first step's check was done, and why not more."""
    return Note("check", f"check: {done}: {said}", {"done": done, "said": said})
