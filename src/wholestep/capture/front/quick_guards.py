"""What Dynamo does again for every guard, some two hundred times per layer, is done once for all that are alike.

A guard's value is found by evaluating text, place by place: equal layers have equal texts, so each is compiled once. And each
guard is told with its line of the user's code, in a file of which the short name is found by comparing paths.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torch._guards import ChainedSource
from torch.utils import _traceback

_BASE = "base_"


@functools.lru_cache(maxsize=1 << 14)
def _compiled(template: str) -> types.CodeType:
    return compile(template.format(_BASE), "<string>", "eval")


def _get_value(self: Any, globals: dict[str, Any], locals: dict[str, Any], cache: Any) -> Any:
    """ChainedSource.get_value, but that its text is compiled once."""
    if self in cache:
        return cache[self]
    locals[_BASE] = self.base.get_value(globals, locals, cache)
    try:
        value = cache[self] = eval(_compiled(self._name_template), globals, locals)
    finally:
        del locals[_BASE]
    return value


ChainedSource.get_value = _get_value  # type: ignore[method-assign]
_traceback.shorten_filename = functools.lru_cache(maxsize=1 << 10)(_traceback.shorten_filename)
