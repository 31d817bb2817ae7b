"""Bytes that operators move, against arithmetic by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.cost.captured import captured, operator, traced

import wholestep.ops  # the operators of the library ws
from wholestep.cost.node_costs import node_costs
from wholestep.ops.amounts import evaluate
from wholestep.ops.traffic import traffic

assert wholestep.ops
R = torch.randn
IDS = torch.tensor([1, 2, 3])


@pytest.mark.parametrize(
    ("name", "function", "arguments", "read", "written"),
    [
        ("aten::mm", torch.mm, (R(3, 4), R(4, 5)), 4 * (12 + 20), 4 * 15),
        ("aten::mm", torch.mm, (R(3, 4).bfloat16(), R(4, 5).bfloat16()), 2 * (12 + 20), 2 * 15),
        ("aten::mul", lambda x: x * x, (R(3, 4),), 4 * 12, 4 * 12),
        ("aten::_to_copy", lambda x: x.bfloat16(), (R(3, 4),), 4 * 12, 2 * 12),
        ("aten::add", lambda x, y: x + y.expand(3, 4), (R(3, 4), R(1, 4)), 4 * (12 + 4), 4 * 12),
        ("aten::view", lambda x: x.view(12), (R(3, 4),), 0, 0),
        ("aten::expand", lambda x: x.expand(3, 4), (R(1, 4),), 0, 0),
        ("aten::zeros_like", torch.zeros_like, (R(3, 4),), 0, 4 * 12),
        ("aten::empty_like", torch.empty_like, (R(3, 4),), 0, 0),
        ("aten::copy", lambda x, y: torch.ops.aten.copy(x, y), (R(3, 4), R(3, 4)), 4 * 12, 4 * 12),
        ("aten::add_", lambda x, y: x.add_(y), (R(3, 4), R(3, 4)), 4 * 24, 4 * 12),
        ("aten::embedding", lambda w, i: F.embedding(i, w), (R(1000, 8), IDS), 4 * 24 + 8 * 3, 4 * 24),
        ("aten::index", lambda x, i: x[i], (R(1000, 8), IDS), 4 * 24 + 8 * 3, 4 * 24),
        ("aten::index_select", lambda x, i: x.index_select(0, i), (R(1000, 8), IDS), 4 * 24 + 8 * 3, 4 * 24),
        ("aten::gather", lambda x, i: x.gather(0, i), (R(1000), IDS), 4 * 3 + 8 * 3, 4 * 3),
        ("aten::nll_loss_forward", lambda x, i: F.nll_loss(x, i), (R(3, 1000), IDS), 4 * 3 + 8 * 3, 4 + 4),
        ("ws::dropout", lambda x, k: torch.ops.ws.dropout(x, 0.1, k), (R(3, 4), torch.tensor(1)), 4 * 12 + 8, 4 * 12),
    ],
)  # fmt: skip
def test_operators(name, function, arguments, read, written) -> None:
    moved = traffic(operator(name, function, *arguments))
    assert (moved.read, moved.written, moved.total) == (read, written, read + written)


def test_a_weight_gradient_does_not_read_the_weight() -> None:
    image, weight = R(2, 3, 8, 8), R(5, 3, 3, 3, requires_grad=True)

    def only_weight(x, w):
        return torch.autograd.grad(F.conv2d(x, w).sum(), w)

    moved = traffic(operator("aten::convolution_backward", only_weight, image, weight))
    # the incoming gradient is one number, expanded
    assert (moved.read, moved.written) == (4 * (1 + image.numel()), 4 * weight.numel())


def test_the_gradient_of_an_embedding_is_filled_then_added_to() -> None:
    weight = R(100, 8, requires_grad=True)

    def gradient(w, i):
        return torch.autograd.grad((F.embedding(i, w) * 2).square().sum(), w)

    moved = traffic(operator("aten::embedding_dense_backward", gradient, weight, IDS))
    assert (moved.read, moved.written) == (2 * 4 * 24 + 8 * 3, 4 * 800 + 4 * 24)


def test_attention_reads_its_inputs_once_and_never_writes_scores() -> None:
    q = R(1, 2, 64, 8)
    out = operator("ws::attention", lambda q: torch.ops.ws.attention(q, q, q, None, True, 1.0, 0.0, None), q)
    assert traffic(out).read == 4 * q.numel()  # the same tensor three times
    assert traffic(out).written == 4 * q.numel() + 4 * 2 * 64 + 2 * 8


def test_an_update_goes_both_ways_over_parameters_and_state() -> None:
    model = torch.nn.Linear(4, 3)
    count = sum(p.numel() for p in model.parameters())
    graph = captured(model, lambda m, x: m(x).sum(), R(2, 4), torch.optim.AdamW(model.parameters()))
    (update,) = [cost for cost in node_costs(graph) if cost.operator == "ws::adamw"]
    hyper = 8 * 6
    assert (update.read, update.written) == (4 * 4 * count + hyper, 3 * 4 * count)


def test_symbolic_sizes_give_expressions() -> None:
    (node,) = traced(lambda x: x.exp(), R(6, 4), symbolic=True)[-1:]
    moved = traffic(node).total
    assert evaluate(moved, {symbol.name: 10 for symbol in moved.free_symbols}) == 2 * 4 * 100
