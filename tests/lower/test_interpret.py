"""`interpret` computes what the functional graph computes, and leaves the new state in the input tensors."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wholestep.graph.training_graph import Output, OutputKind, Role
from wholestep.lower import lower_interpret


@pytest.mark.parametrize("kind", ["mlp", "conv", "stack-2", "gpt2-2"])
def test_equals_functional_graph_and_updates_in_place(traced, kind):
    step = traced(kind)
    torch.manual_seed(1)
    expected, after = step.reference()
    inputs = step.fresh()
    pointers = [t.data_ptr() for t in inputs]
    torch.manual_seed(1)
    got = lower_interpret(step.graph)(inputs)
    assert [t.data_ptr() for t in inputs] == pointers
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    torch.testing.assert_close(inputs, after, rtol=0, atol=0)
    assert not torch.equal(inputs[0], step.tensors[0])


def test_watched_values_follow_the_outputs(traced):
    step = traced("mlp")
    node = next(n for n in step.graph.operations() if "tanh" in n.name)
    inputs = step.fresh()
    x, w, b = inputs[step.graph.indices(Role.BATCH)[0]], step.tensors[0], step.tensors[1]
    _, tanh = lower_interpret(step.graph, watch=[node.name])(inputs)
    torch.testing.assert_close(tanh, torch.tanh(x @ w.t() + b))
    with pytest.raises(KeyError, match="no_such_node"):
        lower_interpret(step.graph, watch=["no_such_node"])


def test_wrong_number_of_inputs_and_release(traced):
    runner = lower_interpret(traced("mlp").graph)
    with pytest.raises(ValueError, match="inputs"):
        runner([])
    runner.release()
    with pytest.raises(RuntimeError, match="released"):
        runner([])


def test_the_packages_optimizer_runs_in_place(traced):
    step = traced("mlp", update="adamw")
    runner = lower_interpret(step.graph)
    assert (runner.describe()["in_place_updates"], runner.describe()["copied_updates"]) == (1, 0)
    expected, after = step.reference()
    inputs = step.fresh()
    torch.testing.assert_close(runner(inputs), expected)
    torch.testing.assert_close(inputs, after)


class LiveTensors(TorchDispatchMode):
    """The largest number of operator results alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[weakref.ref] = []
        self.most = 0

    def alive(self) -> int:
        return sum(reference() is not None for reference in self.references)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.references.append(weakref.ref(result))
        self.most = max(self.most, self.alive())
        return result


def test_values_die_at_their_last_use(functional_trace):
    def chain(x):
        for _ in range(20):
            x = (x + 1).sin()
        return (x,)

    step = functional_trace(chain, [torch.randn(3)], [Output(OutputKind.AUX, "x")])
    runner, inputs = lower_interpret(step.graph), step.fresh()
    with LiveTensors() as live:
        result = runner(inputs)
    assert len(live.references) == 40
    assert live.most <= 3  # the operand, the result, and none but the one before
    assert live.alive() == 1
    assert len(result) == 1


def test_the_callers_autocast_adds_no_casts(traced):
    step = traced("mlp")
    runner = lower_interpret(step.graph)
    expected = runner(step.fresh())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = runner(step.fresh())
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("size", [4, 7])
def test_symbolic_sizes_come_from_the_inputs(symbolic_graph, size):
    runner = lower_interpret(symbolic_graph)
    assert runner.describe()["symbolic"]
    x, w = torch.randn(size, 3, 6), torch.randn(6, 6)
    (got,) = runner([x, w])
    torch.testing.assert_close(got, torch.softmax(x.reshape(-1, 6) @ w, -1).reshape(x.shape).sum((0, 1)) / size)


def test_describe(traced):
    facts = lower_interpret(traced("mlp").graph).describe()
    assert facts["backend"] == "interpret"
    assert facts["in_place_updates"] == 1
    assert "def step(inputs):" in facts["driver"]
