"""fold_views: chains of views shorten, identities go; what changes bits or memory stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.fuzz.check import assert_right
from tests.fuzz.program import Case
from tests.passes.small_graphs import operators, rewritten, traced

import wholestep.ops  # noqa: F401  (registers ws::dropout)
from wholestep.passes.fold_views import fold_views

aten, ws = torch.ops.aten, torch.ops.ws
X = torch.randn(4, 6)

CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[str]]] = {
    "view of a view": (lambda x: x.view(2, 2, 6).view(8, 3), ["view"]),
    "there and back": (lambda x: x.view(24).view(4, 6), []),
    "transposed twice": (lambda x: x.t().t(), []),
    "permuted three times": (lambda x: x.view(2, 2, 6).permute(1, 2, 0).permute(1, 2, 0).permute(1, 2, 0), ["view"]),
    "unsqueezed and squeezed": (lambda x: x.unsqueeze(1).squeeze(1), []),
    "expanded to its own size": (lambda x: x.expand(4, 6), []),
    "a full slice": (lambda x: x[:, 0:6], []),
    "a part of it": (lambda x: x[:, 1:6], ["slice"]),
    "view of a transposed": (lambda x: x.t().unsqueeze(0), ["t", "unsqueeze"]),
    "clone": (lambda x: x.clone(), []),
    "clone into another layout": (lambda x: x.t().clone(memory_format=torch.contiguous_format), ["t", "clone"]),
    "clone of a part": (lambda x: x[1:2].clone(), ["slice", "clone"]),
    "times one": (lambda x: x * 1, []),
    "over one": (lambda x: x / 1.0, []),
    "minus zero": (lambda x: x - 0, []),
    "minus -0 changes -0": (lambda x: x - -0.0, ["sub"]),
    "plus zero changes -0": (lambda x: x + 0, ["add"]),
    "plus zero, integers": (lambda x: x.to(torch.int64) + 0, ["_to_copy"]),
    "times one, wider": (lambda x: x.to(torch.int64) * 1.0, ["_to_copy", "mul"]),
    "dropout of nothing": (lambda x: ws.dropout(x, 0.0, torch.zeros((), dtype=torch.int64)), []),
    "dropout": (lambda x: ws.dropout(x, 0.1, torch.zeros((), dtype=torch.int64)), ["zeros", "dropout"]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_left(name: str, dtype: torch.dtype) -> None:
    function, expected = CASES[name]
    x = X.to(dtype)
    x[0, 0] = -0.0
    graph = traced(lambda t: (t.sum(), function(t.neg()).abs()), x)
    assert operators(rewritten(fold_views, graph, x))[2:-1] == expected


def test_odd_and_empty_sizes() -> None:
    x = torch.randn(1, 0, 7)
    graph = traced(lambda t: (t.sum(), t.neg().view(0, 7).view(1, 0, 7).abs()), x)
    assert operators(rewritten(fold_views, graph, x)) == ["sum", "neg", "abs"]


def test_a_boundary_that_only_views_read_stays() -> None:
    graph = traced(lambda t: (t.sum(), t.neg().view(24).view(2, 12).abs()), X)
    middle = next(n for n in graph.operations() if n.name == "view")
    graph.boundaries = {"layer": middle.name}
    assert operators(rewritten(fold_views, graph, X)) == ["sum", "neg", "view", "view", "abs"]
    assert graph.boundaries == {"layer": middle.name}


def test_gradients_follow_the_value() -> None:
    graph = traced(lambda t: (t.sum(), t.neg().t().t()), X)
    graph.gradients = {"w": graph.output_values[1].name}
    rewritten(fold_views, graph, X)
    assert graph.gradients == {"w": "neg"}


ONES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "turned and merged": lambda x: x.permute(2, 0, 1, 3).view(21, 3),
    "turned and flattened": lambda x: x.permute(1, 2, 0, 3).view(63),
    "merged, turned back": lambda x: x.permute(2, 0, 1, 3).view(21, 3).view(3, 7, 1, 3).permute(1, 2, 0, 3),
    "reshaped, which copies": lambda x: x.reshape(21, 3).view(3, 7, 3).transpose(0, 1).unsqueeze(1),
    "a head of one": lambda x: x.squeeze(1).transpose(0, 1).reshape(3, 21).view(3, 7, 1, 3),
}


@pytest.mark.parametrize("name", ONES)
def test_sizes_of_one_between_others(name: str) -> None:
    """Tensors without data let `view` merge the 7 and the 3 around the 1, although they do not lie beside each other."""
    x = torch.randn(1, 3, 7, 3).permute(2, 0, 1, 3)
    assert x.stride() == (3, 63, 21, 1)
    rewritten(fold_views, traced(lambda t: (t.sum(), ONES[name](t.neg()).abs()), x), x)


class Attention(torch.nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.into, self.attention = torch.nn.Linear(4, 4), torch.nn.MultiheadAttention(4, heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        return self.attention(x, x, x, need_weights=False)[0].square().mean()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("heads", [1, 2])
def test_attention_with_one_head_or_one_row(heads: int, rows: int) -> None:
    """With one head it trained another model: the views around attention were merged in the order of memory."""
    assert_right(Case(lambda: Attention(heads), lambda: (torch.randn(5, rows, 4),)), stage="fold_views")


@pytest.mark.parametrize("function, last", [
    (lambda z: torch.view_as_real(z.resolve_conj()).abs(), "view_as_real"),
    (lambda z: z.imag.resolve_neg().abs(), "abs"),  # of a conjugate: its imaginary part is marked to be negated
    (lambda z: (z * 1).abs(), "mul"), (lambda z: (z / 1).abs(), "div"), (lambda z: (z - 0).abs(), "sub"),
])  # fmt: skip
def test_marks_and_complex_numbers(function: Callable[[torch.Tensor], torch.Tensor], last: str) -> None:
    """A clone of what is marked takes the mark off; 1 + 0i makes NaN of an infinite part."""
    z = torch.view_as_complex(torch.randn(3, 2))
    z[0] = complex(1.0, float("inf"))
    graph = traced(lambda t: (t.abs().sum(), function(t.conj())), z)
    assert last in operators(rewritten(fold_views, graph, z))
