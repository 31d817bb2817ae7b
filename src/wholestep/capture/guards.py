"""The guard: what a captured graph has burned in, looked at before every step.

make_fx records no guards. So every plain Python value that the modules, the loss function and the optimizer hold (flags,
probabilities, sizes, closure variables, hooks) is read again before each step; when one changes, the step is captured anew.
Reading a few thousand dictionary entries takes about a tenth of a millisecond.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from wholestep.capture.reach import PLAIN, reached
from wholestep.capture.subject import Subject

_IGNORED = {"_is_full_backward_hook", "_version", "_is_hf_initialized", "call_super_init"}
_BACKWARD_HOOKS = attrgetter("_backward_hooks")
_LATE_HOOKS = attrgetter("_post_accumulate_grad_hooks")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Same:
    """An object compared by identity, and kept alive: an address that is used again must not look like the old object."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"a {type(self.value).__name__}"


class Guards:
    """Every plain value that a capture of `subject` may have fixed."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.excluded: set[str] = set()
        self._read_structure()

    def _read_structure(self) -> None:
        """Find all places to watch; done again when an object among them was replaced."""
        subject = self.subject
        self.tables: list[dict] = []
        self.keys: list[Any] = []
        self.labels: list[str] = []
        self.hooks: list[dict] = []
        self.children: list[tuple[nn.Module, list[nn.Module | None]]] = []
        self.places, foreign = reached(subject)
        seen: set[int] = set()
        for label, module in [*subject.root.named_modules(), *foreign.items()]:
            self._add_module(module, label, seen)
        self.objects = [_identity(place.read()) for place in self.places]

    def _add_module(self, module: nn.Module, label: str, seen: set[int]) -> None:
        table = module.__dict__
        self._add_table(table, label, seen)
        for key, value in table.items():
            if key.startswith("_") or isinstance(value, (*PLAIN, torch.Tensor, nn.Module, type, types.ModuleType)):
                continue
            if isinstance(value, dict):
                self._add_table(value, f"{label}.{key}".lstrip("."), seen)
            elif hasattr(value, "__dict__") and not callable(value):  # a config
                self._add_table(vars(value), f"{label}.{key}".lstrip("."), seen)
        self.hooks += [table[name] for name in _HOOKS if name in table]
        if module._modules:
            self.children.append((module, list(module._modules.values())))

    def _add_table(self, table: dict, label: str, seen: set[int]) -> None:
        if id(table) in seen:
            return
        seen.add(id(table))
        for key, value in table.items():
            name = f"{label}.{key}".lstrip(".")
            if _is_plain(value) and key not in _IGNORED and name not in self.excluded:
                self.tables.append(table)
                self.keys.append(key)
                self.labels.append(name)

    def exclude(self, labels: set[str]) -> None:
        """Values that every forward changes (counters) are fixed knowingly; they do not call for a new capture."""
        self.excluded |= labels
        kept = [i for i, label in enumerate(self.labels) if label not in self.excluded]
        self.tables = [self.tables[i] for i in kept]
        self.keys = [self.keys[i] for i in kept]
        self.labels = [self.labels[i] for i in kept]

    def restructured(self) -> bool:
        """Whether a submodule was replaced, added or removed: then nothing that was captured holds."""
        return any(list(module._modules.values()) != children for module, children in self.children)

    def attributes(self) -> dict[str, Any]:
        """The plain values among the attributes of modules and configs, by name."""
        return dict(zip(self.labels, map(dict.get, self.tables, self.keys)))

    def with_attributes(self, values: list[Any], settled: Mapping[str, Any]) -> list[Any]:
        """A reading as it would be with other values for the attributes named."""
        read = [settled.get(label, value) for label, value in zip(self.labels, values)]
        return read + values[len(read) :]

    def values(self) -> list[Any]:
        """What the graph depends on now; equal lists mean that a captured graph still holds."""
        objects = [_identity(place.read()) for place in self.places]
        if objects != self.objects:  # another dict or object holds the values now
            self._read_structure()
            objects = self.objects
        read = list(map(dict.get, self.tables, self.keys))
        read += objects
        parameters = self.subject.parameters.values()
        read += [p.requires_grad for p in parameters]
        read.append([None if hooks is None else tuple(hooks) for hooks in map(_BACKWARD_HOOKS, parameters)])
        read.append([bool(hooks) for hooks in map(_LATE_HOOKS, parameters)])
        read.append(torch.is_autocast_enabled(self.subject.device.type))
        read += [tuple(table) for table in self.hooks if table]
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
        names = [*self.labels, *(p.label for p in self.places), *self.subject.parameters]
        names += ["parameter hooks", "late hooks", "autocast"]
        if len(before) != len(after):
            yield "what the loss function reads, or a hook"
            return
        for i, (a, b) in enumerate(zip(before, after, strict=True)):
            if a != b or type(a) is not type(b):
                yield f"{names[i] if i < len(names) else 'hooks or optimizer group'}: {a!r} -> {b!r}"


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(isinstance(v, PLAIN) for v in value))


def _identity(value: Any) -> Any:
    """Plain values by value, tensors by what a graph fixes of them (their data is read live), all else by identity."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.dtype, value.device)
    return _Same(value)
