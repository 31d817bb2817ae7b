"""The pass `mark_regions`: what a plan fuses knows its region, forward and backward; without names nothing changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wholestep.capture.dry import capture_example
from wholestep.capture.subject import make_subject
from wholestep.errors import BadOption
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph, module_of, phase_of
from wholestep.lower.in_place import write_state_in_place
from wholestep.lower.regions import Region, split_regions
from wholestep.passes.mark_regions import mark_regions


def captured() -> TrainingGraph:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)))
    subject = make_subject(model, lambda model, batch: model(batch).square().mean(), None)
    return capture_example(subject, torch.randn(3, 4)).graph


def regions(graph: TrainingGraph) -> dict[str, set[str]]:
    """Region -> the phases of its nodes."""
    found: dict[str, set[str]] = {}
    for node in graph.operations():
        region = node.meta["custom"].get("region")
        if region is not None:
            assert (module_of(node) or "").startswith(region)
            found.setdefault(region, set()).add(phase_of(node))
    return found


def test_modules_become_regions_of_their_own() -> None:
    graph = mark_regions(captured(), Plan(fuse=("*.0",)))
    both = {"forward", "backward"}
    assert regions(graph) == {"0.0": both, "1.0": both}
    pieces = [piece for piece in split_regions(write_state_in_place(graph)) if isinstance(piece, Region)]
    inside = [{node.meta["custom"].get("region") for node in piece.body} - {None} for piece in pieces]
    assert [names for names in inside if names] == [{"0.0"}, {"1.0"}, {"1.0"}, {"0.0"}]


def test_the_innermost_counts() -> None:
    assert set(regions(mark_regions(captured(), Plan(fuse=("0.2", "0"))))) == {"0", "0.2"}


def test_without_names_nothing_is_marked() -> None:
    assert regions(mark_regions(captured(), Plan())) == {}


def test_a_place_that_there_is_not_is_named() -> None:
    with pytest.raises(BadOption, match=r"the plan fuses '0.00', which the step does not compute. did you mean 0.0\?"):
        mark_regions(captured(), Plan(fuse=("0.00",)))
    with pytest.raises(BadOption, match="matched: fuse 0"):
        mark_regions(captured(), Plan(fuse=("matched: fuse 0",)))
