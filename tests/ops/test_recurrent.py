"""ws::recurrent against nn.LSTM, nn.GRU and nn.RNN: on a GPU by cuDNN; here the same wiring, with torch's layers inside."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep
from wholestep.capture.dry import dry_capture
from wholestep.capture.subject import Subject
from wholestep.graph.training_graph import Target, TrainingGraph
from wholestep.ops import recurrent
from wholestep.ops.flops import flops

CLASSES = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}
SHAPES = [(1, False, 0.0), (2, True, 0.3)]


class Reader(nn.Module):
    """A recurrent layer of any kind between two others, its last states used as well."""

    def __init__(
        self, kind: str, layers: int, both: bool, dropout: float, *, biases: bool = True, first: bool = True
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"nonlinearity": kind.removeprefix("rnn_")} if kind.startswith("rnn") else {}
        self.into = nn.Linear(5, 7)
        self.body = CLASSES[kind](
            7, 6, layers, bias=biases, batch_first=first, dropout=dropout, bidirectional=both, **options
        )  # fmt: skip
        self.out = nn.Linear(12 if both else 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, last = self.body(self.into(x))
        last = last[0] * last[1] if isinstance(last, tuple) else last
        return self.out(states).square().mean() + last.square().sum(dim=2).mean()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def _differentiable(x: Tensor, h: Tensor, c: Tensor | None, weights: list[Tensor], kind: str, both: bool) -> tuple:
    hx = (h, c) if c is not None else h
    biases = len(weights) // (2 if both else 1) == 4
    return getattr(torch, kind)(x, hx, weights, biases, 1, 0.0, True, both, False)


def _elsewhere(work: Callable[[], Any]) -> Any:
    """In a thread of its own, where autograd is at work: inside an operator it is not."""
    found: list[Any] = []

    def run() -> None:
        with torch.enable_grad():
            found.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def _forward(
    x: Tensor, h: Tensor, c: Tensor | None, weights: list[Tensor], kind: str, both: bool
) -> tuple[Tensor, ...]:
    out, last_h, *last_c = _elsewhere(lambda: [t.detach() for t in _differentiable(x, h, c, weights, kind, both)])
    kept = (torch.zeros(11, dtype=torch.uint8), torch.zeros(3))  # not of the sizes guessed, as on a GPU
    return out.contiguous(), last_h, last_c[0] if last_c else x.new_empty(0), *kept


def _backward(
    grad_out: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None, x: Tensor, h: Tensor, c: Tensor | None,
    weights: list[Tensor], out: Tensor, reserve: Tensor, packed: Tensor, kind: str, both: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    def work() -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, h, *(() if c is None else (c,)), *weights)]
        x_, h_, *rest = leaves
        c_, weights_ = (None, rest) if c is None else (rest[0], rest[1:])
        results = _differentiable(x_, h_, c_, weights_, kind, both)
        pairs = [(r, g) for r, g in zip(results, (grad_out, grad_h, grad_c), strict=False) if g is not None]
        return list(torch.autograd.grad([r for r, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True))

    dx, dh, *rest = [torch.zeros(0) if g is None else g.contiguous() for g in _elsewhere(work)]
    dc, dweights = (x.new_empty(0), rest) if c is None else (rest[0], rest[1:])
    return dx, dh, dc, *recurrent._filled(dweights, x)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The operator works on the CPU, and capture believes to be on a GPU."""
    with torch.library._scoped_library("ws", "IMPL") as library:
        library.impl("recurrent", _forward, "CPU")
        library.impl("recurrent_backward", _backward, "CPU")
        monkeypatch.setattr(Subject, "target", Target("cuda"))
        yield


