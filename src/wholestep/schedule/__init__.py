"""How a model runs, said apart from what it is: addresses, verbs, recipes, and what they resolve to [Slapo, made safe]."""

from __future__ import annotations

from wholestep.schedule.recipe import Recipe
from wholestep.schedule.resolve import Scheduled, resolve
from wholestep.schedule.schedule import Schedule, recipe_of

__all__ = ["Recipe", "Schedule", "Scheduled", "recipe_of", "resolve"]
