"""Numbers that a message function writes down, and complex rows: the same as edge by edge, or refused by their line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.relational.graphs import made
from torch import Tensor, nn

import wholestep
from wholestep import relational as rel
from wholestep.errors import UnsupportedModel

WIDE = 6


def written(e: Any, p: Any) -> Tensor:
    m = e.src.x[:, [5, 0, 1, 2, 3, 4]].clone()
    m[:, 0] = 1.5
    m[:, 1:3] = e.dst.x[:, :2]
    return m * torch.tensor([1.0, 2, 3, 4, 5, 6]) + p.r[e.type]


def correlation(e: Any, p: Any) -> Tensor:
    """CompGCN's circular correlation."""
    spectrum = torch.conj(torch.fft.rfft(e.src.x, dim=-1)) * torch.fft.rfft(p.r[e.type], dim=-1)
    return torch.fft.irfft(spectrum, n=WIDE, dim=-1)


def rotation(e: Any, p: Any) -> Tensor:
    turn = torch.polar(torch.ones_like(p.r[:, :3]), p.r[:, :3])[e.type]
    turned = torch.view_as_complex(e.src.x.reshape(-1, 3, 2)) * turn.conj()
    return torch.view_as_real(turned).flatten(1)


def complex_matrix(e: Any, p: Any) -> Tensor:
    rows = torch.complex(e.src.x, e.dst.x).unsqueeze(1)
    return (rows @ torch.complex(p.V, 2 * p.V)[e.type]).squeeze(1).abs()


def others(e: Any, p: Any) -> Tensor:
    """Operators of which each works row by row."""
    m = torch.baddbmm(e.dst.x.unsqueeze(1), e.src.x.unsqueeze(1), p.V[e.type]).squeeze(1)
    m = F.group_norm(m, 2) + F.bilinear(e.src.x, e.dst.x, p.V) * p.r[e.type // 2, :1]
    m = m + F.conv1d(m.unsqueeze(1), p.r[:1, :3].unsqueeze(1), padding=1).squeeze(1) + F.prelu(m, p.r[0])
    return m * F.pairwise_distance(e.src.x, e.dst.x + 1).unsqueeze(-1) + torch.einsum("ei,ej->eij", m, m).triu().sum(-1)


def of_inverses(e: Any, p: Any) -> Tensor:
    inverse = torch.linalg.inv(p.V + 9 * torch.eye(WIDE, dtype=p.V.dtype))
    return (inverse[e.type] @ e.src.x.unsqueeze(-1)).squeeze(-1)


def tensors(graph: rel.RelGraph) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(1)
    sizes = (graph.num_nodes, WIDE), (graph.num_relations, WIDE), (graph.num_relations, WIDE, WIDE)
    x, r, v = (torch.randn(size, dtype=torch.float64).requires_grad_() for size in sizes)
    return {"x": x}, {"r": r, "V": v}


@pytest.mark.parametrize("message", [written, correlation, rotation, complex_matrix, of_inverses])
@pytest.mark.parametrize("aggregate", ["sum", "max", "mean per relation"])
def test_as_edge_by_edge(message: Callable[[Any, Any], Tensor], aggregate: str) -> None:
    graph = made("hubs")
    _compare(message, aggregate, graph)


def test_operators_as_edge_by_edge() -> None:
    src, dst, etype = (torch.randint(0, n, (40,), generator=torch.Generator().manual_seed(0)) for n in (9, 9, 6))
    _compare(others, "mean", rel.RelGraph(src, dst, etype, num_nodes=9, num_relations=6))


def _compare(message: Callable[[Any, Any], Tensor], aggregate: str, graph: rel.RelGraph) -> None:
    nodes, params = tensors(graph)
    layer = rel.layer(message, aggregate=aggregate)
    found, wanted = layer(graph, nodes, params), layer.reference(graph, nodes, params)
    torch.testing.assert_close(found, wanted)
    inputs, weight = [*nodes.values(), *params.values()], torch.randn_like(wanted)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), inputs, allow_unused=True) for out in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("message", [written, correlation])
def test_in_a_captured_step(message: Callable[[Any, Any], Tensor]) -> None:
    graph, layer = made("hubs"), rel.layer(message)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.randn(graph.num_nodes, WIDE))
            self.r = nn.Parameter(torch.randn(graph.num_relations, WIDE))

        def forward(self) -> Tensor:
            return layer(graph, {"x": self.x}, {"r": self.r})

    torch.manual_seed(0)
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batch = {"y": torch.randn(graph.num_nodes, WIDE)}

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(), batch["y"])

    step = wholestep.compile(net, loss_fn, optimizer, batch, backend="interpret")
    assert step.rung == "whole step"
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        step(batch)
        theirs.zero_grad()
        loss = F.mse_loss(layer.reference(graph, {"x": plain.x}, {"r": plain.r}), batch["y"])
        loss.backward()  # type: ignore[no-untyped-call]
        theirs.step()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (lambda e, p: e.src.x * torch.tensor([float(e.src.x.shape[0])]), "number of edges"),
        (lambda e, p: e.src.x * torch.tensor([1.0] * 5000)[:1], "large tensor of its own"),
        (lambda e, p: torch.vmap(lambda a, b: a * b)(e.src.x, e.dst.x), "torch.vmap"),
        (lambda e, p: torch.fft.fft(e.src.x, dim=0).real, "edge by edge"),
        (lambda e, p: torch.cross(e.src.x[:, :3], e.dst.x[:, :3], dim=-1).norm(p=2, dim=0) + e.src.x[:, :3], "edge"),
    ],
)
def test_refused_by_its_line(message: Callable[[Any, Any], Tensor], reason: str) -> None:
    graph = made("hubs")
    nodes, params = tensors(graph)
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        rel.layer(message)(graph, nodes, params)
    assert "test_constants.py" in str(caught.value) and "\n" not in str(caught.value)
