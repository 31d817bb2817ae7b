"""A copy of everything a step may write: parameters, buffers, gradients, optimizer, modules, random generators.

A verification trains the user's own objects (a deep copy of a model may fail, and would not be what is trained), so
all of it is put back at the end; and a failed step is put back to be run again in pieces.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from wholestep.capture.optimizers import unused_state
from wholestep.capture.subject import Subject
from wholestep.capture.undo import Undo


class StateCopy:
    """The values of now; `restore` writes them back into the very same tensors and tables."""

    def __init__(self, subject: Subject, constants: Sequence[torch.Tensor] = ()) -> None:
        self.subject = subject
        self.python = Undo(subject.loss_fn, subject.model)
        self.values = {n: t.detach().clone() for n, t in [*subject.parameters.items(), *subject.buffers.items()]}
        self.live = {**subject.parameters, **subject.buffers}
        self.constants = [(t, t.detach().clone()) for t in constants]
        self.grads = [(p, p.grad, _cloned(p.grad)) for p in subject.parameters.values()]
        self.optimizer = None if subject.optimizer is None else OptimizerCopy(subject.optimizer)
        self.loss_scale = None if subject.loss_scale is None else subject.loss_scale.numbers.clone()

    def restore(self) -> None:
        self.python.restore()
        for name, tensor in self.live.items():
            tensor.detach().copy_(self.values[name])
        for tensor, value in self.constants:
            tensor.detach().copy_(value)
        for parameter, grad, value in self.grads:
            parameter.grad = grad
            if grad is not None:
                grad.detach().copy_(value)
        if self.optimizer is not None:
            self.optimizer.restore()
        if self.loss_scale is not None and self.subject.loss_scale is not None:
            self.subject.loss_scale.numbers.copy_(self.loss_scale)


class OptimizerCopy:
    """The tables of an optimizer and the tensors in them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.owner = optimizer
        self.attributes = dict(optimizer.__dict__)
        self.groups = [(group, dict(group)) for group in optimizer.param_groups]
        self.unused = unused_state(optimizer)
        """State made ahead of a first step that has not come: torch would have none yet."""
        self.state = [
            (p, table, dict(table), {k: _cloned(v) for k, v in table.items()}) for p, table in optimizer.state.items()
        ]

    def restore(self) -> None:
        attributes = self.owner.__dict__
        for name in [n for n in attributes if n not in self.attributes]:
            del attributes[name]
        attributes.update(self.attributes)
        for group, entries in self.groups:
            group.clear()
            group.update(entries)
        self.owner.state.clear()
        for parameter, table, entries, values in self.state:
            table.clear()
            table.update(entries)
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    table[key].detach().copy_(value)
            self.owner.state[parameter] = table

    def twin(self, stand_ins: dict[torch.Tensor, torch.Tensor]) -> Optimizer:
        """torch's own optimizer as it was, on other parameters: same class, numbers and state, nothing shared."""
        twin = object.__new__(type(self.owner))
        # a scheduler replaces `step` on the instance to count calls; the twin uses the class's own
        twin.__dict__.update({k: v for k, v in self.attributes.items() if k != "step"})
        twin.param_groups = [
            dict(entries, params=[stand_ins[p] for p in entries["params"]]) for _, entries in self.groups
        ]
        twin.state = defaultdict(dict)
        for parameter, _, _, values in self.state:
            if parameter in self.unused:
                continue
            twin.state[stand_ins[parameter]] = {k: _cloned(v) for k, v in values.items()}
        return twin


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
