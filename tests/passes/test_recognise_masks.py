"""Masks that say "causal" or nothing become that; a mask that depends on the batch stays; results are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins, interpreted
from torch import nn

import wholestep
from wholestep.graph.training_graph import TrainingGraph
from wholestep.passes.pipeline import Pipeline
from wholestep.passes.recognise_masks import recognise_masks

HEADS, WIDTH = 2, 8
Build = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]


class Attends(nn.Module):
    """One attention layer whose mask `build(x, lengths)` makes in forward."""

    def __init__(self, build: Build, causal: bool = False) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 1)
        self.build, self.causal = build, causal

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.build(x, lengths), is_causal=self.causal)
        return self.head(out.transpose(1, 2).flatten(2))


def lower_triangle(x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[1], device=x.device)
    return positions[None, :] <= positions[:, None]


def as_float(mask: torch.Tensor, low: float) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, low)


BUILDS: dict[str, tuple[Build, str]] = {
    "causal bool": (lambda x, n: lower_triangle(x), "causal"),
    "causal bool, four dimensions": (lambda x, n: lower_triangle(x)[None, None], "causal"),
    "causal bool, expanded": (lambda x, n: lower_triangle(x).expand(x.shape[0], 1, -1, -1), "causal"),
    "causal float, -inf": (lambda x, n: as_float(lower_triangle(x), float("-inf")), "causal"),
    "causal float, smallest": (lambda x, n: as_float(lower_triangle(x), torch.finfo(torch.float32).min), "causal"),
    "tril": (lambda x, n: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(), "causal"),
    "all ones": (lambda x, n: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), "nothing"),
    "all zeros, float": (lambda x, n: torch.zeros(x.shape[1], x.shape[1]), "nothing"),
    "a band": (lambda x, n: lower_triangle(x) & ~lower_triangle(x).roll(3, 0), "stays"),
    "upper triangle": (lambda x, n: lower_triangle(x).T, "stays"),
    "a bias": (lambda x, n: as_float(lower_triangle(x), -1.0), "stays"),
    "causal with a hole": (lambda x, n: lower_triangle(x).clone().index_fill(1, torch.tensor([1]), False), "stays"),
    "padding": (lambda x, n: (torch.arange(x.shape[1])[None, :] < n[:, None])[:, None, None, :], "stays"),
    "padding and causal": (
        lambda x, n: (torch.arange(x.shape[1])[None, :] < n[:, None])[:, None, None, :] & lower_triangle(x), "stays",
    ),
}  # fmt: skip


def make(build: Build, causal: bool = False) -> Callable[[], Side]:
    def side() -> Side:
        model = Attends(build, causal)
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(*b).square().mean())

    return side


def batches(count: int = 2, length: int = 6) -> list[Any]:
    source = torch.Generator().manual_seed(3)
    return [(torch.randn(3, length, WIDTH, generator=source), torch.tensor([length, 2, 4])) for _ in range(count)]


def attention_nodes(graph: TrainingGraph) -> list[tuple[bool, bool]]:
    """(has a mask, is causal) of forward and backward nodes."""
    ws = torch.ops.ws
    found = [(n.args[3], n.args[4]) for n in graph.operations() if n.target is ws.attention.default]
    found += [(n.args[4], n.args[9]) for n in graph.operations() if n.target is ws.attention_backward.default]
    return [(mask is not None, causal) for mask, causal in found]


@pytest.mark.parametrize("name", BUILDS)
def test_what_becomes_of_a_mask(name: str) -> None:
    build, expected = BUILDS[name]
    twins = Twins(make(build), batches()[0])
    nodes = attention_nodes(twins.step.graph)
    assert len(nodes) == 2, "one forward, one backward"
    meaning = {"causal": (False, True), "nothing": (False, False), "stays": (True, False)}[expected]
    assert nodes == [meaning] * 2
    twins.train(batches(), tolerance=2e-6)


def test_the_computation_of_a_recognised_mask_is_gone() -> None:
    """Before: arange, compare, expand; after: nothing of it."""
    side = make(BUILDS["causal bool"][0])()
    without = interpreted(side, batches()[0], passes=Pipeline([]))
    with_pass = interpreted(side, batches()[0], passes=Pipeline([recognise_masks]))
    ops = [{str(n.target) for n in step.graph.operations()} for step in (without, with_pass)]
    assert any("arange" in op for op in ops[0]) and not any("arange" in op for op in ops[1])
    assert len(list(with_pass.graph.operations())) < len(list(without.graph.operations()))


def test_a_mask_handed_in_by_the_batch_stays() -> None:
    """Even if the example batch's mask is a triangle: the next one may not be."""

    class Given(Attends):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return super().forward(x, mask)

    def side() -> Side:
        model = Given(lambda x, mask: mask)
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(*b).square().mean())

    x = batches()[0][0]
    triangle, other = lower_triangle(x), torch.rand(6, 6).gt(0.5) | torch.eye(6, dtype=torch.bool)
    twins = Twins(side, (x, triangle))
    assert attention_nodes(twins.step.graph) == [(True, False)] * 2
    twins.train([(x, triangle), (x, other)], tolerance=2e-6)


def test_a_buffer_mask_stays() -> None:
    """nanoGPT keeps its triangle in a buffer, which is state and may be loaded with another value."""

    class Buffered(Attends):
        def __init__(self) -> None:
            super().__init__(lambda x, n: self.triangle[: x.shape[1], : x.shape[1]])
            self.register_buffer("triangle", torch.ones(9, 9, dtype=torch.bool).tril())

    def side() -> Side:
        model = Buffered()
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(*b).square().mean())

    twins = Twins(side, batches()[0])
    assert attention_nodes(twins.step.graph) == [(True, False)] * 2
    twins.train(batches(), tolerance=2e-6)


def test_a_random_mask_is_not_computed_at_compile_time() -> None:
    build: Build = lambda x, n: (torch.rand(x.shape[1], x.shape[1]) * 0 > -1) | lower_triangle(x)  # noqa: E731
    step = interpreted(make(build)(), batches()[0])
    assert attention_nodes(step.graph) == [(True, False)] * 2


def test_no_attention_no_change() -> None:
    model = nn.Linear(4, 2)
    step = interpreted(Side(model, torch.optim.SGD(model.parameters()), lambda m, b: m(b).sum()), torch.randn(3, 4))
    before = [n.name for n in step.graph.graph.nodes]
    assert [n.name for n in recognise_masks(step.graph).graph.nodes] == before


def test_symbolic_sizes_are_recognised_for_all_of_them() -> None:
    sizes = (6, 5, 7, 9, 4)
    every = [batches(1, length)[0] for length in sizes]
    twins = Twins(make(BUILDS["causal bool"][0]), every[0], check="off")
    twins.train(every, tolerance=2e-6)
    assert twins.step.captures == 3 and attention_nodes(twins.step.graph) == [(False, True)] * 2


def test_hugging_face_causal_masks_disappear() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, max_position_embeddings=32, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(0, 31, (2, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = wholestep.compile(
        model, None, optimizer, {"input_ids": ids, "labels": ids}, backend="interpret", cache=False
    )
    assert attention_nodes(step.graph) == [(False, True)] * 4
