"""Collectives: what they compute over all ranks, what their derivatives are, what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from wholestep import WholestepError
from wholestep.ops import collectives
from wholestep.ops.record import may_recompute, record_of

ws = torch.ops.ws


def ranks(parts: int, *shape: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for _ in range(parts)]


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_what_they_compute(parts: int) -> None:
    xs = ranks(parts, 4, 3)
    total = sum(xs[1:], start=xs[0])
    for found in collectives.all_reduce(xs, "tp", parts):
        torch.testing.assert_close(found, total, rtol=0, atol=0)
    assert torch.equal(collectives.all_reduce(xs, "tp", parts, "max")[-1], torch.stack(xs).amax(0))
    whole = collectives.all_gather(xs, -1, "tp", parts)
    assert all(torch.equal(found, torch.cat(xs, -1)) for found in whole)
    assert all(torch.equal(a, b) for a, b in zip(collectives.own_part(whole, -1, "tp", parts), xs))
    scattered = collectives.reduce_scatter(xs, 0, "tp", parts)
    assert torch.equal(torch.cat(scattered), total)
    assert [int(i) for i in collectives.axis_index(xs, "tp", parts, torch.device("cpu"))] == list(range(parts))


def test_narrow_sums_are_rounded_once() -> None:
    xs = [x.bfloat16() for x in ranks(4, 100)]
    wide = xs[0].float() + xs[1].float() + xs[2].float() + xs[3].float()
    assert torch.equal(collectives.all_reduce(xs, "tp", 4)[0], wide.bfloat16())


# fmt: off
DERIVATIVES = [
    (lambda x: ws.all_reduce(x, "tp", 4), []),
    (lambda x: ws.enter(x, "tp", 4), ["all_reduce"]),
    (lambda x: ws.all_gather(x, 0, "tp", 4), ["own_part"]),
    (lambda x: ws.own_part(x, 0, "tp", 4), ["all_gather"]),
    (lambda x: ws.reduce_scatter(x, 0, "tp", 4), ["all_gather"]),
]
# fmt: on


@pytest.mark.parametrize(("call", "backward"), DERIVATIVES)
def test_derivatives_are_collectives(call: Any, backward: list[str]) -> None:
    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(call(x).sum(), x)[0]

    with FakeTensorMode(allow_non_fake_inputs=True):
        traced = make_fx(gradient)(torch.randn(8, 3, requires_grad=True))
    own = [str(n.target) for n in traced.graph.nodes if str(n.target).startswith("ws.")]
    assert own[1:] == [f"ws.{name}.default" for name in backward]


def test_a_maximum_has_no_derivative() -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(WholestepError, match="no derivative"):
        ws.all_reduce(x, "tp", 1, "max").sum().backward()


def test_one_rank_alone_is_told_so() -> None:
    with pytest.raises(WholestepError, match=r"ws::all_reduce over the 2 ranks of axis 'tp' was called by one rank"):
        ws.all_reduce(torch.randn(3), "tp", 2)
    with pytest.raises(WholestepError, match="called by one rank alone"):
        ws.axis_index("tp", 2, torch.device("cpu"))


def test_parts_are_equal() -> None:
    with pytest.raises(WholestepError, match="10 does not divide into 4"):
        collectives.own_part(ranks(4, 10), 0, "tp", 4)


def test_what_is_sent_is_not_computed_twice() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    assert not may_recompute(graph.call_function(ws.all_reduce.default, (x, "tp", 2)))
    assert may_recompute(graph.call_function(ws.enter.default, (x, "tp", 2)))
    for name in collectives._BACKWARD:
        known = record_of(getattr(ws, name).default)
        assert known.kind == "collective" and known.fuses is False and not known.compiled
