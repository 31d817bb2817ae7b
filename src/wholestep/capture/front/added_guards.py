"""Guards that Dynamo leaves out, added to captures that are for us.

- One object at two places: guarded by Dynamo only if both are found in arguments, or both in globals. A config that a layer
  holds and a global names could be replaced in the layer without notice.
- A key that was looked up and is missing, which the code catches: guarded by Dynamo for `in` and `get` only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables import ConstDictVariable, builder

from wholestep.capture.front.assumed import assuming


def _one_object(plain: Callable[..., Any]) -> Callable[..., Any]:
    def guard(place: Any, other: Any) -> Any:
        found = plain(place, other)
        if found is None and getattr(assuming, "on", False) and other and other != place:
            return functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=other)
        return found

    return guard


def _looked_up(plain: Callable[..., Any]) -> Callable[..., Any]:
    def look_up(self: Any, tx: Any, key: Any) -> Any:
        if getattr(assuming, "on", False) and key not in self:
            self.install_dict_contains_guard(tx, [key])
        return plain(self, tx, key)

    return look_up


builder.make_dupe_guard = _one_object(builder.make_dupe_guard)
ConstDictVariable.getitem_const_raise_exception_if_absent = _looked_up(
    ConstDictVariable.getitem_const_raise_exception_if_absent
)
