"""Sizes that vary: a ragged last batch runs at once, a third size makes the dimension symbolic, guards hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins, class_batches, classify, interpreted, mlp_side, small_mlp
from torch import nn

from wholestep.errors import WholestepWarning
from wholestep.runtime.shapes import symbolic_dims

Sizes = list[tuple[tuple[int, ...], ...]]


def sized(*sizes: int) -> list[Any]:
    return [class_batches(1, size=s)[0] for s in sizes]


def test_a_ragged_last_batch_runs_at_once() -> None:
    """It is captured, and interpreted rather than compiled."""
    batches = sized(6, 6, 6, 2)
    twins = Twins(mlp_side, batches[0], check="off")
    twins.train(batches)
    assert (twins.step.captures, twins.step.compilations) == (2, 1)
    twins.train(batches)
    assert (twins.step.captures, twins.step.compilations) == (2, 1)


def test_the_third_size_is_symbolic_and_serves_all_others() -> None:
    batches = sized(6, 2, 5, 9, 3, 11, 4, 8)
    twins = Twins(mlp_side, batches[0], check="off")
    twins.train(batches, tolerance=1e-6)
    assert (twins.step.captures, twins.step.compilations) == (3, 2), twins.step.explain()
    assert any("symbolic now" in note for note in twins.step.notes)


def test_size_one_is_not_served_by_the_symbolic_graph() -> None:
    """Sizes 0 and 1 are special to tracing: broadcasting."""
    batches = sized(6, 2, 5, 1, 7, 1)
    twins = Twins(mlp_side, batches[0], check="off")
    twins.train(batches, tolerance=1e-6)
    assert twins.step.captures == 4


def test_guards_of_the_trace_are_respected() -> None:
    """A branch on the size: the graph traced on one side must not run on the other."""

    def make() -> Side:
        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            scale = 10.0 if batch[0].shape[0] > 6 else 1.0
            return classify(model, batch) * scale

        model = small_mlp()
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_fn)

    batches = sized(3, 4, 5, 9, 6, 12, 2)
    twins = Twins(make, batches[0], check="off")
    twins.train(batches, tolerance=1e-5)
    assert twins.step.rung == "whole step"


def test_a_size_that_reaches_a_number_follows() -> None:
    def make() -> Side:
        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / batch[0].shape[0] + len(batch[0]) * 0.1

        model = small_mlp()
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)

    batches = sized(3, 4, 5, 9, 6, 12)
    Twins(make, batches[0], check="off").train(batches, tolerance=1e-6)


def test_dynamic_true_is_symbolic_at_once_and_false_never() -> None:
    batches = sized(6, 3, 5, 7)
    step = interpreted(mlp_side(), batches[0], dynamic=True, check="off")
    for batch in batches:
        step(batch)
    assert step.captures == 1 and step.rung == "whole step", step.explain()
    step = interpreted(mlp_side(), batches[0], dynamic=False, check="off")
    for batch in batches:
        step(batch)
    assert (step.captures, step.compilations) == (4, 4)


def test_a_rare_shape_that_keeps_coming_is_compiled() -> None:
    batches = sized(6, *[2] * 12)
    step = interpreted(mlp_side(), batches[0], check="off")
    for batch in batches:
        step(batch)
    assert (step.captures, step.compilations) == (2, 2)


def test_two_dimensions_vary_independently() -> None:
    """Batch and sequence length, as a padded loader gives them."""

    def make() -> Side:
        model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
        loss_fn = lambda m, b: F.cross_entropy(m(b["ids"]).flatten(0, 1), b["labels"].flatten())  # noqa: E731
        return Side(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss_fn)

    def tokens(rows: int, length: int) -> Any:
        ids = torch.randint(0, 11, (rows, length), generator=torch.Generator().manual_seed(rows * 100 + length))
        return {"ids": ids, "labels": ids.flip(1)}

    batches = [tokens(*s) for s in ((4, 6), (4, 7), (4, 9), (2, 5), (3, 8), (4, 12))]
    twins = Twins(make, batches[0], check="off")
    twins.train(batches, tolerance=1e-6)
    assert twins.step.captures <= 5


def test_which_dimensions_become_symbolic() -> None:
    seen: Sizes = [((4, 6), (4, 6)), ((4, 7), (4, 7))]
    assert symbolic_dims(seen) is None
    seen.append(((4, 8), (4, 8)))
    assert symbolic_dims(seen) == [{1: "size0"}, {1: "size0"}], "dimensions that go together share a symbol"
    seen.append(((2, 8), (2, 8)))
    assert symbolic_dims(seen) == [{0: "size0", 1: "size1"}, {0: "size0", 1: "size1"}]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_dropout_and_norm_layers_under_symbolic_sizes(accumulate: int) -> None:
    """The step stays whole; losses stay finite and the mask follows the size."""
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Dropout(0.5), nn.Linear(6, 3))
    side = Side(model, torch.optim.AdamW(model.parameters()), classify)
    batches = sized(4, 6, 8, 10, 12)
    step = interpreted(side, batches[0], check="off", accumulate=accumulate)
    assert all(torch.isfinite(step(b)) for b in batches)
    assert step.rung == "whole step" and step.captures == 3


class Pinned(nn.Module):
    """Its Python asks for one batch size: a graph for that one, another for all the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (2.0 if int(x.shape[0]) == 4 else 1.0)


