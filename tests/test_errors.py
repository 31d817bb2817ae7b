"""Errors: one family, and each text says what happened, where, and ends with what to do."""

from __future__ import annotations

import pytest

from wholestep import errors
from wholestep.errors import CaptureRefused, WholestepError, WholestepWarning

FAMILY = [
    value for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, WholestepError) and value is not WholestepError
]  # fmt: skip


def test_the_family_is_complete() -> None:
    assert {cls.__name__ for cls in FAMILY} >= {
        "UnsupportedModel", "UnsupportedOptimizer", "BadLoss", "BadBatch", "BadOption", "NotBuiltYet",
        "CompilerMissing", "FirstStepDiffers",
    }  # fmt: skip


@pytest.mark.parametrize("cls", FAMILY)
def test_a_text_reads_as_sentences(cls: type[WholestepError]) -> None:
    error = cls("the loss has shape (3,).", where="encoder.0", hint="reduce it with .mean()")
    assert str(error) == "the loss has shape (3,). (at encoder.0). reduce it with .mean()."
    assert (error.what, error.where, error.hint) == ("the loss has shape (3,).", "encoder.0", "reduce it with .mean()")
    assert isinstance(error, ValueError)


def test_place_and_hint_may_be_absent() -> None:
    assert str(WholestepError("what happened")) == "what happened."
    assert str(WholestepError("what happened", hint="do that")) == "what happened. do that."


def test_a_refusal_is_a_signal_and_no_user_error() -> None:
    refused = CaptureRefused("it draws numbers", where="model.py:3")
    assert not isinstance(refused, WholestepError) and str(refused) == "it draws numbers (at model.py:3)"
    assert str(CaptureRefused("it draws numbers")) == "it draws numbers"


def test_every_class_says_what_it_is_for() -> None:
    assert all(cls.__doc__ for cls in [*FAMILY, WholestepWarning, CaptureRefused])
