"""The guard: what a captured graph has burned in, looked at before every step.

make_fx records no guards. So every plain Python value that the modules, the loss function and the optimizer hold (flags,
probabilities, sizes, closure variables) is read again before each step; when one changes, the step is captured anew.
Reading a few thousand dictionary entries takes about a tenth of a millisecond.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from wholestep.capture.subject import Subject

_PLAIN = (int, float, str, bool, type(None), torch.dtype)
_IGNORED = {"_is_full_backward_hook", "_version", "_is_hf_initialized", "call_super_init"}


class Guards:
    """Every plain value that a capture of `subject` may have fixed."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.entries: list[tuple[dict, Any]] = []
        self.labels: list[str] = []
        self.cells: list[tuple[Any, str]] = []
        seen: set[int] = set()
        for path, module in subject.root.named_modules():
            self._add_table(module.__dict__, path or type(module).__name__, seen)
            config = module.__dict__.get("config")
            if config is not None and hasattr(config, "__dict__"):
                self._add_table(config.__dict__, f"{path}.config".lstrip("."), seen)
        self._add_function(subject.loss_fn, seen)

    def _add_table(self, table: dict, label: str, seen: set[int]) -> None:
        if id(table) in seen:
            return
        seen.add(id(table))
        for key, value in table.items():
            if isinstance(value, _PLAIN) and key not in _IGNORED:
                self.entries.append((table, key))
                self.labels.append(f"{label}.{key}")

    def _add_function(self, function: Callable, seen: set[int]) -> None:
        """Closure variables, defaults and globals of the loss; objects among them one level deep."""
        if isinstance(function, types.MethodType):
            self._add_table(vars(function.__self__) if hasattr(function.__self__, "__dict__") else {}, "self", seen)
            function = function.__func__
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        code = getattr(function, "__code__", None)
        if code is None:
            if hasattr(function, "__dict__") and not isinstance(function, type):
                self._add_table(function.__dict__, type(function).__name__, seen)
            return
        for name, cell in zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False):
            self.cells.append((cell, name))
            self._add_object(_content(cell), name, seen)
        for name in code.co_names:
            if name in function.__globals__:
                value = function.__globals__[name]
                if isinstance(value, _PLAIN):
                    self.entries.append((function.__globals__, name))
                    self.labels.append(name)
                else:
                    self._add_object(value, name, seen)

    def _add_object(self, value: Any, label: str, seen: set[int]) -> None:
        skipped = (nn.Module, torch.Tensor, types.ModuleType, types.FunctionType, type, types.BuiltinFunctionType)
        if isinstance(value, dict):
            self._add_table(value, label, seen)
        elif not isinstance(value, skipped) and hasattr(value, "__dict__"):
            self._add_table(vars(value), label, seen)

    def exclude(self, labels: set[str]) -> None:
        """Values that every forward changes (counters) are fixed knowingly; they do not call for a new capture."""
        kept = [i for i, label in enumerate(self.labels) if label not in labels]
        self.entries = [self.entries[i] for i in kept]
        self.labels = [self.labels[i] for i in kept]

    def values(self) -> list[Any]:
        """What the graph depends on now; equal lists mean that a captured graph still holds."""
        read = [table.get(key) for table, key in self.entries]
        read += [_plain_content(cell) for cell, _ in self.cells]
        read += [p.requires_grad for p in self.subject.parameters.values()]
        read.append(torch.is_autocast_enabled(self.subject.device.type))
        read += self._optimizer_structure()
        return read

    def _optimizer_structure(self) -> list[Any]:
        optimizer = self.subject.optimizer
        if optimizer is None:
            return []
        return [
            (len(g["params"]), g.get("amsgrad"), g.get("maximize"), g.get("nesterov"), g.get("fused"), g.get("foreach"),
             bool(g.get("momentum")), g.get("decoupled_weight_decay"))
            for g in optimizer.param_groups
        ]  # fmt: skip

    def differences(self, before: list[Any], after: list[Any]) -> Iterator[str]:
        """`name: old -> new` of what changed between two readings."""
        names = [*self.labels, *(n for _, n in self.cells), *self.subject.parameters, "autocast"]
        for i, (a, b) in enumerate(zip(before, after, strict=False)):
            if a != b or type(a) is not type(b):
                yield f"{names[i] if i < len(names) else 'optimizer group'}: {a!r} -> {b!r}"


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _plain_content(cell: Any) -> Any:
    value = _content(cell)
    return value if isinstance(value, _PLAIN) else id(value)
