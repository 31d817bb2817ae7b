"""Ranks side by side, for tests: the graph of one rank run for all of them, node by node, with gradients.

Collectives are functions over the values of all ranks; their derivatives are those that `ops/collectives.py` states, so that a
rank's gradient is what that rank's own autograd would give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from wholestep.graph.mesh import LAYOUT, Cut, Mesh
from wholestep.ops.record import record_of
from wholestep.schedule.sharding import Localised, Sync, localise

ws = torch.ops.ws
_COLLECTIVES = (ws.all_reduce, ws.enter, ws.all_gather, ws.own_part, ws.reduce_scatter, ws.axis_index)


def _across(target: Any, values: Sequence[Any], *rest: Any) -> list[Any]:
    across: Any = record_of(target.default).across
    return across(values, *rest)


class _Joint(torch.autograd.Function):
    """One collective over all ranks."""

    @staticmethod
    def forward(ctx: Any, target: Any, rest: tuple, *values: torch.Tensor) -> Any:
        ctx.target, ctx.rest = target, rest
        return tuple(value.clone() for value in _across(target, values, *rest))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.target is ws.all_reduce:
            assert ctx.rest[-1] != "max"
            found: Sequence[Any] = grads
        else:
            turned = {ws.enter: ws.all_reduce, ws.all_gather: ws.own_part, ws.own_part: ws.all_gather}
            found = _across(turned.get(ctx.target, ws.all_gather), grads, *ctx.rest)
        return None, None, *found


def run_ranks(graph: fx.Graph, inputs: Sequence[Sequence[Any]]) -> list[Any]:
    """The outputs of every rank; `inputs` by rank."""
    ranks = range(len(inputs))
    envs: list[dict[fx.Node, Any]] = [{} for _ in ranks]
    places = {node: i for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    for node in graph.nodes:
        given = [fx.map_arg((node.args, node.kwargs), env.__getitem__) for env in envs]
        if node.op == "placeholder":
            found = [inputs[r][places[node]] for r in ranks]
        elif node.op == "output":
            return [args[0] for args, _ in given]
        elif node.op == "get_attr":
            found = [getattr(graph.owning_module, node.target)] * len(inputs)
        elif node.target in _COLLECTIVES:
            found = _joint(node.target, given)
        elif node.op == "call_method":
            found = [getattr(args[0], node.target)(*args[1:], **kwargs) for args, kwargs in given]
        else:
            found = _called(node, given, _draws(node))
        for env, value in zip(envs, found, strict=True):
            env[node] = value
    raise AssertionError("a graph without output")


def _draws(node: fx.Node) -> bool:
    if node.target is F.dropout:
        given = dict(zip(("input", "p", "training"), node.args)) | node.kwargs
        return bool(given.get("training", True)) and given.get("p", 0.5) > 0
    return float(node.kwargs.get("dropout_p", 0.0)) > 0.0


_MODES = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled")


def _called(node: fx.Node, given: Sequence[Any], draws: bool) -> list[Any]:
    """All ranks draw the same random numbers; for a value that is cut, those of its part of the whole."""
    if getattr(node.target, "__name__", "") in _MODES:  # of the process: entered and left once
        args, kwargs = given[0]
        return [node.target(*args, **kwargs)] * len(given)
    state, found = torch.get_rng_state(), []
    layout = node.meta.get(LAYOUT)
    for rank, (args, kwargs) in enumerate(given):
        torch.set_rng_state(state)
        if draws and layout is not None:
            found.append(
                _drawn_part(
                    node.target, args, kwargs, Cut(layout[0], layout[1], tuple(layout[2]), layout[3]), rank, len(given)
                )
            )
        else:
            found.append(node.target(*args, **kwargs))
    return found


def _drawn_part(target: Any, args: Any, kwargs: Any, cut: Cut, rank: int, ranks: int) -> torch.Tensor:
    """Dropout of one rank's part, or of its attention written out."""
    if target is F.dropout:
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        return _dropped(args[0], p, cut, rank, ranks)
    query, key, value = args
    share = query.shape[-3] // key.shape[-3]
    key, value = (x.repeat_interleave(share, -3) for x in (key, value))
    scale = kwargs.get("scale") or query.shape[-1] ** -0.5
    scores, mask = query @ key.transpose(-1, -2) * scale, kwargs.get("attn_mask")
    if kwargs.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return _dropped(scores.softmax(-1), kwargs["dropout_p"], cut, rank, ranks) @ value


def _dropped(x: torch.Tensor, p: float, cut: Cut, rank: int, ranks: int) -> torch.Tensor:
    shape = list(x.shape)
    shape[cut.dim] *= ranks
    return x * cut.own(F.dropout(torch.ones(shape, dtype=x.dtype), p), rank, ranks)


