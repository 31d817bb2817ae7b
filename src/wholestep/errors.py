"""Every error and warning a user can meet: what happened, where in their model, the values, what to try.

`WholestepError` and its children stop the call. `CaptureRefused` does not: the fallback ladder catches it, takes the next
rung and reports the reason. A warning says that a request is honoured in another way than asked.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")
"""What torch's allocators say in a plain RuntimeError."""


class WholestepError(ValueError):
    """The request cannot be honoured; the message says what to do instead."""

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what, self.where, self.hint = what, where, hint
        parts = [what if where is None else f"{what} (at {where})"]
        if hint:
            parts.append(hint)
        super().__init__(" ".join(part if part.endswith(("?", "!")) else part.rstrip(".") + "." for part in parts))


class UnsupportedModel(WholestepError):
    """The model, as wrapped or placed, would train differently without anyone noticing."""


class UnsupportedOptimizer(WholestepError):
    """The optimizer (or what wraps it) needs something a captured step cannot give."""


class BadLoss(WholestepError):
    """The loss function returned something that cannot be differentiated."""


class BadBatch(WholestepError):
    """The batch cannot be used with this Step."""


class BadOption(WholestepError):
    """An argument of `compile` or `verify` has no such value."""


class NoSuchKernel(BadOption):
    """An operator has no implementation of that name, on any machine."""


class BudgetTooSmall(WholestepError):
    """No plan fits in the memory that was allowed; `smallest_bytes` says what would."""

    def __init__(
        self, what: str, *, smallest_bytes: int = 0, where: str | None = None, hint: str | None = None
    ) -> None:
        self.smallest_bytes = smallest_bytes
        super().__init__(what, where=where, hint=hint)


class NotEnoughMemory(WholestepError):
    """The step would not fit into what this machine has left."""


class TierFailed(WholestepError):
    """A file that values wait in could not be written or read; the step is not taken."""


class NotBuiltYet(WholestepError):
    """A documented request whose stage is not part of this version."""


class CompilerMissing(WholestepError):
    """No C++ compiler for backend `inductor` on the CPU."""


class FirstStepDiffers(WholestepError):
    """`check="first"`: the compiled step and eager PyTorch disagree on the first live batch."""


class BadCheckpoint(WholestepError):
    """A checkpoint cannot be written, read, or put into these objects."""


class CaptureRefused(Exception):
    """This rung of the ladder cannot capture the step faithfully; the next rung is tried and `reason` is told."""

    def __init__(self, reason: str, *, where: str | None = None, curable: bool = False, compiled: bool = False) -> None:
        """`curable`: perhaps not after one eager step. `compiled`: torch.compile may do it, with graph breaks."""
        self.reason, self.where, self.curable, self.compiled = reason, where, curable, compiled
        super().__init__(reason if where is None else f"{reason} (at {where})")


class WholestepWarning(UserWarning):
    """A request is honoured in another way than asked; the text says which."""


def did_you_mean(
    name: object, known: Iterable[str], otherwise: str = "", *, shown: str = "{}", cutoff: float = 0.6
) -> str:
    """The hint for a name that there is not: the nearest of those known, written as `shown`; else `otherwise`."""
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=cutoff)
    return f"did you mean {shown.format(close[0])}?" if close else otherwise


def one_of(option: str, value: str | None, known: Sequence[str]) -> None:
    """An error unless `value` is None or known."""
    if value is not None and value not in known:
        raise BadOption(f"{option} {value!r}", hint=f"{did_you_mean(value, known)} Use {' or '.join(known)}".strip())


def first_line(error: BaseException, most: int = 200) -> str:
    """Of what an error says; its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:most] if lines else type(error).__name__


def one_line(error: BaseException, most: int = 200) -> str:
    """An error's kind and the first line of what it says."""
    kind, said = type(error).__name__, first_line(error, most)
    return kind if said == kind else f"{kind}: {said}"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether it is, or was caused by, memory that ran out on the GPU or the CPU."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        if named or (isinstance(error, RuntimeError) and any(sign in str(error) for sign in _NO_MEMORY)):
            return True
        error = error.__cause__ or error.__context__
    return False
