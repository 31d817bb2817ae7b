"""Optimizers whose update is part of a captured step: one record each, in one table.

Out: `UPDATES` (kind -> Update) and `update_of` (optimizer -> its Update, or None). How to add one: docs/add-an-optimizer.md.
"""

from torch.optim import Optimizer

from wholestep.ops.updates.adafactor import ADAFACTOR
from wholestep.ops.updates.adagrad import ADAGRAD
from wholestep.ops.updates.adam import ADAM
from wholestep.ops.updates.lion import LION
from wholestep.ops.updates.muon import MUON
from wholestep.ops.updates.nadam import NADAM
from wholestep.ops.updates.rmsprop import RMSPROP
from wholestep.ops.updates.sgd import SGD
from wholestep.ops.updates.update import Rule, Update

UPDATES = {update.kind: update for update in (SGD, ADAM, NADAM, ADAGRAD, RMSPROP, ADAFACTOR, MUON, LION)}
BY_CLASS = {cls: update for update in UPDATES.values() for cls in update.classes}
BY_IN_PLACE = {update.in_place: update for update in UPDATES.values()}


def update_of(optimizer: Optimizer) -> Update | None:
    return BY_CLASS.get(type(optimizer))


__all__ = ["BY_CLASS", "BY_IN_PLACE", "UPDATES", "Rule", "Update", "update_of"]