def _joint(target: Any, given: Sequence[Any]) -> list[Any]:
    args, kwargs = given[0]
    if target is ws.axis_index:
        return _across(target, [None] * len(given), *args)
    rest = (*args[1:], *kwargs.values())
    return list(_Joint.apply(target, rest, *(one[0][0] for one in given)))


# ---- from a function to its ranks ----


def copied(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph)


def graph_of(function: Callable[..., Any], *args: Any) -> tuple[fx.GraphModule, list[Any]]:
    """Dynamo's graph of a call, and what its inputs were."""
    made: list[tuple[fx.GraphModule, list[Any]]] = []

    def take(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        given = [node.meta["grapharg"].example for node in module.graph.nodes if node.op == "placeholder"]
        made.append((copied(module), given))
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=take, fullgraph=True, dynamic=False)(*args)
    return made[0]


def check(
    function: Callable[..., Any], parameters: Mapping[str, torch.Tensor], inputs: Sequence[Any],
    cuts: Mapping[str, Cut | tuple[int, str]], *ranks: int, **more: Any,
) -> Localised:  # fmt: skip
    """Compare function(parameters, *inputs), its loss and its gradients, with its ranks; raise where they differ.

    The result is a loss, or a tuple with the loss first.
    """
    parameters = {n: v.detach().clone().requires_grad_(v.is_floating_point()) for n, v in parameters.items()}
    known = {id(value): name for name, value in parameters.items()}
    module, given = graph_of(function, parameters, *inputs)
    for count in ranks:
        copy = copied(module)
        places = [n for n in copy.graph.nodes if n.op == "placeholder"]
        names = {node: known[id(value)] for node, value in zip(places, given) if id(value) in known}
        found = compare(copy, given, names, cuts, count, **more)
    return found


def compare(
    module: fx.GraphModule, given: Sequence[Any], names: Mapping[fx.Node, str], cuts: Mapping[str, Cut | tuple[int, str]],
    ranks: int, *, syncs: Sequence[Sync] = (), paths: Mapping[int, str] | None = None,
    edit: Callable[[fx.Graph], None] | None = None, tolerance: float = 1e-9,
) -> Localised:  # fmt: skip
    """Rewrite a graph, and compare its outputs and the gradients of its parameters with what they were. `edit` plants a fault."""
    places = [n for n in module.graph.nodes if n.op == "placeholder"]
    trained = [i for i, node in enumerate(places) if node in names and given[i].requires_grad]
    torch.manual_seed(7)
    expected = module(*given)
    grads = torch.autograd.grad(_loss(expected), [given[i] for i in trained], allow_unused=True)
    found = localise(module, cuts, Mesh(tp=ranks), names=names, syncs=syncs, paths=paths)
    if edit is not None:
        edit(module.graph)
    torch.manual_seed(7)
    local = _parts(given, [names.get(node) for node in places], found.cuts, ranks)
    outputs = run_ranks(module.graph, local)
    _compare(expected, outputs, tolerance)
    torch.autograd.backward([_loss(one) for one in outputs])
    for i, wanted in zip(trained, grads, strict=True):
        if wanted is not None:
            _compare_gradient(names[places[i]], [rank[i] for rank in local], wanted, found, tolerance)
    return found


def _compare_gradient(
    name: str, local: Sequence[torch.Tensor], wanted: torch.Tensor, found: Localised, tolerance: float
) -> None:
    parts = [torch.zeros_like(own) if own.grad is None else own.grad for own in local]
    largest = max(1.0, float(wanted.abs().max()))  # what cancels was rounded as the largest is
    for one in [found.cuts[name].whole(parts)] if name in found.cuts else parts:
        torch.testing.assert_close(
            one, wanted, rtol=tolerance, atol=tolerance * largest, msg=lambda text: f"{name}: {text}"
        )


def _parts(given: Sequence[Any], names: Sequence[str | None], how: Mapping[str, Cut], ranks: int) -> list[list[Any]]:
    found: list[list[Any]] = []
    for rank in range(ranks):
        row: list[Any] = []
        for value, name in zip(given, names, strict=True):
            own = how[name].own(value.detach(), rank, ranks) if name in how else value
            row.append(own.detach().clone().requires_grad_(value.requires_grad) if name is not None else own)
        found.append(row)
    return found


def _loss(outputs: Any) -> torch.Tensor:
    return outputs[0] if isinstance(outputs, tuple | list) else outputs


def _compare(expected: Any, outputs: Sequence[Any], tolerance: float) -> None:
    for one in outputs:
        flat = zip(one, expected, strict=True) if isinstance(expected, tuple | list) else [(one, expected)]
        for value, known in flat:
            torch.testing.assert_close(value, known, rtol=tolerance, atol=tolerance)
