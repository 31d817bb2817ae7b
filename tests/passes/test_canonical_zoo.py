"""The canonicalising passes on real models: fewer nodes, the same bits, all gradients and module outputs still named.

`python -m tests.passes.test_canonical_zoo` prints how many nodes each pass removes from each model.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.zoo.models import ZOO

import wholestep
from wholestep.graph.liveness import peak_bytes
from wholestep.lower.in_place import write_state_in_place
from wholestep.lower.regions import Region, split_regions
from wholestep.passes.pipeline import Pipeline, default_pipeline

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::wholestep.errors.WholestepWarning")

MODELS = ("bert", "gpt2", "llama", "t5", "bn_cnn")
QUICK = (("gpt2", "fp32"), ("llama", "bf16"), ("bn_cnn", "fp32"), ("bn_cnn", "bf16"))
"""Every precision and every kind of model once; the rest are slow."""
CANONICAL, NONE = default_pipeline().without("recognise_masks"), Pipeline([])


@functools.cache
def trained(name: str, passes: Pipeline, precision: str) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    built = ZOO[name].build()
    step = wholestep.compile(
        built.model, built.loss_fn, built.make_optimizer("adamw"), built.batches[0], backend="interpret", check="off",
        cache=False, passes=passes, precision=precision, seed=1, clip_norm=1.0,
    )  # fmt: skip
    losses = [float(step(batch)) for batch in built.batches[:2]]
    return losses, built.model.state_dict(), step


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=[] if (name, precision) in QUICK else [pytest.mark.slow])
        for name in MODELS for precision in ("fp32", "bf16")
    ],
)  # fmt: skip
def test_the_same_bits_with_fewer_nodes(name: str, precision: str) -> None:
    losses, state, plain = trained(name, NONE, precision)
    ours, our_state, step = trained(name, CANONICAL, precision)
    assert ours == losses
    for key, value in state.items():
        assert torch.equal(our_state[key], value), key
    assert len(step.graph.graph.nodes) < len(plain.graph.graph.nodes)
    assert list(step.graph.gradients) == list(plain.graph.gradients)
    assert list(step.graph.boundaries) == list(plain.graph.boundaries)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_equal_layers_stay_equal(name: str) -> None:
    """No more distinct regions to compile than before, and no more memory by the model of `graph/liveness.py`."""

    def measured(passes: Pipeline) -> tuple[int, int]:
        graph = trained(name, passes, "bf16")[2].graph
        pieces = split_regions(write_state_in_place(graph))
        return len({p.signature for p in pieces if isinstance(p, Region)}), peak_bytes(graph)

    before, after = measured(NONE), measured(CANONICAL)
    assert after[0] <= before[0] and after[1] <= before[1]


def main() -> None:
    for name in ZOO:
        for precision in ("fp32", "bf16"):
            if ZOO[name].expect_rung == "whole step":
                _, reports = CANONICAL.run_reporting(trained(name, Pipeline([]), precision)[2].graph)
                told = "  ".join(f"{r.name} {r.nodes_before - r.nodes_after}" for r in reports)
                print(f"{name:<16} {precision}  {reports[0].nodes_before:>5} nodes: {told}")


if __name__ == "__main__":
    main()
