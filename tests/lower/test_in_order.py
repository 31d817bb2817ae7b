"""Equal steps give equal bits on several threads: no sum, compiled or interpreted, is added up in the order threads arrive in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from wholestep.graph.training_graph import Output, OutputKind
from wholestep.lower import compile_region, lower_inductor, lower_interpret
from wholestep.ops import IN_ORDER

ROWS = 20_000
"""Into 50 rows: enough for torch and Inductor to use all threads, and for these to meet."""
REPEATS = 6


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def gradients(*forwards: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """The gradients of (table, index) -> value; the value is made less even, or all orders would give the same bits."""

    def body(table: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        table = table.detach().requires_grad_()
        values = [forward(table, index) for forward in forwards]
        return tuple(torch.autograd.grad(value.sin().exp().sum(), table)[0] for value in values)

    return body


def embedding(table: Tensor, index: Tensor) -> Tensor:
    return F.embedding(index, table) * index.unsqueeze(-1).sin()


def indexed(table: Tensor, index: Tensor) -> Tensor:
    return table[index] * index.unsqueeze(-1).sin()


def indexed_twice(table: Tensor, index: Tensor) -> Tensor:
    return table[index, index.flip(0) % 4] * index.sin()


def taken(table: Tensor, index: Tensor) -> Tensor:
    return table.take(index) * index.sin()


def gathered(table: Tensor, index: Tensor) -> Tensor:
    return table.gather(0, index.unsqueeze(-1).expand(-1, 4)) * index.unsqueeze(-1).sin()


def sampled(table: Tensor, index: Tensor) -> Tensor:
    grid = torch.stack([index.sin(), index.cos()], -1).view(1, 1, -1, 2)
    return F.grid_sample(table.view(1, 4, 5, 10), grid, align_corners=False)


def padded(table: Tensor, index: Tensor) -> Tensor:
    return F.pad(table.view(1, 4, 5, 10), (3, 3, 3, 3), mode="reflect").repeat_interleave(7, -1)


def added(table: Tensor, index: Tensor) -> Tensor:
    return torch.zeros(50, 4).index_add(0, index, table.repeat(ROWS // 50, 1).sin())


ALL = (embedding, indexed, indexed_twice, taken, gathered, sampled, padded, added)


@pytest.mark.parametrize(
    "forwards", [(embedding, indexed), pytest.param(ALL, marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_no_compiled_kernel_adds_atomically(functional_trace, forwards) -> None:
    tensors = [torch.randn(50, 4), torch.randint(50, (ROWS,))]
    outputs = [Output(OutputKind.AUX, forward.__name__) for forward in forwards]
    step = functional_trace(gradients(*forwards), tensors, outputs)
    with inductor_config.patch(fx_graph_cache=False):  # or there is nothing to read
        compile_region.forget_compiled()
        runner, sources = run_and_get_code(lower_inductor, step.graph)
    assert runner.describe()["notes"] == []
    assert any("#pragma omp parallel" in source for source in sources)
    assert not [line for source in sources for line in source.splitlines() if "atomic_add" in line]
    expected = runner(step.fresh())
    torch.testing.assert_close(expected, lower_interpret(step.graph)(step.fresh()), rtol=1e-3, atol=1e-3)
    for _ in range(REPEATS):
        for forward, ours, again in zip(forwards, expected, runner(step.fresh()), strict=True):
            assert torch.equal(ours, again), forward.__name__


class Called(TorchDispatchMode):
    """Which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: set[Any] = set()

    def __torch_dispatch__(self, target: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.targets.add(target)
        return target(*args, **(kwargs or {}))


@pytest.mark.parametrize("forward", ALL)
def test_interpreted_operators_repeat_themselves(functional_trace, forward) -> None:
    """Two threads on a busy machine may never meet, so the operators are looked at as well."""
    tensors = [torch.randn(50, 4), torch.randint(50, (ROWS,))]
    step = functional_trace(gradients(forward), tensors, [Output(OutputKind.AUX, forward.__name__)])
    runner = lower_interpret(step.graph)
    with Called() as called:
        expected = runner(step.fresh())
    assert not called.targets & set(IN_ORDER)
    assert (torch.ops.ws.add_rows.default in called.targets) == (forward in (indexed, indexed_twice, taken))
    assert all(torch.equal(expected[0], runner(step.fresh())[0]) for _ in range(REPEATS))
