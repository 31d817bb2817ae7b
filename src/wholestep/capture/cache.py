"""Captured graphs, kept on disk across processes: tracing a 24-layer model takes seconds, loading it a fraction of one.

A graph may be reused only if everything it was traced from is the same: the source files of the user's program, the classes
and plain attributes of every module, shapes and dtypes, the loss function's code and closure, the optimizer's structure, the
batch's structure, and the versions of Python, torch and Wholestep itself. All of it goes into one hash. What cannot be
hashed (a tensor or a foreign module in the loss's closure) means no cache. And a cached graph passes `check="first"` like any
other: the first live step is compared with eager PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import platform
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wholestep import compat
from wholestep.capture import optimizers
from wholestep.capture.batch import BatchSpec, signature
from wholestep.capture.ladder import Climb, climb
from wholestep.capture.optimizers import UpdatePlan
from wholestep.capture.preflight import notes_on, refuse_unsupported
from wholestep.capture.reach import reached
from wholestep.capture.subject import Subject
from wholestep.capture.trace import Capture
from wholestep.disk import cache_folder, read_bytes, write_atomically
from wholestep.errors import CaptureRefused
from wholestep.graph.serialise import dumps, loads

_PLAIN = (int, float, complex, str, bool, bytes, type(None), torch.dtype, torch.device, torch.Size)


class _NotHashable(Exception):
    """Something the graph may depend on has no stable description."""


def cached_climb(
    subject: Subject, tensors: Sequence[torch.Tensor], spec: BatchSpec, dynamic: Any, *, enabled: bool = True
) -> Climb:
    """`climb`, or its result from an earlier process."""
    if not enabled or dynamic is not None:
        return climb(subject, tensors, spec, dynamic=dynamic)
    try:
        refuse_unsupported(subject)
        key = capture_key(subject, tensors, spec)
    except (CaptureRefused, _NotHashable):
        return climb(subject, tensors, spec)
    path = cache_folder("captures") / f"{key}.graph"
    found = _load(path, subject, spec)
    if found is not None:
        return Climb(found, (), tuple(notes_on(subject)))
    made = climb(subject, tensors, spec)
    if made.capture is not None and made.capture.rung == "whole step" and not made.capture.constants:
        _store(path, made.capture)
    return made


def _store(path: Path, capture: Capture) -> None:
    try:
        parts = [dumps(capture.graph), dumps(capture.update) if capture.update else b""]
    except ValueError:  # symbolic sizes, or constants too large to keep
        return
    facts = {
        "aux_names": capture.aux_names,
        "num_sites": capture.num_sites,
        "plans": [dataclasses.asdict(p) for p in capture.plans],
        "notes": capture.notes,
        "settled": capture.settled,
        "sizes": [len(p) for p in parts],
    }
    write_atomically(path, json.dumps(facts).encode() + b"\n" + b"".join(parts))


def _load(path: Path, subject: Subject, spec: BatchSpec) -> Capture | None:
    data = read_bytes(path)
    if data is None:
        return None
    mode = compat.new_fake_mode()
    try:
        header, body = data.split(b"\n", 1)
        facts = json.loads(header)
        first, second = facts["sizes"]
        if len(body) != first + second:
            return None
        graph = loads(body[:first], mode)
        update = loads(body[first:], mode) if second else None
        plans = tuple(
            UpdatePlan(p["group"], p["part"], p["kind"], tuple(p["names"]), tuple(p["state_keys"]),
                       tuple((k, v) for k, v in p["flags"]))
            for p in facts["plans"]
        )  # fmt: skip
    except (ValueError, KeyError, TypeError):  # written by another version, or torn: traced anew
        return None
    return Capture(
        graph, update, spec, tuple(facts["aux_names"]), facts["num_sites"], plans, (), list(facts["notes"]),
        fake_mode=mode, from_cache=True, settled=facts["settled"],
    )  # fmt: skip


def capture_key(subject: Subject, tensors: Sequence[torch.Tensor], spec: BatchSpec) -> str:
    """One hash over all that the trace depends on."""
    digest = hashlib.sha256()
    for part in (
        _versions(), _sources(subject.root), _modules(subject), _loss(subject), _reached(subject), _optimizer(subject),
        (spec.tree, signature(tensors), subject.precision, subject.accumulate, subject.clip_norm is None, subject.nonfinite),
        subject.chunked_loss,
        (torch.get_default_dtype(), torch.is_autocast_enabled(subject.device.type)),
        (subject.on_gpu, torch.backends.cudnn.enabled),
    ):  # fmt: skip
        digest.update(repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:40]


def _versions() -> tuple:
    return (torch.__version__, platform.python_version(), _own_sources())


@functools.cache
def _own_sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources(root: nn.Module) -> list[tuple]:
    """The user's program by content, installed packages that define modules by size and time of their files."""
    found: list[tuple] = []
    libraries = {type(m).__module__ for m in root.modules()}
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not path or not os.path.isfile(path) or name.startswith(("wholestep", "torch.", "triton.")):
            continue  # torch loads the code it generates as modules of its own
        installed = "site-packages" in path or "dist-packages" in path or path.startswith(os.path.dirname(os.__file__))
        if not installed:
            found.append((name, _file_hash(path, os.path.getmtime(path))))
        elif name in libraries:
            stat = os.stat(path)
            found.append((name, stat.st_size, int(stat.st_mtime)))
    return found


