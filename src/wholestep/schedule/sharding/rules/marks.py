"""What is no computation: the loss and aux are whole on every rank, gradients that hooks see lie as their parameters do, and an
activation checkpoint is what it holds, for Wholestep plans what is kept."""

from __future__ import annotations

from typing import Any

from wholestep.capture.front import traced
from wholestep.schedule.sharding.layout import WHOLE
from wholestep.schedule.sharding.program import Program
from wholestep.schedule.sharding.registry import rule
from wholestep.schedule.sharding.values import Called, Value

_MODULE = traced.__name__


@rule(f"{_MODULE}.mark_loss")
def mark_loss(p: Program, call: Called) -> Any:
    return p.again(call, WHOLE, p.reduced)


@rule(f"{_MODULE}.mark_aux")
def mark_aux(p: Program, call: Called) -> Any:
    """The user gets the whole value."""
    return p.again(call, WHOLE, lambda value: p.gathered(value, f"aux[{call.args[0]!r}] is whole"))


@rule(f"{_MODULE}.gradients")
def gradients(p: Program, call: Called) -> Any:
    loss, *parameters = call.args
    found = p.emit(call.target, p.reduced(loss), *parameters, layout=WHOLE)
    return tuple(Value(one.node, of.layout, of.shape, of.by) for one, of in zip(found, parameters, strict=True))


@rule(f"{_MODULE}.mark_gradients")
def mark_gradients(p: Program, call: Called) -> Any:
    return p.again(call, WHOLE, p.reduced)


@rule("torch.ops.higher_order.tag_activation_checkpoint")
def checkpoint(p: Program, call: Called) -> Any:
    body = getattr(p.module, str(call.args[0].node.target))
    return p.inlined(body, call.args[1:])
