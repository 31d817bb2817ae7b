"""Dynamo as front end: from the user's loss to a graph of torch calls, and the conditions under which it holds."""

from wholestep.capture.front.front import Front
from wholestep.capture.front.loss_graph import LossGraph

__all__ = ["Front", "LossGraph"]
