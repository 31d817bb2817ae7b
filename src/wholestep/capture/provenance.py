"""Where each node comes from: the module that ran, its source line, and for backward nodes the forward they belong to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from wholestep import compat
from wholestep.graph.training_graph import phase_of


class ModuleCalls:
    """Notes which module runs, by wrapping `nn.Module.__call__` while active.

    No hooks are registered on the user's modules: hooks change which fast paths modules take, and would be seen by them.
    """

    def __init__(self, root: nn.Module, noted: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self.paths = {id(m): path for path, m in root.named_modules()}
        self.noted = noted
        self.outputs: dict[str, torch.Tensor] = {}
        """Module path (`path#2` at its second call) -> its first output tensor, or what `noted` makes of it, by completion."""

    @contextlib.contextmanager
    def recorded(self, *, annotate: bool) -> Iterator[ModuleCalls]:
        original = nn.Module.__call__
        calls = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = calls.paths.get(id(module))
            context = compat.annotate(module=path) if annotate and path else contextlib.nullcontext()
            with context:
                output = original(module, *args, **kwargs)
            if path:
                calls._note(path, output)
            return output

        nn.Module.__call__ = call  # type: ignore[method-assign,assignment]
        try:
            yield self
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]

    def _note(self, path: str, output: Any) -> None:
        tensor = _first_tensor(output)
        if tensor is None or compat.of_a_transform(tensor):
            return
        name, call = path, 1
        while name in self.outputs:
            call += 1
            name = f"{path}#{call}"
        self.outputs[name] = tensor if self.noted is None else self.noted(tensor)


def _first_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((t for t in map(_first_tensor, value) if t is not None), None)
    return None


def attribute_backward(module: fx.GraphModule) -> None:
    """Give every backward node the module path and source line of the forward operator it differentiates."""
    forward: dict[int, dict] = {}
    for node in module.graph.nodes:
        custom = node.meta.get("custom") or {}
        number = node.meta.get("seq_nr")
        if custom.get("phase") == "forward" and number is not None:
            forward.setdefault(number, custom)
    for node in module.graph.nodes:
        custom = node.meta.get("custom") or {}
        if custom.get("phase") == "backward":
            origin = forward.get(node.meta.get("seq_nr", -1), {})
            facts = {k: origin[k] for k in ("module", "source", "matched") if k in origin}
            node.meta["custom"] = {"phase": "backward", **facts}


def complete(module: fx.GraphModule) -> None:
    """Nodes that a later tracing added without facts take those of the node before them."""
    last: dict[str, Any] = {"phase": "forward"}
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        custom = node.meta.get("custom")
        if not custom or "phase" not in custom:
            node.meta["custom"] = {**last, **(custom or {})}
        last = {k: v for k, v in node.meta["custom"].items() if k in ("phase", "module")}
        assert phase_of(node) in ("forward", "backward", "update")
