"""Layers on a GPU: against the message function edge by edge, the same bits in every run, and recorded as a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.relational.graphs import NAMES, made
from tests.relational.test_layer import MESSAGES, featured, rgat, tensors
from torch import Tensor

from wholestep import relational as rel
from wholestep.relational.graph import RelGraph

pytestmark = pytest.mark.gpu


def on_cuda(name: str, dtype: torch.dtype) -> tuple[RelGraph, Tensor, Tensor, dict[str, Tensor]]:
    graph = made(name)
    x, own, params = tensors(graph, dtype)
    moved = [t.detach().cuda().requires_grad_() for t in (x, own, *params.values())]
    return graph.to("cuda"), moved[0], moved[1], dict(zip(params, moved[2:], strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_is_the_message_function_edge_by_edge(name: str, message: Any, dtype: torch.dtype) -> None:
    graph, x, own, params = on_cuda(name, dtype)
    edges = {"x": own} if message is featured else None
    layer = rel.layer(message)
    found, wanted = (f(graph, {"x": x}, params, edges) for f in (layer, layer.reference))
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(found, wanted, **near)
    pull, leaves = torch.randn_like(wanted), [x, own, *params.values()]
    for one, other in zip(*(torch.autograd.grad((f * pull).sum(), leaves, allow_unused=True) for f in (found, wanted))):
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, **{n: 10 * v for n, v in near.items()})


def test_recorded_as_a_graph_with_the_same_bits() -> None:
    """Nothing is read on the host, forward or backward, and no order of additions is left to chance."""
    graph, x, _, params = on_cuda("hubs", torch.float32)
    layer, leaves = rel.layer(rgat), [x, params["W"], params["u"], params["v"]]

    def step() -> list[Tensor]:
        out = layer(graph, {"x": x}, params)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wanted = step()
    torch.cuda.current_stream().wait_stream(side)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        found = step()
    for _ in range(3):
        recorded.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
