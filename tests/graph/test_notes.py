"""Notes: a text for people that is a str in every way, and a kind and facts that stay with it."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest

from wholestep.graph.notes import KINDS, Note, check_note
from wholestep.passes.pipeline import PassReport
from wholestep.runtime.explain import told_in_notes

NOTE = Note("memory", "memory: 3 of 9 plans tried in 1.0 s", {"tried": 3, "seconds": 1.0, "why": None})


def test_a_note_is_its_text() -> None:
    text = "memory: 3 of 9 plans tried in 1.0 s"
    assert text == NOTE and NOTE in [text] and {text: 1}[NOTE] == 1 and f"{NOTE}" == "".join([NOTE]) == text
    assert NOTE.startswith("memory: ") and "9 plans" in NOTE and type(str(NOTE)) is str
    assert json.loads(json.dumps([NOTE])) == [text]


def test_what_it_tells_code_is_kept() -> None:
    as_json = Note.from_json(json.loads(json.dumps(NOTE.to_json())))
    for again in (as_json, pickle.loads(pickle.dumps(NOTE)), copy.deepcopy(NOTE), copy.copy(NOTE)):
        assert type(again) is Note and again == NOTE and again.kind == "memory"
        assert again.data == {"tried": 3, "seconds": 1.0, "why": None}


def test_a_text_from_before_there_were_kinds() -> None:
    note = Note.from_json("memory: anything")
    assert note == "memory: anything" and note.kind == "said" and not note.data


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("rumour", "x"), ValueError, "no kind of note is called 'rumour'; there are said, capture"),
        (("said", "x", {"tensor": object()}), TypeError, "'tensor' of a note is a object, not a plain value"),
        (("check", "x", {"said": "x"}), ValueError, "a note of kind 'check' lacks done"),
    ],
)
def test_what_is_no_note(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Note(*arguments)
    stored = dict(zip(("kind", "text", "data"), (*arguments, {})))
    with pytest.raises(error, match=words):
        Note.from_json(stored)


def test_a_note_does_not_change() -> None:
    with pytest.raises(AttributeError):
        NOTE.kind = "check"
    with pytest.raises(TypeError):
        NOTE.data["tried"] = 4  # type: ignore[index]


def test_texts_are_as_people_know_them() -> None:
    assert check_note("left out", "no room") == "check: left out: no room"
    report = PassReport("fold_views", 10, 7, 0.25, ("clones stay",))
    assert report.told == ["pass fold_views: 10 -> 7 nodes, 0.25 s", "pass fold_views: clones stay"]
    assert PassReport("fold_views", 7, 7, 0.25).told == []
    assert {note.kind for note in report.told} == {"pass"}


def test_explain_shows_passes_checks_and_the_first_few_others() -> None:
    notes = [Note(kind, kind) for kind in KINDS if kind not in ("pass", "check")]
    notes += PassReport("a", 10, 7, 0.0, ("5 nodes are left",)).told + PassReport("b", 7, 6, 0.0).told
    notes.append(check_note("partly", "the loss alone"))
    assert told_in_notes(notes) == [
        "passes     a: 10 -> 7; b: 7 -> 6 nodes; a: 5 nodes are left",
        "check      partly: the loss alone",
        *(f"note       {kind}" for kind in ("said", "capture", "sizes", "rung", "plan")),
    ]
