"""`compile(check="first")`: before and after a variant's first live step, compare it with eager PyTorch (first_step.py).

In: a step at work and a variant that has not run. Out: what is to be called with the result of the live step, or None where
nothing is left to compare. Where the comparison goes wrong, the Python state that the user's code changed is as it was; where
that code itself raises, it is as it leaves it.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wholestep.capture.cache import remember_checked, was_checked
from wholestep.capture.undo import Undo
from wholestep.errors import CaptureRefused, WholestepError, WholestepWarning, one_line
from wholestep.graph.notes import Note, check_note
from wholestep.runtime.eager import Result
from wholestep.runtime.one_step import OneStep
from wholestep.runtime.variant import Variant
from wholestep.verify.first_step import FirstStep, Lean, give_back

NO_HOOKS = "support saved tensor hooks"
"""In what torch.func says of them."""


def check_first_step(
    run: OneStep, variant: Variant, args: Sequence[Any], numbers: Sequence[Any], *, lean: Lean | None = None
) -> Callable[[OneStep, Result], None] | None:
    """Compare before the live step; returns what is to be called with its result after it, or None when skipped.

    With `lean`, a lack of memory is for the caller to tell: torch.OutOfMemoryError, with everything as it was.
    """
    if was_checked(variant.capture):
        run.step._note(Note("said", "this captured step was compared with eager PyTorch by an earlier process"))
        return None
    check = FirstStep(run, variant, args, numbers, lean)
    undo = Undo(variant.subject.loss_fn, variant.subject.model, run.batch)
    if run.python_random is not None:  # Dynamo's code has drawn what the loss draws from Python's generators
        run.python_random.restore()
    unhookable = False
    try:
        check.before()
        undo.detach_new()
    except (torch.OutOfMemoryError, NotImplementedError, CaptureRefused) as error:
        undo.restore()
        if lean is not None and isinstance(error, torch.OutOfMemoryError):
            raise
        run.step._note(check_note("left out", f"the first step was not checked against eager: {one_line(error)}"))
        return None
    except BaseException as error:
        theirs = check.in_users_code and isinstance(error, Exception) and not isinstance(error, WholestepError)
        if not theirs or check.room is not None:
            undo.restore()  # else it is the step that fails, and what it did until then stays, as in eager
        unhookable = lean is not None and lean.room is not None and NO_HOOKS in str(error)
        if not unhookable:
            variant.uses = 0  # checked again at the next call
            raise
    finally:
        give_back(variant.subject.device)

    if lean is not None and unhookable:
        return check_first_step(run, variant, args, numbers, lean=dataclasses.replace(lean, room=None))
    if lean is not None:
        run.step._note(check.told())

    def after(run: OneStep, result: Result) -> None:
        try:
            check.after(result, run.norm)
            if not check.saw_gradients:
                _only_the_loss(run)
            elif not check.undecided:
                remember_checked(variant.capture)
        except torch.OutOfMemoryError:
            text = "the first step was compared with eager, not all of its update: memory did not suffice"
            run.step._note(check_note("partly", text))
        except BaseException:
            undo.restore()
            raise
        finally:
            check.forget()

    return after


def _only_the_loss(run: OneStep) -> None:
    text = (
        "of the first step only the loss was compared with eager PyTorch: its update says nothing about most gradients"
    )
    run.step._note(check_note("partly", f"{text}, and memory did not suffice to run the captured graph by itself"))
    warnings.warn(f"{text}; wholestep.verify(...) compares all of it", WholestepWarning, stacklevel=2)


def only_before(check: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """The first step's check of loss and gradients, without that of the update, for a `reason`."""

    def checked(run: OneStep, *rest: Any, lean: Lean | None = None) -> Any:
        if lean is not None and not lean.interpret:
            text = f"the first step is not compared with eager PyTorch: {reason}, and memory does not suffice for more"
            run.step._note(check_note("left out", text))
            warnings.warn(f"{text}; wholestep.verify(...) compares it", WholestepWarning, stacklevel=2)
            return None
        afterwards = check(run, *rest) if lean is None else check(run, *rest, lean=lean)
        run.step._note(Note("said", f"{reason}: gradients were compared, updates were not"))
        return None if afterwards is None else nothing_after

    return checked


def nothing_after(run: OneStep, result: Result) -> None:
    """In place of the check after a step, where only the one before it is wanted."""
