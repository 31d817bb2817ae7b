"""Marks that say where a running step is: phases and modules of plain PyTorch, calls of a lowered step.

Nothing here keeps a tensor or makes one, so the memory of the step is the same with the marks as without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep.lower.footprint.events import mark
from wholestep.lower.footprint.owners import gradients_of, plain_modules, storage_of, tensors_of
from wholestep.lower.runner import Runner
from wholestep.ops import IN_PLACE

DRIVER = "<wholestep marked step>"
"""File name of the marked driver, in tracebacks."""
_CALL = re.compile(r"^    (?:(?P<left>[^=#(]+) = )?(?P<function>_(?:op_|region)\d+)\(")


# ---- plain PyTorch ----


@contextlib.contextmanager
def phases_marked(model: Any, optimizer: Optimizer | None, gradients: list[dict[int, str]]) -> Iterator[None]:
    """Marks the beginning and end of every backward pass and update; appends the gradients' addresses at each of them.

    Whoever calls `loss.backward()` or `torch.autograd.grad` reaches these two functions by their names in torch.autograd.
    """
    kept = torch.autograd.backward, torch.autograd.grad

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            with mark("backward"):
                pass
            try:
                return function(*args, **kwargs)
            finally:
                note("backward ends")

        return marked

    def note(text: str, *_: Any) -> None:
        with mark(text):
            pass
        gradients.append(gradients_of(model))

    torch.autograd.backward, torch.autograd.grad = map(around, kept)  # type: ignore[assignment]
    hooks: list[Any] = []
    if optimizer is not None:
        hooks.append(optimizer.register_step_pre_hook(lambda *_: note("update")))
        hooks.append(optimizer.register_step_post_hook(lambda *_: note("update ends")))
    try:
        yield
    finally:
        torch.autograd.backward, torch.autograd.grad = kept  # type: ignore[assignment]
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def modules_marked(model: Any) -> Iterator[None]:
    """Marks which module is running. Not for compiled modules: hooks would have them compiled anew."""
    paths = {
        inner: f"{prefix}.{path}".strip(".")
        for prefix, module in plain_modules(model).items() for path, inner in module.named_modules()
    }  # fmt: skip
    running: list[Any] = []

    def enter(module: nn.Module, *_: Any) -> None:
        if module in paths:
            running.append(mark(f"module|{paths[module]}"))
            running[-1].__enter__()

    def leave(module: nn.Module, *_: Any) -> None:
        if module in paths and running:
            running.pop().__exit__(None, None, None)

    hooks = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# ---- a lowered step ----


@dataclasses.dataclass(slots=True)
class Made:
    """One call of the driver: what it was given and what it returned."""

    region: bool
    update: bool
    """Whether it is an optimizer's in-place update, which returns nothing."""
    reads: tuple[int, ...]
    """Addresses of the storages it was given."""
    results: tuple[tuple[str, int, tuple[int, ...], str], ...] = ()
    """(name, address, shape, dtype); names are those of the graph's values, `name[2]` in a list."""


class MarkedRunner:
    """The same driver over the same functions, with a mark around each call and a note of what it returned."""

    def __init__(self, runner: Runner, calls: list[Made]) -> None:
        self.calls, facts = calls, runner.describe()
        source: str = facts["driver"]
        self.left = {
            number: tuple(name.strip() for name in (found["left"] or "").split(",") if name.strip())
            for number, line in enumerate(source.splitlines(), start=1) if (found := _CALL.match(line))
        }  # fmt: skip
        inner = runner._function
        assert inner is not None
        namespace = {
            name: self._marked(value, name.startswith("_region")) if _CALL.match(f"    {name}(") and callable(value) else value
            for name, value in inner.__globals__.items()
        }  # fmt: skip
        exec(compile(source, DRIVER, "exec"), namespace)
        self.runner = Runner(namespace["step"], runner.num_inputs, facts)

    def _marked(self, function: Callable[..., Any], region: bool) -> Callable[..., Any]:
        update = function in IN_PLACE.values()

        def marked(*args: Any, **kwargs: Any) -> Any:
            made = Made(region, update, tuple(storage_of(tensor)[0] for _, tensor in tensors_of((args, kwargs))))
            with mark(f"call|{len(self.calls)}"):
                self.calls.append(made)
                result = function(*args, **kwargs)
            made.results = _results(self.left.get(sys._getframe(1).f_lineno, ()), result, region)
            return result

        return marked


def _results(names: tuple[str, ...], result: Any, region: bool) -> tuple[tuple[str, int, tuple[int, ...], str], ...]:
    several = isinstance(result, list | tuple)
    values = list(result) if several else [result]
    if several and not region:
        names = tuple(f"{names[0] if names else ''}[{index}]" for index in range(len(values)))
    return tuple(
        (name, storage_of(value)[0], tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in zip(names, values, strict=False) if isinstance(value, torch.Tensor)
    )  # fmt: skip


@contextlib.contextmanager
def calls_marked(variant: Any, calls: list[Made]) -> Iterator[None]:
    """The variant of a Step runs through marked drivers; a recorded CUDA graph is left aside, its code runs directly."""
    kept = variant.runner, variant.update_runner
    variant.runner, variant.update_runner = (
        None if r is None else MarkedRunner(_direct(r), calls).runner for r in kept
    )
    try:
        yield
    finally:
        variant.runner, variant.update_runner = kept


def _direct(runner: Any) -> Runner:
    return runner if isinstance(runner, Runner) else runner.runner
