"""What `step.explain()` says about repeating a step bit for bit, for the device that the step is for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import wholestep
from wholestep.capture.dry import dry_capture
from wholestep.errors import WholestepWarning
from wholestep.graph.training_graph import TrainingGraph
from wholestep.runtime.explain import unordered


class Words(nn.Module):
    """Three convolutions over embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.layers = nn.ModuleList(nn.Conv1d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).transpose(1, 2)
        for layer in self.layers:
            x = layer(x).relu()
        return x


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def graph_for(device: str, model: nn.Module | None = None) -> TrainingGraph:
    with torch.device("meta"):
        model = model or Words()
        batch = torch.zeros(2, 8, dtype=torch.int64)
    return dry_capture(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch, device=device).graph


def test_on_cuda_the_operators_and_their_places_are_named() -> None:
    text = unordered(graph_for("cuda"), "cuda", compiled=True)
    assert text is not None
    assert "convolution_backward in layers.2 and 2 more places" in text
    assert "embedding_dense_backward in embed" in text


def test_an_embedding_repeats_where_torch_itself_runs_it() -> None:
    text = unordered(graph_for("cuda"), "cuda", compiled=False)
    assert text is not None and "convolution_backward" in text and "embedding" not in text


class Places(nn.Module):
    """Writes to indexed places, and adds to them."""

    def __init__(self, accumulate: bool) -> None:
        super().__init__()
        self.accumulate = accumulate
        self.weight = nn.Parameter(torch.zeros(2, 8))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros(8, device=ids.device).index_put((ids,), self.weight.sin(), accumulate=self.accumulate)


@pytest.mark.parametrize("accumulate", [False, True])
def test_writing_to_places_is_no_sum(accumulate: bool) -> None:
    with torch.device("meta"):
        model = Places(accumulate)
    assert (unordered(graph_for("cuda", model), "cuda", compiled=True) is not None) == accumulate


def test_on_the_cpu_everything_repeats() -> None:
    assert unordered(graph_for("cpu"), "cpu", compiled=True) is None
    model = Words()
    step = wholestep.compile(
        model,
        loss,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.zeros(2, 8, dtype=torch.int64),
        backend="interpret",
    )
    assert "repeats" not in step.explain()


def test_what_is_not_captured_is_not_promised() -> None:
    model = Words()

    def unguardable(model: nn.Module, batch: Tensor) -> Tensor:
        total = loss(model, batch)
        return total if total.item() > -1 else -total

    step = wholestep.compile(
        model,
        unguardable,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.zeros(2, 8, dtype=torch.int64),
        backend="interpret",
    )
    with pytest.warns(WholestepWarning, match="runs in eager PyTorch"):
        for _ in range(3):
            step(torch.zeros(2, 8, dtype=torch.int64))
    assert step.rung == "eager"
    assert "repeats    not to the last bit for certain" in step.explain()
