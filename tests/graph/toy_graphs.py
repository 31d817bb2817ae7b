"""Small training graphs for the tests of `graph/`: traced by make_fx, with phases, module paths and roles filled in.

The step is written stage by stage (each stage one module path), and its backward is taken stage by stage too, so every
node is attributed exactly, without the machinery of `capture/`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate, preserve_node_meta

from wholestep.graph.training_graph import Input, Output, OutputKind, Role, TrainingGraph

MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class Stage:
    """One module of a toy: its path, its parameters, and h -> h."""

    path: str
    parameters: dict[str, Tensor]
    forward: Callable[[dict[str, Tensor], Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Toy:
    """A traced graph with inputs to run it on."""

    graph: TrainingGraph
    values: list[Tensor]

    def run(self) -> list[Tensor]:
        return list(self.graph.module(*self.values))


def mlp() -> Toy:
    """Two unequal linear stages and a loss."""
    stages = [
        Stage("net.0", {"weight": torch.randn(6, 4), "bias": torch.randn(6)}, _linear_relu),
        Stage("net.1", {"weight": torch.randn(3, 6), "bias": torch.randn(3)}, _linear_relu),
    ]
    return trace(stages, torch.randn(5, 4), torch.randint(0, 3, (5,)))


def transformer(num_layers: int = 3, width: int = 8) -> Toy:
    """Equal attention layers between an embedding-like and a head-like linear map; each layer burns in a constant."""
    head = {"weight": torch.randn(5, width), "bias": torch.randn(5)}
    stages = [
        Stage("embed", {"weight": torch.randn(width, 4), "bias": torch.randn(width)}, _linear),
        *[Stage(f"decoder.h.{i}", _layer_parameters(width), _attention_layer) for i in range(num_layers)],
        Stage("head", head, lambda p, h: _linear(p, h).flatten(0, 1)),
    ]
    return trace(stages, torch.randn(2, 3, 4), torch.randint(0, 5, (6,)))


def staged() -> Toy:
    """Two stages of different width, each with two equal blocks: layers inside layers."""
    stages = [
        *[Stage(f"stages.0.blocks.{i}", _block_parameters(4), _linear_relu) for i in range(2)],
        Stage("stages.1.widen", {"weight": torch.randn(6, 4), "bias": torch.randn(6)}, _linear),
        *[Stage(f"stages.1.blocks.{i}", _block_parameters(6), _linear_relu) for i in range(2)],
    ]
    return trace(stages, torch.randn(5, 4), torch.randint(0, 6, (5,)))


def trace(stages: list[Stage], features: Tensor, labels: Tensor) -> Toy:
    """The training step of the stages under cross-entropy and momentum SGD, as a graph."""
    names = [f"{stage.path}.{name}" for stage in stages for name in stage.parameters]
    params = [value for stage in stages for value in stage.parameters.values()]
    momenta = [torch.randn_like(value) for value in params]
    lr = torch.tensor([0.1], dtype=torch.float64)
    values = [*params, *momenta, lr, features, labels]

    def step(*flat: Tensor) -> list[Tensor]:
        count = len(params)
        return _step(stages, flat[:count], flat[count : 2 * count], *flat[2 * count :])

    with preserve_node_meta():
        module = make_fx(step, tracing_mode="fake")(*values)
    module.graph.eliminate_dead_code()
    module.recompile()
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.meta["custom"] = {**node.meta["custom"], "source": f"toy.py:{len(node.name)}"}
    inputs = [
        *[Input(Role.PARAMETER, name) for name in names],
        *[Input(Role.STATE, f"{name}/momentum") for name in names],
        *[Input(Role.HYPER, "group0"), Input(Role.BATCH, "features"), Input(Role.BATCH, "labels")],
    ]
    updates = [Output(OutputKind.UPDATE, entry.name, i) for i, entry in enumerate(inputs[: 2 * len(names)])]
    outputs = (Output(OutputKind.LOSS, "loss"), *updates)
    return Toy(TrainingGraph(module, tuple(inputs), outputs, made_by="toy", seconds=0.25), values)


def first(graph: TrainingGraph, phase: str) -> fx.Node:
    """The first operation of a phase."""
    return next(node for node in graph.operations() if node.meta["custom"]["phase"] == phase)


def _step(
    stages: list[Stage], params: tuple, momenta: tuple, lr: Tensor, features: Tensor, labels: Tensor
) -> list[Tensor]:
    remaining = list(params)
    reads, writes, owned = [], [], []
    hidden = features
    for stage in stages:
        with annotate({"phase": "forward", "module": stage.path}):
            mine = {name: remaining.pop(0).detach().requires_grad_() for name in stage.parameters}
            reads.append(hidden.detach().requires_grad_())
            writes.append(stage.forward(mine, reads[-1]))
            owned.append(list(mine.values()))
            hidden = writes[-1]
    with annotate({"phase": "forward"}):
        logits = hidden.detach().requires_grad_()
        loss = torch.nn.functional.cross_entropy(logits, labels)
    with annotate({"phase": "backward"}):
        (flow,) = torch.autograd.grad(loss, logits)
    gradients: list[Tensor] = []
    for stage, read, write, mine in reversed(list(zip(stages, reads, writes, owned, strict=True))):
        with annotate({"phase": "backward", "module": stage.path}):
            flow, *found = torch.autograd.grad(write, [read, *mine], flow)
            gradients = [*found, *gradients]
    with annotate({"phase": "update"}):
        moved = [MOMENTUM * m + g for m, g in zip(momenta, gradients, strict=True)]
        result = loss.detach()
        updated = [p - lr[0].to(p.dtype) * m for p, m in zip(params, moved, strict=True)]
    return [result, *updated, *moved]


def _linear(p: dict[str, Tensor], hidden: Tensor) -> Tensor:
    return torch.nn.functional.linear(hidden, p["weight"], p["bias"])


def _linear_relu(p: dict[str, Tensor], hidden: Tensor) -> Tensor:
    return torch.relu(_linear(p, hidden))


def _block_parameters(width: int) -> dict[str, Tensor]:
    return {"weight": torch.randn(width, width), "bias": torch.randn(width)}


def _layer_parameters(width: int) -> dict[str, Tensor]:
    return {
        "norm": torch.randn(width),
        "qkv": torch.randn(3 * width, width),
        "proj": torch.randn(width, width),
    }


def _attention_layer(p: dict[str, Tensor], hidden: Tensor) -> Tensor:
    normed = torch.nn.functional.layer_norm(hidden, hidden.shape[-1:], p["norm"])
    query, key, value = torch.nn.functional.linear(normed, p["qkv"]).chunk(3, dim=-1)
    scores = (query @ key.transpose(-1, -2)) * torch.tensor(0.5)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
    return hidden + torch.nn.functional.linear(weights @ value, p["proj"])
