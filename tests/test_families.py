"""Hugging Face families, tiny, from their configs: nearly all must be captured as a whole step, the rest by name.

By default six of them take a step. The whole table has the mark `zoo`: `make zoo`, or `python -m tests.zoo.families`.
"""

from __future__ import annotations

import math
import time

import pytest
import torch

pytest.importorskip("transformers")

from tests.zoo.families import FAMILIES, STEPS, WHOLE, try_family
from tests.zoo.family import build_family

import wholestep

pytestmark = pytest.mark.filterwarnings("ignore")

AT_LEAST, WHOLE_SHARE = 80, 0.85
SIX = ("mixtral", "llava", "longformer", "wav2vec2", "detr", "deberta_v2")
"""Experts, an image in a text, sliding windows, CTC, queries, relative positions."""
QUICK = ("mixtral", "detr")

NOT_WHOLE: dict[str, str] = {
    **dict.fromkeys(("big_bird", "bigbird_pegasus"), "non-Tensor"),
    "reformer": "Data-dependent branching",
    **dict.fromkeys(("longformer", "led", "vilt", "autoformer"), "a value that is known only when the step runs"),
    "switch_transformers": "how many places a mask picks",
    "ctrl": "python_type",
    "yoso": "duplicate tensor input",
    "paligemma": "FirstStepDiffers",
}  # fmt: skip
"""Family -> words of the reason why its whole step was left."""


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SIX])
def test_six_kinds_of_models_take_a_step(name: str) -> None:
    built = build_family(FAMILIES[name])
    before = [parameter.detach().clone() for parameter in built.model.parameters()]
    step = wholestep.compile(
        built.model, built.loss_fn, built.make_optimizer("sgd"), built.batches[0], backend="interpret", check="first",
        cache=False,
    )  # fmt: skip
    for batch in built.batches[:2]:  # some are captured after one real eager step
        loss = step(batch)
        assert loss.isfinite() and not loss.requires_grad
    assert any(not torch.equal(old, new) for old, new in zip(before, built.model.parameters()))
    assert (step.rung == WHOLE) == (name not in NOT_WHOLE), step.explain()


@pytest.mark.zoo
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_whole(name: str) -> None:
    found = try_family(name)
    if name not in NOT_WHOLE:
        assert found.whole, f"{found.rung}: {found.reason}"
    else:
        assert not found.whole, f"{name} is whole: take it out of the table"
        assert NOT_WHOLE[name] in found.reason, f"{found.rung}: {found.reason}"


@pytest.mark.zoo
def test_nearly_all_families_are_whole() -> None:
    assert set(NOT_WHOLE) <= set(FAMILIES)
    assert len(FAMILIES) >= AT_LEAST
    share = 1 - len(NOT_WHOLE) / len(FAMILIES)
    assert share >= WHOLE_SHARE


@pytest.mark.zoo
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_what_it_says(name: str) -> None:
    """Built twice it is the same, its batches differ, and eager PyTorch trains it in well under a second."""
    torch.manual_seed(123)
    built, again = build_family(FAMILIES[name]), build_family(FAMILIES[name])
    assert all(torch.equal(one, other) for one, other in zip(built.model.parameters(), again.model.parameters()))
    assert len(built.batches) >= STEPS + 1
    losses, began = [], time.perf_counter()
    for batch in built.batches:
        loss = built.loss_fn(built.model, batch)
        loss.backward()
        losses.append(loss.item())
    assert time.perf_counter() - began < len(losses)
    assert all(map(math.isfinite, losses)) and len(set(losses)) == len(losses), losses
    gradients = [p.grad for p in built.model.parameters() if p.grad is not None]
    assert gradients and all(gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.abs().max() > 1e-6 for gradient in gradients)