@functools.cache
def _file_hash(path: str, modified: float) -> str:
    data = read_bytes(Path(path))
    return hashlib.sha256(data or b"").hexdigest()


def _modules(subject: Subject) -> list[tuple]:
    found: list[tuple] = []
    seen: set[int] = set()
    for path, module in subject.root.named_modules():
        cls = type(module)
        attributes = tuple(
            (k, _describe(v, seen)) for k, v in sorted(module.__dict__.items()) if not k.startswith("_") and k != "forward"
        )
        hooks = tuple(len(getattr(module, h)) for h in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"))
        if "forward" in module.__dict__:  # a patched instance
            attributes += (("forward", _describe(module.__dict__["forward"], seen)),)
        found.append((path, cls.__module__, cls.__qualname__, attributes, hooks))
    trained = subject.trained
    for name, t in [*subject.parameters.items(), *subject.buffers.items()]:
        hooks = tuple(_describe(h, seen) for h in (t._backward_hooks or {}).values())
        found.append((name, tuple(t.shape), t.stride(), t.dtype, str(t.device), name in trained, hooks))
    found.append(tuple(sorted(subject.aliases.items())))
    return found


def _describe(value: Any, seen: set[int]) -> Any:
    """A stable description of an attribute; raises for what has none."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, nn.Module | nn.Parameter):
        return type(value).__qualname__
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.dtype)
    if id(value) in seen:
        return ("again", type(value).__qualname__)
    seen.add(id(value))
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return (type(value).__name__, tuple(_describe(v, seen) for v in items))
    if isinstance(value, dict):
        return ("dict", tuple((repr(k), _describe(v, seen)) for k, v in value.items()))
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        return _describe_function(value, seen)
    if isinstance(value, type | types.BuiltinFunctionType | types.ModuleType):
        return getattr(value, "__qualname__", getattr(value, "__name__", str(type(value))))
    if hasattr(value, "to_dict") and hasattr(value, "model_type"):  # a Hugging Face config
        chosen = getattr(value, "_attn_implementation", None)  # which to_dict leaves out
        return ("config", chosen, json.dumps(value.to_dict(), sort_keys=True, default=str))
    if hasattr(value, "__dict__"):
        # private attributes hold hashes and handles that differ between processes (GenerationConfig does)
        public = [(k, v) for k, v in sorted(vars(value).items()) if not k.startswith("_")]
        return (type(value).__qualname__, tuple((k, _describe(v, seen)) for k, v in public))
    return ("object", type(value).__qualname__)


def _describe_function(function: Any, seen: set[int]) -> tuple:
    if isinstance(function, functools.partial):
        return ("partial", _describe(function.func, seen), _describe(function.args, seen), _describe(function.keywords, seen))
    if isinstance(function, types.MethodType):
        owner = function.__self__
        return ("method", function.__func__.__qualname__, _describe(owner, seen))
    code = function.__code__
    closure = tuple(_describe_closure(cell, seen) for cell in function.__closure__ or ())
    named = tuple(
        (n, _describe_closure_value(function.__globals__[n], seen)) for n in code.co_names if n in function.__globals__
    )
    return (function.__qualname__, _code(code), closure, _describe(function.__defaults__, seen), named)


def _code(code: types.CodeType) -> tuple:
    constants = tuple(_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts)
    return (code.co_code.hex(), constants, code.co_names, code.co_varnames)


def _describe_closure(cell: Any, seen: set[int]) -> Any:
    try:
        value = cell.cell_contents
    except ValueError:
        return "empty"
    return _describe_closure_value(value, seen)


def _describe_closure_value(value: Any, seen: set[int]) -> Any:
    if isinstance(value, torch.Tensor | nn.Module):
        raise _NotHashable("the loss reaches a tensor or module outside `model`")
    return _describe(value, seen)


def _loss(subject: Subject) -> Any:
    members = {id(m) for m in subject.root.modules()}
    function = subject.loss_fn
    cells = [c for c in getattr(function, "__closure__", None) or ()]
    if all(isinstance(v, nn.Module) and id(v) in members for v in _contents(cells)) and cells:
        return _code(function.__code__)
    return _describe(function, set())


def _reached(subject: Subject) -> list[tuple]:
    """Plain values that the loss or a module of the user's reads from closures and globals."""
    values = ((place.label, place.read()) for place in reached(subject)[0])
    return [(label, value) for label, value in values if isinstance(value, _PLAIN)]


def _contents(cells: list[Any]) -> Iterator[Any]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:
            yield None


def _optimizer(subject: Subject) -> tuple:
    optimizer = subject.optimizer
    if optimizer is None:
        return ("none",)
    if optimizers.supported(optimizer) is not None:
        return ("eager",)
    names = {id(p): n for n, p in subject.trained.items()}
    return tuple(dataclasses.astuple(p) for p in optimizers.plan_updates(optimizer, names))
