"""convert(model): known layers change into their lean forms in place; restore(model) changes them back.

In: any model. Out: a Report of what was swapped, what was left, and why. A module is not rebuilt: its class is changed to
a subclass that differs in its forward. So parameters, buffers, eps, dtype, device, requires_grad, hooks, the training
flag, names in the state_dict and every reference to the module are what they were, and restoring is exact.
"""

from __future__ import annotations

import collections
import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from wholestep.errors import BadOption, UnsupportedModel
from wholestep.nn.known import recognise
from wholestep.nn.styles import MARK


@dataclass(frozen=True, slots=True)
class Change:
    """One module that was swapped: where it is, the class it had, the class it has, what to know about it."""

    path: str
    was: str
    now: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """One module that looks like a layer with a lean form and was left as it is."""

    path: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """What `convert` did; prints as a short table, equal layers on one line."""

    swapped: tuple[Change, ...]
    left: tuple[Left, ...]

    def __str__(self) -> str:
        lines = [f"lean layers: {len(self.swapped)} swapped, {len(self.left)} left"]
        for (was, note), paths in _grouped((c.was, c.note, c.path) for c in self.swapped):
            lines.append(f"  swapped {len(paths):4d} x {was}" + (f" ({note})" if note else ""))
        for (kind, reason), paths in _grouped((item.kind, item.reason, item.path) for item in self.left):
            lines.append(f"  left    {len(paths):4d} x {kind} ({paths[0] or 'the model'}): {reason}")
        return "\n".join(lines)


def convert(model: nn.Module, *, only: str | Iterable[str] | None = None) -> Report:
    """Swap the known layers of `model`, in place, for forms that keep less memory and compute the same bits.

    Args:
        model: any module; nothing about its parameters, hooks or state_dict changes.
        only: names of classes ("LayerNorm", "LlamaMLP") or module paths ("blocks.0", "blocks.*.mlp"), one or several; a
            path stands for all that is below it. None takes every layer that has a lean form.
    """
    if not isinstance(model, nn.Module):
        raise BadOption(f"convert takes a torch.nn.Module, got {type(model).__name__}")
    if not (only is None or isinstance(only, Iterable)):
        raise BadOption(
            f"only={only!r}", hint="give class names such as 'LayerNorm', or paths as in model.named_modules()"
        )
    patterns = None if only is None else (only,) if isinstance(only, str) else tuple(only)
    chosen = [(path, module) for path, module in model.named_modules() if _asked(patterns, path, module)]
    for pattern in patterns or ():
        if not any(_asked((pattern,), path, module) for path, module in chosen):
            raise BadOption(
                f"only={pattern!r} matches no module of {type(model).__name__}",
                hint="give class names such as 'LayerNorm', or paths as in model.named_modules()",
            )
    swapped, left = [], []
    for path, module in chosen:
        kind = type(module).__name__
        found = recognise(module) if MARK not in module.__dict__ else None
        if isinstance(found, str):
            left.append(Left(path, kind, found))
        elif found is not None:
            module.__dict__[MARK] = type(module)
            module.__class__ = found.becomes
            swapped.append(Change(path, kind, found.becomes.__name__, found.note))
    return Report(tuple(swapped), tuple(left))


def restore(model: nn.Module) -> int:
    """Undo `convert`: every swapped module gets its class back. Returns how many there were."""
    if not isinstance(model, nn.Module):
        raise BadOption(f"restore takes a torch.nn.Module, got {type(model).__name__}")
    marked = [(path, module) for path, module in model.named_modules() if MARK in module.__dict__]
    for path, module in marked:
        was = module.__dict__[MARK]
        wrapped = type(module).__name__.startswith("FSDP") and not was.__name__.startswith("FSDP")
        if wrapped or not issubclass(type(module), was):
            raise UnsupportedModel(
                f"{path or 'the model'} was a {was.__name__} and has become a {type(module).__name__} since it was converted",
                hint="restore before fully_shard, or keep the lean layers: they compute the same",
            )
    for _, module in marked:
        module.__class__ = module.__dict__.pop(MARK)
    return len(marked)


def _asked(patterns: tuple[str, ...] | None, path: str, module: nn.Module) -> bool:
    if patterns is None:
        return True
    names = {type(module).__name__, getattr(module.__dict__.get(MARK), "__name__", "")}
    return any(
        pattern in names or path == pattern or path.startswith(pattern + ".") or fnmatch.fnmatchcase(path, pattern)
        for pattern in patterns
    )


def _grouped(rows: Iterable[tuple[str, str, str]]) -> Iterable[tuple[tuple[str, str], list[str]]]:
    groups: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for first, second, path in rows:
        groups[first, second].append(path)
    return groups.items()
