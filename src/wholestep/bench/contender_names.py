"""The names of what is measured. No torch: a name that there is not is told before it is loaded."""

from __future__ import annotations

from wholestep.bench.own_code import own_contender
from wholestep.errors import BadOption, did_you_mean

CONTENDERS = {
    "eager": "PyTorch as it is: the plain loop, whose losses the others are held to",
    "compile": "torch.compile of the loss call, default mode; backward and update follow from it",
    "compile-budget": "the same with torch's activation memory budget at 0.5",
    "liger": "Liger's kernels in the model, in eager PyTorch; for Llama, where it is installed",
    "wholestep": "wholestep.compile with its default options",
    "wholestep-interpret": "wholestep.compile with backend='interpret': the captured graph, operator by operator",
}


def is_ours(contender: str) -> bool:
    return contender.split("+")[0] in ("wholestep", "wholestep-interpret")


def known(name: str) -> None:
    """An error unless there is such a contender; one of the user's own is imported to see."""
    base = name.split("+")[0] if is_ours(name) else name
    if base in CONTENDERS:
        return
    if ":" in name:
        own_contender(name)
        return
    hint = did_you_mean(name, CONTENDERS, f"there are {', '.join(CONTENDERS)}, or package.module:callable")
    raise BadOption(f"there is no contender {name!r}", hint=hint)
