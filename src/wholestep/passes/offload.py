"""Values of the forward pass wait for the backward pass in the host's memory or in files, as the Plan says.

In: a graph and the keys of values that leave the card. Out: the graph with copies at the places of `trips.py`; every reader after
the forward pass, what `recompute` makes there included, gets what came back. Views that they read of it are made from it. The
nodes are called by the driver, between regions, so equal layers still compile once though some of them have copies and others
have none. Copies are copies: every bit stays the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from wholestep.errors import BadOption
from wholestep.graph.keys import layer_ranks, split_key, value_keys
from wholestep.graph.layers import layers_of
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph, module_of
from wholestep.ops.offload import laid_like
from wholestep.passes.fx_edit import sweep
from wholestep.passes.pipeline import compiler_pass
from wholestep.passes.recompute import refuse_unknown
from wholestep.passes.trips import Trip, Trips

ws = torch.ops.ws


@compiler_pass(numerics="bitwise")
def offload(graph: TrainingGraph, plan: Plan) -> TrainingGraph:
    """saved(x) in the backward => copy_in(copy_out(x)) there, for every x in `plan.host` and `plan.file`."""
    chosen = chosen_values(graph, plan)
    if not chosen:
        return graph
    trips = Trips(graph)
    if not plan.recompute:  # which may leave a value without readers
        _refuse_impossible(chosen, trips)
    made = trips.together(chosen)
    gone = {value: _leave(graph.graph, value, chosen[value][1], trip) for value, trip in made.items()}
    for value in sorted(
        made, key=lambda value: trips.position[made[value].back_done]
    ):  # what is asked for first comes first
        _return(graph.graph, value, gone[value], made[value])
    if len(made) < len(chosen):
        graph.notes.append(
            f"{len(chosen) - len(made)} of {len(chosen)} values stay: they are asked back before they are gone, or returned"
        )
    sweep(graph)
    return graph


def chosen_values(graph: TrainingGraph, plan: Plan) -> dict[fx.Node, tuple[str, str]]:
    """Value that leaves the card -> (its entry in the plan, its tier)."""
    if not (plan.host or plan.file):
        return {}
    keys, layers = value_keys(graph), layers_of(graph.graph.nodes)
    ranks = layer_ranks(keys, layers)
    refuse_unknown((*plan.host, *plan.file), ranks, "moves")
    asked = {split_key(key)[0]: (key, tier) for tier in ("host", "file") for key in getattr(plan, tier)}
    found: dict[fx.Node, tuple[str, str]] = {}
    for node, key in keys.items():
        if key in asked:
            wanted = split_key(asked[key][0])[1]
            if wanted is None or ranks[key][layers.get(node)] in wanted:
                found[node] = asked[key]
    return found


def _refuse_impossible(chosen: dict[fx.Node, tuple[str, str]], trips: Trips) -> None:
    """A value that can never leave is an error, one that has no time to is left where it is."""
    why = {value: trips.why_not(value) for value in chosen}
    for entry, tier in dict.fromkeys(chosen.values()):
        mine = [why[value] for value, asked in chosen.items() if asked == (entry, tier)]
        if all(mine):
            raise BadOption(f"the plan moves {entry!r} to the {tier}, which {mine[0]}")


def _leave(graph: fx.Graph, value: fx.Node, tier: str, trip: Trip) -> fx.Node:
    """The first half of a trip; what is on the host."""
    out = copy_node(graph, trip.out, ws.copy_out.default, (value, tier), "forward")
    return copy_node(graph, trip.out_done, ws.out_done.default, (value, out), "forward")


def _return(graph: fx.Graph, value: fx.Node, gone: fx.Node, trip: Trip) -> None:
    """The second half."""
    back = copy_node(graph, trip.back, ws.copy_in.default, (gone, value.meta["val"].device), "backward")
    done = copy_node(graph, trip.back_done, ws.in_done.default, (back,), "backward")
    copies = {value: done}
    for reader, read in trip.readers:
        _see_again(graph, read, copies, reader)
        reader.args = fx.map_arg(reader.args, lambda entry, read=read: copies[read] if entry is read else entry)
        reader.kwargs = fx.map_arg(reader.kwargs, lambda entry, read=read: copies[read] if entry is read else entry)


def _see_again(graph: fx.Graph, view: fx.Node, copies: dict[fx.Node, fx.Node], before: fx.Node) -> None:
    """The view that a reader has, of what came back."""
    chain: list[fx.Node] = []
    while view not in copies:
        chain.append(view)
        view = view.all_input_nodes[0]
    for node in reversed(chain):
        with graph.inserting_before(before):
            copy = copies[node] = graph.node_copy(node, lambda entry: copies.get(entry, entry))
        copy.meta = dict(node.meta)
        copy.meta["custom"] = dict(node.meta.get("custom") or {}, phase="backward", module=module_of(before))


def copy_node(graph: fx.Graph, before: fx.Node, target: Any, args: tuple[Any, ...], phase: str) -> fx.Node:
    """A node of a trip: called by the driver."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
    known = (args[1] if target is ws.out_done.default else args[0]).meta["val"]
    if target is ws.copy_out.default:
        known = said_to_be_on(known, torch.device("cpu"))
    elif target is ws.copy_in.default:
        known = said_to_be_on(known, args[1])
    node.meta = {"val": known, "custom": {"phase": phase, "module": None, "direct": True}}
    return node


def said_to_be_on(known: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What is known of a tensor when it lies on another device; tensors of a dry capture lie nowhere."""
    mode = getattr(known, "fake_mode", None)
    if mode is None or known.device == device:
        return known
    with mode:
        return laid_like(known, device)
