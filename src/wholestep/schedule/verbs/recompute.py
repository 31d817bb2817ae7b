"""`recompute`: values are not kept for the backward pass but recomputed there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.checkpoint import checkpoint

from wholestep.capture.edits import Change, Rewrite
from wholestep.errors import BadOption
from wholestep.schedule import rewrite
from wholestep.schedule.changes import wrapping_change
from wholestep.schedule.modules import Modules, once
from wholestep.schedule.pattern import trace_pattern
from wholestep.schedule.verb import AUTO, Verb, loaded, objects, verb


@verb
class recompute(Verb):
    """Do not keep what modules compute on the way; make it again in the backward pass from what they were given.

    every: only every n-th of the modules that the place names, from the first.
    ratio: only round(ratio x number) of them, the first ones; 0 keeps all, "auto" leaves it to the memory budget.
    pattern: only the values of operators that match a plain function.

    A place may also be a value: layers.*.mlp/gelu, or layers.*.mlp/gelu@12 in the first 12 layers. What a module returns is kept.
    It beats the memory budget, and every bit stays the same. Example: sch["layers.*"].recompute(ratio=0.5)
    """

    every: int | None = None
    ratio: float | str | None = None
    pattern: Any = objects()

    def check(self, modules: Modules) -> None:
        if sum(value is not None for value in (self.every, self.ratio, self.pattern)) > 1:
            raise BadOption("recompute takes one of every=, ratio= and pattern=")
        if self.every is not None and (
            not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1
        ):
            raise BadOption(f"every={self.every!r}", hint="give a whole number, 1 or more")
        ratio = self.ratio
        if ratio is not None and ratio != AUTO:
            if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 0 <= ratio <= 1:
                raise BadOption(f"ratio={ratio!r}", hint='give a number from 0 to 1, or "auto"')
        if "/" in self.at:
            if self.arguments():
                raise BadOption(f"{self.at} is a value, which {', '.join(self.arguments())} does not go with")
            return
        modules.select(self.at)
        if self.pattern is not None:
            trace_pattern(loaded(self.pattern))

    def chosen(self, modules: Modules) -> dict[str, bool]:
        """Path of every module that the line decides about -> whether its values are recomputed."""
        paths = list(modules.select(self.at))
        if self.ratio == AUTO:
            return {}
        if self.every is not None:
            return {path: index % self.every == 0 for index, path in enumerate(paths)}
        count = len(paths) if self.ratio is None else round(float(self.ratio) * len(paths))
        return {path: index < count for index, path in enumerate(paths)}

    def rewrite(self) -> Rewrite | None:
        if self.pattern is None:
            return None
        pattern = trace_pattern(loaded(self.pattern))
        return rewrite.PatternRewrite(str(self), pattern, self.at, rewrite.marker(str(self)))

    def eager(self, modules: Modules) -> Sequence[Change]:
        if self.pattern is not None or "/" in self.at:
            return super().eager(modules)
        chosen = self.chosen(modules)
        found = {path: module for path, module in modules.select(self.at).items() if chosen.get(path)}
        return [wrapping_change(path, module, _checkpointed, "Recomputed") for path, module in once(found).items()]


def _checkpointed(original: Any) -> Any:
    """torch's own checkpoint around a forward, for a model that runs in eager PyTorch."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(original.forward, self, *args, use_reentrant=False, **kwargs)

    return forward