def trained(model: nn.Module, x: Tensor, *, steps: int = 3, **options: Any) -> tuple[list[float], Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = wholestep.compile(model, loss_of, optimizer, x, seed=1, **options)
    return [float(step(x)) for _ in range(steps)], step


def operators(graph: TrainingGraph) -> list[str]:
    return [str(node.target) for node in graph.operations()]


@pytest.mark.parametrize("kind", list(CLASSES))
@pytest.mark.parametrize(("layers", "both", "dropout"), SHAPES)
def test_a_step_with_whole_layers_is_the_unrolled_one(
    kind: str, layers: int, both: bool, dropout: float, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    one, two = (Reader(kind, layers, both, dropout, first=kind != "gru") for _ in range(2))
    two.load_state_dict(one.state_dict())
    x = torch.randn(3, 4, 5)
    found, step = trained(one, x, backend="interpret")
    assert step.rung == "whole step" and not any("unrolled" in note for note in step.notes)
    assert operators(step.graph).count("ws.recurrent.default") == layers
    monkeypatch.setattr(Subject, "target", Target("cpu"))
    expected, unrolled = trained(two, x, backend="interpret")
    assert any("unrolled" in note for note in unrolled.notes)
    assert found == pytest.approx(expected, rel=1e-5)
    for mine, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_without_biases_and_with_accumulation(on_cpu: None) -> None:
    torch.manual_seed(0)
    model, x = Reader("gru", 2, True, 0.0, biases=False), torch.randn(4, 4, 5)
    found, step = trained(model, x, backend="interpret", accumulate=2)
    assert step.rung == "whole step" and found[-1] < found[0]


@pytest.mark.slow
def test_inductor_calls_it_as_it_is(on_cpu: None) -> None:
    torch.manual_seed(0)
    one, two, x = Reader("lstm", 2, True, 0.2), Reader("lstm", 2, True, 0.2), torch.randn(3, 4, 5)
    two.load_state_dict(one.state_dict())
    assert trained(one, x, backend="inductor")[0] == pytest.approx(trained(two, x, backend="interpret")[0], rel=1e-5)


@pytest.mark.parametrize("what", ["eval", "projection", "packed", "cudnn off"])
def test_what_cudnn_cannot_do_is_unrolled(what: str, on_cpu: None) -> None:
    torch.manual_seed(0)
    body = nn.LSTM(5, 6, proj_size=4 if what == "projection" else 0)
    if what == "eval":
        body.eval()
    x = torch.randn(4, 3, 5)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        given = nn.utils.rnn.pack_padded_sequence(batch, torch.tensor([4, 2, 1])) if what == "packed" else batch
        out, _ = model(given)
        return (out.data if what == "packed" else out).square().mean()

    with torch.backends.cudnn.flags(enabled=what != "cudnn off"):
        step = wholestep.compile(body, loss, torch.optim.SGD(body.parameters(), lr=0.1), x, backend="interpret")
        assert torch.isfinite(step(x))
    assert step.graph is None or "ws.recurrent.default" not in operators(step.graph)


def test_a_gpu_elsewhere_gets_whole_layers_and_their_costs() -> None:
    with torch.device("meta"):
        model, x = Reader("gru", 2, True, 0.2), torch.empty(3, 4, 5)
    graph = dry_capture(model, loss_of, torch.optim.AdamW(model.parameters()), x, device="cuda").graph
    nodes = [n for n in graph.operations() if str(n.target).startswith("ws.recurrent")]
    assert [str(n.target).split(".")[1] for n in nodes] == ["recurrent"] * 2 + ["recurrent_backward"] * 2
    first = 2 * 4 * 3 * 2 * (18 * 7 + 18 * 6)  # steps, rows, ways, matrices
    assert [flops(n).count for n in nodes] == [
        first,
        (second := 2 * 4 * 3 * 2 * (18 * 12 + 18 * 6)),
        2 * second,
        2 * first,
    ]


# ---- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(CLASSES))
@pytest.mark.parametrize(("both", "biases"), list(itertools.product([False, True], [True, False])))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_cuda_has_the_values_and_gradients_of_torchs_layer(
    kind: str, both: bool, biases: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = Reader(kind, 2, both, 0.0, biases=biases).cuda().to(dtype)
    x = torch.randn(33, 17, 5, device="cuda", dtype=dtype)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    with recurrent_layers_of(model):
        found = torch.autograd.grad(model(x), list(model.parameters()))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        error = (mine.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-6)
        assert error <= 16 * torch.finfo(dtype).eps, float(error)


def recurrent_layers_of(model: nn.Module) -> Any:
    from wholestep.capture.modes import keyed
    from wholestep.capture.sites import Sites

    return keyed(Sites([]), on_gpu=True)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_cuda_trains_like_eager(kind: str, precision: str) -> None:
    """The first step is checked against eager by `compile` itself, dropout and all."""
    torch.manual_seed(0)
    model, x = Reader(kind, 2, True, 0.3).cuda(), torch.randn(32, 20, 5, device="cuda")
    found, step = trained(model, x, steps=20, precision=precision)
    assert step.rung == "whole step" and "ws.recurrent.default" in operators(step.graph)
    assert not any("not checked" in note for note in step.notes) and found[-1] < found[0]
