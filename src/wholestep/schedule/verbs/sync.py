"""`sync`: where ranks exchange what they have computed."""

from __future__ import annotations

from wholestep.errors import BadOption
from wholestep.schedule.modules import Modules, check_axis, nearest
from wholestep.schedule.verb import Verb, verb

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "scatter")
WHEN = ("forward", "backward", "forward_input")


@verb
class sync(Verb):
    """Exchange a module's values between the ranks of a mesh axis.

    operation: all_reduce follows from `shard`, and a line that asks for it is checked against that. all_gather (a cut value
    becomes whole), scatter (a whole one is cut) and reduce_scatter (a partial sum is summed up and cut) are carried out, and
    checked to find such a value. when: forward (the output), forward_input, or backward (the gradient of the input; all_reduce
    only). axis: the dimension that is gathered or scattered. over: the mesh axis.
    Example: sch["layers.*.mlp.down"].sync("all_reduce")
    """

    operation: str = "all_reduce"
    when: str = "forward"
    axis: int | None = None
    over: str = "tp"

    def check(self, modules: Modules) -> None:
        modules.select(self.at)
        check_axis(self.name, self.over)
        for what, value, known in (("operation", self.operation, OPERATIONS), ("when", self.when, WHEN)):
            if value not in known:
                hint = nearest(str(value), list(known), f"use one of {', '.join(known)}")
                raise BadOption(f"sync {what}={value!r}", hint=hint)
        if self.axis is not None and (not isinstance(self.axis, int) or isinstance(self.axis, bool)):
            raise BadOption(f"sync axis={self.axis!r}", hint="give a dimension, from 0 or from the end (-1)")
        if self.operation != "all_reduce" and self.axis is None:
            raise BadOption(f"sync {self.operation} without a dimension", hint="give axis=")
        if self.operation != "all_reduce" and self.when == "backward":
            hint = "what the backward pass exchanges follows from the forward pass"
            raise BadOption(f"sync {self.operation} in the backward pass", hint=hint)
