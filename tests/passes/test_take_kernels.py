"""The pass `take_kernels`: names of a plan become arguments of calls, forward and backward alike; without names nothing changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wholestep.capture.dry import capture_example
from wholestep.capture.subject import make_subject
from wholestep.errors import BadOption
from wholestep.graph.copies import copy_graph
from wholestep.graph.plan import Plan
from wholestep.graph.printer import fingerprint
from wholestep.graph.training_graph import TrainingGraph
from wholestep.passes.pipeline import default_pipeline
from wholestep.passes.take_kernels import take_kernels


class Twice(nn.Module):
    """Two attentions in one module, and one outside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, F.scaled_dot_product_attention(x, x, x))


@pytest.fixture(scope="module")
def prepared() -> TrainingGraph:
    model = nn.ModuleDict({"first": Twice(), "last": Twice()})
    subject = make_subject(
        model, lambda m, b: (m["first"](b) + m["last"](b)).square().mean(), torch.optim.SGD(model.parameters(), 0.1)
    )
    captured = capture_example(subject, torch.randn(2, 3, 8))
    default_pipeline().prepare(captured)
    return captured.graph


def named(graph: TrainingGraph) -> list[tuple[str, str]]:
    """(operator, implementation) of every attention."""
    calls = [node for node in graph.operations() if "attention" in str(node.target)]
    return [(node.target._schema.name, str(node.kwargs.get("implementation", ""))) for node in calls]  # type: ignore[union-attr]


def test_without_names_nothing_changes(prepared: TrainingGraph) -> None:
    graph = take_kernels(copy_graph(prepared), Plan())
    assert fingerprint(graph) == fingerprint(prepared) and len(named(graph)) == 8


@pytest.mark.parametrize(
    ("kernel", "count"),
    [
        ({"first/attention": "math"}, 1),
        ({"first/attention#1": "math"}, 1),
        ({"first": "math"}, 2),
        ({"*": "math"}, 4),
        ({"*": "math", "last": "cpu_flash"}, 2),  # the last that fits counts
        ({"last": "cpu_flash", "*": "math"}, 4),
    ],
)
def test_forward_and_backward_take_what_is_named(kernel: dict[str, str], count: int, prepared: TrainingGraph) -> None:
    found = named(take_kernels(copy_graph(prepared), Plan(kernel=kernel)))
    assert found.count(("ws::attention", "math")) == found.count(("ws::attention_backward", "math")) == count


def test_what_cannot_be_taken_is_refused(prepared: TrainingGraph) -> None:
    with pytest.raises(
        BadOption, match=r"'cudnn' for attention in first/attention, .*it runs on cuda, the call is on cpu"
    ):
        take_kernels(copy_graph(prepared), Plan(kernel={"first": "cudnn"}))
    with pytest.raises(BadOption, match=r"did you mean first/attention\?"):
        take_kernels(copy_graph(prepared), Plan(kernel={"first/attentoin": "math"}))