def test_a_size_that_python_compares_is_a_guard() -> None:
    batches = sized(4, 5, 6, 7, 8, 9, 4)
    twins = Twins(lambda: side_of(Pinned()), batches[0])
    twins.train(batches, tolerance=1e-6)
    assert twins.step.rung == "whole step" and twins.step.captures <= 4, twins.step.explain()


class Recurrent(nn.Module):
    """Unrolled over its time steps, so that its length cannot be symbolic."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(4, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0].mean(1)


def side_of(model: nn.Module) -> Side:
    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), classify)


def test_sizes_that_cannot_be_symbolic_are_captured_one_by_one_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholestep.capture.front.front.MOST_CAPTURES", 4)
    monkeypatch.setattr("wholestep.runtime.variants.MOST_STATIC_SHAPES", 4)
    labels = sized(5)[0][1]
    batches = [(torch.randn(5, length, 4), labels) for length in (4, 5, 6, 7, 8, 9, 4, 9, 5)]
    twins = Twins(lambda: side_of(Recurrent()), batches[0], check="off")
    with pytest.warns(WholestepWarning, match="steps that no captured graph holds for run in eager PyTorch.*size"):
        twins.train(batches, tolerance=1e-6)
    assert any("sizes stay static" in note for note in twins.step.notes)
    assert twins.step.rung == "whole step, else eager", twins.step.explain()


@pytest.mark.parametrize("sizes", [(2, 4), (2, 3, 5)])
def test_micro_batches_of_unequal_shapes(sizes: tuple[int, ...]) -> None:
    """Each shape has its graph; their gradients add up to one update, as eager's do."""
    ours, theirs = mlp_side(), mlp_side()
    theirs.model.load_state_dict(ours.model.state_dict())
    step = interpreted(ours, sized(sizes[0])[0], accumulate=len(sizes))
    for _ in range(2):
        parts = sized(*sizes)
        loss = step(parts)
        losses = [classify(theirs.model, part) / len(parts) for part in parts]
        for part in losses:
            part.backward()
        theirs.optimizer.step()
        theirs.optimizer.zero_grad()
        assert float(loss) == pytest.approx(float(sum(losses)), rel=1e-6)
    assert step.rung == "whole step" and not step.falls, step.explain()
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_slices_of_one_tensor_are_whole_steps() -> None:
    """Views that begin elsewhere in their storage, in several sizes: not a reason to leave the captured step."""
    x, y = class_batches(1, size=20)[0]
    cuts = [(0, 6), (6, 8), (8, 13), (13, 20), (0, 4), (4, 8)]
    twins = Twins(mlp_side, (x[:6], y[:6]), check="off")
    twins.train([(x[a:b], y[a:b]) for a, b in cuts], tolerance=1e-6)
    assert twins.step.rung == "whole step" and not twins.step.falls, twins.step.explain()


@pytest.mark.parametrize("backend", ["interpret", pytest.param("inductor", marks=pytest.mark.slow)])
def test_batches_that_lie_otherwise_in_memory(backend: str) -> None:
    """Turned, sliced, expanded, and as at first: compiled code was made for one layout."""
    (x, y), *_ = class_batches(1, size=6)
    wide = torch.zeros(6, 8)
    wide[:, ::2] = x
    layouts = [x, x.T.contiguous().T, wide[:, ::2], x[:1].expand(6, 4), x.clone(), wide[:, ::2], x.T.contiguous().T]
    twins = Twins(mlp_side, (x, y), check="off", backend=backend)
    twins.train([(layout, y) for layout in layouts], tolerance=1e-5)
    assert twins.step.rung == "whole step" and twins.step.captures <= 3, twins.step.explain()


def test_a_slice_that_the_loss_writes_to_is_written() -> None:
    """Compiled code has a copy of it; what it writes there comes back."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, seen = batch
        seen.add_(x.detach())
        return F.cross_entropy(model(x + 0.1 * seen), y)

    def side() -> Side:
        model = small_mlp()
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)

    (x, y), *_ = class_batches(1, size=6)
    seen = {kind: torch.zeros(6, 8) for kind in ("ours", "theirs")}
    twins = Twins(side, (x, y, torch.zeros(6, 4)), check="off")
    for _ in range(3):
        ours = twins.step((x, y, seen["ours"][:, ::2]))
        theirs = twins.theirs
        theirs.optimizer.zero_grad()
        expected = loss(theirs.model, (x, y, seen["theirs"][:, ::2]))
        expected.backward()
        theirs.optimizer.step()
        torch.testing.assert_close(ours, expected.detach())
        assert torch.equal(seen["ours"], seen["theirs"]) and bool(seen["ours"].any())
