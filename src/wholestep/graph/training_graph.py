"""TrainingGraph: one functional FX graph of a whole training step, and what each input and output means.

Capture makes it, passes rewrite it, `lower/` turns it into something that runs. The graph itself never mutates anything:
what a step changes (parameters, buffers, optimizer state) leaves as an UPDATE output that names the input it replaces,
so the table of donations is part of the graph and only `lower/` has to think about memory that is written in place.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from wholestep.graph.mesh import ALONE, Ranks


class Role(enum.Enum):
    """Who owns an input, hence where the runtime finds its value before each step."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    STATE = "state"
    """Optimizer state; `optimizer.state` stays its one owner."""
    HYPER = "hyper"
    """Numbers of the optimizer (lr, betas, ...) as one float64 tensor per group: nothing numeric is burned in."""
    BATCH = "batch"
    KEY = "key"
    """0-d int64: the random key of one dropout (or random-number) site, new at every step."""
    CONSTANT = "constant"
    """A tensor the loss reached through a closure or a global; read live at every step."""
    GRADIENT = "gradient"
    """Accumulated gradients, handed from the micro-step's graph to the update's graph."""
    SCALE = "scale"
    """The loss scale of `precision="fp16"` and its counters; the Step owns it."""


class OutputKind(enum.Enum):
    """What the caller does with an output."""

    LOSS = "loss"
    AUX = "aux"
    """An entry of the user's `aux`: in the order of its keys, which may be anything that a dictionary takes."""
    KEPT = "kept"
    """What the caller holds on to besides, under a name of ours; never one of the user's."""
    NORM = "norm"
    """The global gradient norm before clipping."""
    GRADIENT = "gradient"
    """A gradient handed to the caller (`optimizer=None`, or an optimizer that is not captured)."""
    UPDATE = "update"
    """The new value of input number `target`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """One placeholder: its role and a name unique within the role (`encoder.0.weight`, `encoder.0.weight/exp_avg`)."""

    role: Role
    name: str

    def __str__(self) -> str:
        return f"{self.role.value}:{self.name}"


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """One value of the flat output tuple."""

    kind: OutputKind
    name: str
    target: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What a graph is made for. Not to be read off its tensors: those of a dry capture are said to be on a CPU all the same."""

    device: str = "cpu"
    """Of torch's kinds: cpu, cuda."""

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"


@dataclasses.dataclass(slots=True)
class TrainingGraph:
    """A functional FX graph plus the meaning of its inputs and outputs."""

    module: fx.GraphModule
    inputs: tuple[Input, ...]
    """Aligned with the placeholders."""
    outputs: tuple[Output, ...]
    """Aligned with the flat output tuple."""
    gradients: dict[str, str] = dataclasses.field(default_factory=dict)
    """Parameter name -> name of the node that holds its final gradient, before clipping; perhaps in a narrower dtype
    (`lean_gradients`), of which the update reads the widened value."""
    boundaries: dict[str, str] = dataclasses.field(default_factory=dict)
    """Module path (`path#2` for its second call) -> name of the node that is its output; in execution order."""
    made_by: str = "capture"
    seconds: float = 0.0
    target: Target = Target()
    ranks: Ranks = ALONE
    """The graph is the program of each of them; inputs that are cut have the shape of one part."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """What the pass at work wants the user to know; the pipeline takes them."""

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def output_node(self) -> fx.Node:
        return next(iter(reversed(self.graph.nodes)))

    @property
    def output_values(self) -> tuple[Any, ...]:
        """The nodes (or constants) the graph returns, one per entry of `outputs`."""
        return tuple(self.output_node.args[0])  # type: ignore[arg-type]

    def operations(self) -> Iterator[fx.Node]:
        return (node for node in self.graph.nodes if node.op == "call_function")

    def indices(self, role: Role) -> list[int]:
        return [i for i, entry in enumerate(self.inputs) if entry.role is role]

    def node(self, name: str) -> fx.Node:
        found = next((node for node in self.graph.nodes if node.name == name), None)
        if found is None:
            raise KeyError(f"no node named {name!r} in the graph")
        return found


def phase_of(node: fx.Node) -> str:
    """`forward`, `backward` or `update`."""
    return (node.meta.get("custom") or {}).get("phase", "forward")


def module_of(node: fx.Node) -> str | None:
    """The path of the module whose forward made this node, or whose backward it belongs to."""
    return (node.meta.get("custom") or {}).get("module")


def matched_by(node: fx.Node) -> tuple[str, ...]:
    """The lines of a recipe whose patterns matched the operator that this node was made of, in their order."""
    return tuple(filter(None, ((node.meta.get("custom") or {}).get("matched") or "").split("\n")))


def source_of(node: fx.Node) -> str | None:
    """`file.py:line` of the user's code that made the node."""
    return (node.meta.get("custom") or {}).get("source")


def operation_of(node: fx.Node) -> fx.Node:
    """The call that made the value: of a result among several, the call that made them all."""
    return node.args[0] if node.target is operator.getitem else node  # type: ignore[return-value]


def constant_of(owner: Any, node: fx.Node) -> Any:
    """What a `get_attr` node reads."""
    return operator.attrgetter(str(node.target))(owner)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a node's `meta["val"]`, which may be one, a list, or not a tensor at all."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for entry in value for t in tensors_in(entry)]
    return []
