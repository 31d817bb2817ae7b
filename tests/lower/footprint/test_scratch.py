"""Measuring what calls take for themselves must not take more than there is: stand-ins are few, and made one set at a time."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from tests.passes.test_recompute import Small, batches, loss_fn
from torch import fx
from torch._subclasses import FakeTensorMode

import wholestep
from wholestep.lower import compile_region, lower_inductor
from wholestep.lower.footprint import scratch
from wholestep.lower.footprint.regions import predict_compiled
from wholestep.ops import IN_PLACE, multi_tensor

MIB = 1 << 20
CUDA = torch.device("cuda")


def update_of(sizes: list[int], device: str) -> fx.Node:
    """An AdamW update over parameters of so many MiB."""
    graph = fx.Graph()

    def inputs(name: str) -> list[fx.Node]:
        nodes = [graph.placeholder(f"{name}{i}") for i in range(len(sizes))]
        with FakeTensorMode():
            for node, size in zip(nodes, sizes, strict=True):
                node.meta["val"] = torch.empty(size * MIB // 4, device=device)
        return nodes

    lists = [inputs(name) for name in ("param", "grad", "exp_avg", "exp_avg_sq")]
    hyper = graph.placeholder("hyper")
    function = IN_PLACE[torch.ops.ws.adamw.default]
    return graph.call_function(function, (*lists, [], hyper, None, False, False, True, "fused"))


@pytest.mark.parametrize(
    ("sizes", "device", "triton", "taken"),
    [
        ([16, 16, 16, 16, 16], "cuda", True, 4),
        ([500, 16], "cuda", True, 1),  # one there must be
        ([500, 16], "cpu", True, 2),  # torch's own code there, which may take a copy of each
        ([500, 16], "cuda", False, 2),
    ],
)
def test_an_update_is_measured_on_a_few_of_its_parameters(
    sizes: list[int], device: str, triton: bool, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_tensor, "triton_reason", lambda: None if triton else "triton is not installed")
    args = scratch._fewer_to_update(update_of(sizes, device))
    assert [len(arg) for arg in args[:5]] == [taken] * 4 + [0] and args[6:] == (None, False, False, True, "fused")


class Sized(torch.Tensor):
    """A tensor that a weak reference may be held to."""


def test_the_second_stand_ins_are_made_when_the_first_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch.cuda, "reset_peak", lambda device: None)
    monkeypatch.setattr(scratch.cuda, "requested", lambda device: (3, 10))
    made: list[weakref.ref] = []
    alive: list[int] = []

    def prepared() -> Any:
        alive.append(sum(ref() is not None for ref in made))
        argument = torch.zeros(4).as_subclass(Sized)
        made.append(weakref.ref(argument))
        return lambda: argument + 1

    assert scratch.measure_calls([prepared], CUDA) == [scratch.Scratch(7, ())]
    assert alive == [0, 0]


def test_a_lack_of_memory_is_raised_where_it_counts() -> None:
    def prepared() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert scratch.measure_calls([prepared], CUDA) == [None]
    with pytest.raises(torch.OutOfMemoryError):
        scratch.measure_calls([prepared], CUDA, strict=True)


def test_what_was_compiled_to_be_measured_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compile_one(module: fx.GraphModule, signature: str) -> Any:
        compiled.append(signature)
        return compile_region._uncompiled(module)

    model = Small(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = wholestep.compile(model, loss_fn, optimizer, batches(1)[0], backend="interpret", cache=False)
    monkeypatch.setattr(compile_region, "_compile", compile_one)
    compile_region.forget_compiled()
    held: list[Any] = []
    predict_compiled(step.graph, code=held)
    count = len(compiled)
    assert count == len(set(compiled)) == len(held) > 1
    lower_inductor(step.graph)
    assert len(compiled) == count
    held.clear()
    lower_inductor(step.graph)
    assert len(compiled) == 2 * count, "held by nobody, it is gone"


def test_where_memory_is_short_products_are_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    tried: list[bool] = []

    def compile_one(module: Any, signature: str) -> str:
        tried.append(config.shape_padding)
        if config.shape_padding:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "compiled"

    monkeypatch.setattr(compile_region, "_compile", compile_one)
    assert compile_region._compiled(None, "region") == "compiled" and tried == [True, False]  # type: ignore[arg-type]
