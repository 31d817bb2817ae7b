"""Operators along a dimension: refused along edges, the same as edge by edge along any other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.relational.graphs import made
from torch import Tensor

from wholestep import relational as rel
from wholestep.errors import UnsupportedModel

ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, dim: x + x.sum(dim, keepdim=True),
    "mean": lambda x, dim: x - x.mean(dim, keepdim=True),
    "amax": lambda x, dim: x - x.amax(dim, keepdim=True),
    "max": lambda x, dim: x - x.max(dim, keepdim=True)[0],
    "prod": lambda x, dim: x + x.prod(dim, keepdim=True),
    "logsumexp": lambda x, dim: x - x.logsumexp(dim, keepdim=True),
    "std": lambda x, dim: x / x.std(dim, keepdim=True),
    "norm": lambda x, dim: x / x.norm(dim=dim, keepdim=True),
    "softmax": lambda x, dim: F.softmax(x, dim),
    "log_softmax": lambda x, dim: F.log_softmax(x, dim),
    "cumsum": lambda x, dim: x.cumsum(dim),
    "sort": lambda x, dim: x.sort(dim)[0],
    "flip": lambda x, dim: x.flip(dim),
    "roll": lambda x, dim: x.roll(1, dim),
    "cat": lambda x, dim: torch.cat([x.narrow(dim, 1, 2), x.narrow(dim, 0, 1)], dim),
    "select": lambda x, dim: x * x.select(dim, 0).unsqueeze(dim),
    "pad": lambda x, dim: F.pad(x, (1, -1) if dim % 2 else (0, 0, 1, -1)),
    "normalize": lambda x, dim: F.normalize(x, dim=dim),
    "split": lambda x, dim: torch.cat(x.split(max(x.shape[dim] // 2, 1), dim)[::-1], dim),
    "softmax of all": lambda x, dim: F.softmax(x.flatten(), 0).reshape(x.shape) if dim % 2 == 0 else F.softmax(x.flatten(1), -1),
}  # fmt: skip


def normed_by_moments(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "by hand": normed_by_moments,
}


@pytest.mark.parametrize("name", ALONG)
@pytest.mark.parametrize("dim", [1, -1, 0, -2])
def test_along_a_dimension(name: str, dim: int) -> None:
    graph = made("hubs")
    x = torch.randn(
        graph.num_nodes, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    layer = rel.layer(lambda e, p: ALONG[name](e.src.x, dim))
    if dim % 2 == 0:
        with pytest.raises(UnsupportedModel, match=r"edge by edge|number of edges"):
            layer(graph, {"x": x})
        return
    outs = [run(graph, {"x": x}) for run in (layer, layer.reference)]
    assert torch.allclose(*outs, atol=1e-12)
    assert torch.allclose(*(torch.autograd.grad(out.square().sum(), x)[0] for out in outs), atol=1e-10)
    assert {space for _, space in layer.program(graph, {"x": x}, {}).steps} <= {"source nodes", ""}


@pytest.mark.parametrize("name", NORMS)
def test_norms_once_per_node(name: str) -> None:
    graph = made("hubs")
    x = torch.randn(
        graph.num_nodes, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    layer = rel.layer(lambda e, p: NORMS[name](e.src.x))
    outs = [run(graph, {"x": x}) for run in (layer, layer.reference)]
    assert torch.allclose(*outs, atol=1e-12)
    assert torch.allclose(*(torch.autograd.grad(out.square().sum(), x)[0] for out in outs), atol=1e-10)
    assert {space for _, space in layer.program(graph, {"x": x}, {}).steps} <= {"source nodes", ""}


def test_norms_over_edges_are_refused() -> None:
    graph = made("hubs")
    x = torch.randn(graph.num_nodes, 4)
    for message in (
        lambda e, p: F.batch_norm(e.src.x, None, None, training=True),
        lambda e, p: F.instance_norm(e.src.x.unsqueeze(0)).squeeze(0),
        lambda e, p: F.layer_norm(e.src.x, e.src.x.shape),
    ):
        with pytest.raises(UnsupportedModel):
            rel.layer(message)(graph, {"x": x})
