"""The calls that nodes stand for."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from wholestep.lower.statements import statement_of


def test_a_result_of_a_size_that_only_data_tells_is_left_as_it_is() -> None:
    """It stands in a region that Inductor could not compile; asking how it lies in memory would raise."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        value = torch.nonzero(torch.ones(3, 4))
        value = torch.empty((torch.sym_max(1, value.shape[0]), 2))
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    node.meta["val"] = value
    assert statement_of(node, exactly=True).function is torch.ops.aten.relu.default
