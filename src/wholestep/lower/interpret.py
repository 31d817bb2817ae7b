"""Lowering `interpret`: every node of the graph is one call of its operator, in order.

In goes a TrainingGraph, out comes a Runner. Nothing is compiled, so it is ready at once, runs shapes seen rarely, and
computes bit for bit what eager computes where the operators are the same. Each value dies at its last use.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from wholestep.graph.training_graph import TrainingGraph, constant_of
from wholestep.lower.driver import Driver, Statement, build_driver
from wholestep.lower.in_place import ImperativeGraph, write_state_in_place
from wholestep.lower.races import refuse_races
from wholestep.lower.runner import Runner
from wholestep.lower.streams import streams_for
from wholestep.lower.transfers import Transfers, device_of
from wholestep.ops.offload import lies_on_host
from wholestep.tiers.files import FileStore


def lower_interpret(graph: TrainingGraph, *, watch: Sequence[str] = (), store: FileStore | None = None) -> Runner:
    """A Runner that calls one operator per node; `watch` names nodes whose values are returned after the outputs; `store` has what
    the plan moves to files, and without one that lies in the host's memory. The graph of several ranks runs on all of them, side by
    side."""
    if graph.ranks.several:
        from wholestep.lower.lockstep import lower_lockstep  # which calls what is defined here

        return lower_lockstep(graph, watch=watch)
    started = time.perf_counter()
    imperative = write_state_in_place(graph, watch)
    device = device_of(imperative.graph)
    transfers = Transfers(device, store)
    calls = [node for node in imperative.graph.nodes if node.op == "call_function"]
    statements = [statement for node in calls for statement in transfers.statements(node)]
    driver = driven(imperative, statements, transfers, device)
    facts = {"backend": "interpret", "calls": len(statements), "driver": driver.source, **transfers.facts()}
    return Runner(driver.function, len(graph.inputs), facts_of(imperative, started) | facts)


def driven(
    imperative: ImperativeGraph, statements: list[Statement], transfers: Transfers, device: torch.device
) -> Driver:
    """One function that makes all calls in their order, once those that wait for copies are known to run in no race."""
    if transfers.facts():
        refuse_races(statements, imperative.results)
        transfers.ready()
    return build_driver(
        imperative.placeholders, statements, imperative.results, constants_of(imperative.graph, imperative.owner),
        streams=streams_for(device),
    )  # fmt: skip


def facts_of(imperative: ImperativeGraph, started: float) -> dict[str, Any]:
    """What `Runner.describe` says under every backend; here of one that compiles no regions."""
    return {
        "regions": 0, "unique_regions": 0, "seconds_per_region": {}, "cache_hits": 0, "notes": [],
        "symbolic": imperative.symbolic, "host_inputs": tuple(i for i, n in enumerate(imperative.placeholders) if lies_on_host(n)),
        "in_place_updates": imperative.num_in_place, "copied_updates": imperative.num_copies,
        "seconds": time.perf_counter() - started,
    }  # fmt: skip


def constants_of(graph: fx.Graph, owner: torch.nn.Module) -> dict[fx.Node, Any]:
    """`get_attr` nodes -> the tensor or submodule they read, looked up once."""
    found: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            found[node] = constant_of(owner, node)
        elif node.op in ("call_module", "call_method"):
            raise TypeError(f"node {node.name} is a {node.op}; a training graph has functions only")
    return found
