"""What a forward leaves behind on its modules, seen and undone.

Tracing runs the user's forward on fake tensors. Whatever it stores on a module (a cached rotary table, a counter, the last
hidden state) would be a fake value, or a Python value advanced by a run that never happened. `Snapshot` keeps every module's
attributes, tells what changed, and puts all of it back.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from wholestep import compat

_SKIPPED = {"_parameters", "_buffers", "_modules"}  # swapped and restored by the tracer itself
_SHADOWS = {"_flat_weights", "_flat_weight_refs"}  # nn.RNN's own lists of its parameters, which follow the swap


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One attribute that a forward wrote."""

    path: str
    attribute: str
    value: Any

    def __str__(self) -> str:
        return f"{self.path}.{self.attribute}" if self.path else self.attribute


class Snapshot:
    """The attributes of every module below `root`, and of the `foreign` ones that only the loss knows, as they are now."""

    def __init__(self, root: nn.Module, foreign: Mapping[str, nn.Module] | None = None) -> None:
        self.entries: list[tuple[str, nn.Module, dict[str, Any], dict[str, dict], dict[str, Any]]] = []
        self.numbers: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        foreign = foreign or {}
        seen: set[int] = set()
        for path, module in [*root.named_modules(), *foreign.items()]:
            plain = {k: v for k, v in module.__dict__.items() if k not in _SKIPPED}
            tables = {k: dict(module.__dict__[k]) for k in _SKIPPED if k in module.__dict__}
            inner = {k: frozen(v) for k, v in plain.items() if _is_container(v) and id(v) not in seen}
            seen.update(id(plain[k]) for k in inner)
            self.entries.append((path, module, plain, tables, inner))
        for module in foreign.values():
            # tracing computes with tensors of one element for real when it was not given them: a counter would advance
            single = [t for t in (*module._buffers.values(), *module._parameters.values()) if t is not None and t.numel() == 1]
            self.numbers += [(t, t._version, t.detach().clone()) for t in single]

    def changes(self) -> list[Change]:
        """Attributes whose object (or, for plain containers, whose content) is another than at the snapshot."""
        found = []
        for path, module, plain, _, inner in self.entries:
            for name, value in module.__dict__.items():
                if name in _SKIPPED or name in _SHADOWS:
                    continue
                if name not in plain or not _same(plain[name], value) or (name in inner and not same_content(inner[name], value)):
                    found.append(Change(path, name, value))
        return found

    def restore(self) -> None:
        """Put every attribute, buffer and container back as it was."""
        for _, module, plain, tables, inner in self.entries:
            for name in [n for n in module.__dict__ if n not in plain and n not in _SKIPPED]:
                del module.__dict__[name]
            for name, value in plain.items():
                module.__dict__[name] = value
                if name in inner:
                    _refill(value, inner[name])
            for name, table in tables.items():
                live = module.__dict__[name]
                if list(live) != list(table) or any(live[k] is not v for k, v in table.items()):
                    live.clear()
                    live.update(table)
        for tensor, version, value in self.numbers:
            if tensor._version != version:
                tensor.data.copy_(value)


def leftover_fakes(root: nn.Module, foreign: Mapping[str, nn.Module] | None = None) -> list[str]:
    """Where a fake tensor is still reachable from a module's attributes; empty after a clean capture."""
    found = []
    for path, module in [*root.named_modules(), *(foreign or {}).items()]:
        for name, value in module.__dict__.items():
            if any(compat.is_fake(t) for t in _tensors(value)):
                found.append(f"{path}.{name}" if path else name)
    return found


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) or type(a) is not type(b):
        return False
    if isinstance(a, int | float | str | bool | bytes | tuple):
        try:
            return bool(a == b)
        except Exception:
            return False
    return False


def _is_container(value: Any) -> bool:
    if isinstance(value, list | dict | set):
        return True
    skipped = (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)
    return hasattr(value, "__dict__") and not isinstance(value, skipped)


def frozen(value: Any) -> Any:
    """A shallow copy of a container (of an object: of its attributes); anything else as it is."""
    if type(value) in (list, dict, set):
        return type(value)(value)
    return dict(vars(value)) if _is_container(value) and not isinstance(value, list | dict | set) else value


def same_content(kept: Any, live: Any) -> bool:
    """Whether a container still holds what `frozen` kept of it."""
    if type(kept) is dict and type(live) is not dict and hasattr(live, "__dict__"):
        live = vars(live)
    if type(kept) is dict and type(live) is dict:
        return list(kept) == list(live) and all(_same(kept[k], live[k]) for k in kept)
    if type(kept) is list and type(live) is list:
        return len(kept) == len(live) and all(_same(a, b) for a, b in zip(kept, live, strict=True))
    if type(kept) is set and type(live) is set:
        return kept == live
    return _same(kept, live)


def _refill(live: Any, kept: Any) -> None:
    if live is kept or same_content(kept, live):
        return
    if type(kept) is dict and type(live) is not dict:
        live = vars(live)
    live.clear()
    if isinstance(live, list):
        live.extend(kept)
    else:
        live.update(kept)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    if isinstance(value, list | tuple | set):
        return [t for v in value for t in _tensors(v)]
    return []
