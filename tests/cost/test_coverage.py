"""Every operator that the zoo and the workloads meet has a rule: nothing is counted by the default without being listed here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cost.captured import captured
from tests.zoo.models import ZOO

from wholestep.graph.check import GraphError
from wholestep.ops.flops import defaulted

pytestmark = pytest.mark.filterwarnings("ignore::wholestep.errors.WholestepWarning")
DEFAULT_LIST: set[str] = set()
"""Operators known to fall to the default (docs/cost.md); empty: all that were met so far have a rule."""
QUICK = ("mlp", "bn_cnn", "lora", "inplace_buffers", "wgan_gp", "teacher_student")


def fallen(graph: Any) -> list[str]:
    return [name for name in defaulted(graph.graph.nodes) if name not in DEFAULT_LIST]


def check_zoo(name: str) -> None:
    built = ZOO[name].build()
    for part in filter(None, (built, built.partner)):
        graph = captured(part.model, part.loss_fn, part.batches[0], part.make_optimizer("adamw"), clip_norm=1.0)
        assert fallen(graph) == []


@pytest.mark.parametrize("name", QUICK)
def test_quick_models_of_the_zoo(name: str) -> None:
    check_zoo(name)


@pytest.mark.zoo
@pytest.mark.parametrize(
    "name", [name for name, case in ZOO.items() if case.expect_rung == "whole step" and name not in QUICK]
)
def test_other_models_of_the_zoo(name: str) -> None:
    check_zoo(name)


def workload_names() -> list[str]:
    try:
        from wholestep.bench.workloads import WORKLOADS
    except ImportError:
        return []
    return [entry if isinstance(entry, str) else entry.name for entry in WORKLOADS]


@pytest.mark.zoo
@pytest.mark.parametrize("name", workload_names())
def test_workloads(name: str) -> None:
    from wholestep.bench.workloads import WORKLOADS

    table = WORKLOADS if isinstance(WORKLOADS, dict) else {entry.name: entry for entry in WORKLOADS}
    for package in table[name].needs:
        pytest.importorskip(package)
    training = table[name].training(table[name].smoke, torch.device("cpu"), 0, ours=True)
    for part in training.parts:
        try:
            graph = captured(part.model, part.loss_fn, part.example_batch, part.optimizer, clip_norm=part.clip_norm)
        except GraphError as error:  # whether it can be captured is not this test's question
            pytest.skip(f"not captured: {error}")
        assert fallen(graph) == []
