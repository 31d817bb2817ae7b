"""How layouts follow from `shard` through the graph of the forward, and that graph as the program of one rank."""

from wholestep.schedule.sharding.layout import Sharding
from wholestep.schedule.sharding.localise import Localised, Sync, localise
from wholestep.schedule.sharding.program import Collective

__all__ = ["Collective", "Localised", "Sharding", "Sync", "localise"]
