"""How layouts follow from `shard` through the graph of the forward, and that graph as the program of one rank."""

from wholestep.schedule.sharding.localise import Localised, Sync, localise, parameter_names
from wholestep.schedule.sharding.writer import Collective

__all__ = ["Collective", "Localised", "Sync", "localise", "parameter_names"]
