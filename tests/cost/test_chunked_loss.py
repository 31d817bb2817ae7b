"""FLOPs and bytes of linear + cross-entropy in chunks, against the plain operators and against arithmetic by hand."""

from __future__ import annotations

import pytest
import torch
from tests.cost.captured import operator

import wholestep.ops  # the operators of the library ws
from wholestep.ops.flops import flops
from wholestep.ops.traffic import traffic

assert wholestep.ops
N, H, V = 300, 8, 50
X, W, T = torch.randn(N, H), torch.randn(V, H), torch.zeros(N, dtype=torch.int64)
RULE = (-100, 0.0, 0.0, 0.0, "mean")
ALL = [True, True, True]
ONE = torch.ones(())
OP = "ws::linear_cross_entropy"


def forward(chunk: int = 128):
    return operator(OP, lambda x, w, t: torch.ops.ws.linear_cross_entropy(x, w, None, t, *RULE, chunk), X, W, T)


def backward(chunk: int = 128, wanted=ALL):
    def call(g, x, w, t):
        return torch.ops.ws.linear_cross_entropy_backward(g, x, w, None, t, x[:, 0], *RULE, chunk, wanted)

    return operator(f"{OP}_backward", call, ONE, X, W, T)


def fused(chunk: int = 128, wanted=ALL):
    def call(g, x, w, t):
        return torch.ops.ws.linear_cross_entropy_and_gradients(g, x, w, None, t, *RULE, chunk, wanted)

    return operator(f"{OP}_and_gradients", call, ONE, X, W, T)


def test_flops_are_those_of_the_products() -> None:
    product = flops(operator("aten::mm", lambda x, w: x @ w.t(), X, W)).count
    assert (flops(forward()).count, flops(forward()).kind, flops(forward()).found) == (product, "matmul", "formula")
    assert (flops(backward()).count, flops(backward()).model) == (3 * product, 2 * product)
    assert (flops(fused()).count, flops(fused()).model) == (3 * product, 3 * product)
    frozen = [True, False, False]
    assert (flops(backward(wanted=frozen)).count, flops(fused(wanted=frozen)).count) == (2 * product, 2 * product)


@pytest.mark.parametrize(("chunk", "chunks"), [(128, 3), (300, 1), (384, 1)])
def test_traffic_by_hand(chunk: int, chunks: int) -> None:
    x, w, z = 4 * N * H, 4 * V * H, 4 * N * V
    made = traffic(forward(chunk))
    assert made.read == x + 8 * N + chunks * w + z
    assert made.written == z + 4 * N + 4
    made = traffic(fused(chunk))
    assert made.read == 4 + x + 8 * N + 2 * chunks * w + 4 * z + (chunks - 1) * w
    assert made.written == 2 * z + 4 + x + w + (chunks - 1) * w


def test_fusing_saves_time_and_bytes() -> None:
    apart = [traffic(node).total for node in (forward(), backward())]
    assert traffic(fused()).total < sum(apart)
    assert flops(fused()).count < flops(forward()).count + flops(backward()).count
