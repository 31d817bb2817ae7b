"""How a model runs, said apart from what it is: addresses, verbs, recipes, and what they resolve to [Slapo, made safe].

The package is callable, as `verify` is: importing any of its modules binds the name `wholestep.schedule` to the package, which
would otherwise hide the function of that name.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from wholestep.schedule.recipe import Recipe
from wholestep.schedule.resolve import Scheduled, resolve
from wholestep.schedule.schedule import Schedule, recipe_of
from wholestep.schedule.schedule import schedule as _schedule


class _CallablePackage(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Schedule:
        return _schedule(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage

__all__ = ["Recipe", "Schedule", "Scheduled", "recipe_of", "resolve"]
