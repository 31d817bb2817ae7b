"""What `plan` advises where a step does not fit: the least budget first, and only what helps."""

from __future__ import annotations

from typing import Any

from wholestep.cost.target import find_target
from wholestep.graph.bytes import parse_bytes
from wholestep.graph.plan import Plan
from wholestep.plan.frontier import Point, card_bytes
from wholestep.train.fit import Fit, LargestBatch, Question
from wholestep.train.remedies import remedies

GIB = 2**30


def fit(
    *, lasting: float, rest: float, device: str = "h200", budget: str | None = None, batch: int = 8, largest: int = 0,
    shorter: int | None = None, **settings: Any,
) -> Fit:  # fmt: skip
    """A step whose leanest plan takes `lasting` + `rest` GiB, of which the first does not depend on the batch."""
    target = find_target(device)
    breakdown = {"weights": int(lasting * GIB), "saved activations": int(rest * GIB)}
    point = Point(Plan(), sum(breakdown.values()), 1.0, breakdown, "")
    bytes_ = target.device.memory_bytes if budget is None else parse_bytes(budget)
    card = card_bytes(point.peak_bytes)
    return Fit(
        question=Question(model="m", target=target, budget_bytes=bytes_), name="m", num_parameters=1, num_operations=1,
        settings={"batch": batch, "seq": 2048, "precision": "bf16", "accumulate": 1, **settings}, frontier=[point],
        cards=[card], chosen=0 if card <= bytes_ else None, notes=(), seconds={}, shorter=shorter,
        largest=LargestBatch(batch=largest, how="", certain=True),
    )  # fmt: skip


def test_what_fits_needs_no_help() -> None:
    assert remedies(fit(lasting=10, rest=5)) == []


def test_a_budget_below_the_weights_is_answered_with_the_least_one_alone() -> None:
    """No card, no batch and no length is at fault."""
    (only,) = remedies(fit(lasting=13.8, rest=4.6, budget="1GiB"))
    words = only.split(":")[0]
    assert words.startswith("--memory 19.") and words.endswith("GiB")
    least = parse_bytes(words.removeprefix("--memory "))
    assert fit(lasting=13.8, rest=4.6, budget=words.removeprefix("--memory ")).fits, "what is advised can be asked for"
    assert least - card_bytes(int(18.4 * GIB)) < GIB / 10


def test_a_budget_that_holds_the_weights_may_be_met_by_less() -> None:
    found = remedies(fit(lasting=10, rest=20, budget="20GiB", largest=3))
    assert [text.split(":")[0] for text in found] == ["--memory 31.3GiB", "--set accumulate=4", "--batch 3"]


def test_a_length_is_named_only_where_one_was_found_to_fit() -> None:
    assert not any("--seq" in text for text in remedies(fit(lasting=10, rest=20, budget="15GiB")))
    found = remedies(fit(lasting=10, rest=20, budget="15GiB", shorter=512))
    assert any(text.startswith("--batch 1 --seq 512") for text in found)


def test_a_larger_card_is_named_where_the_card_is_too_small() -> None:
    found = remedies(fit(lasting=20, rest=20, device="rtx4090", largest=0))
    assert found == ["--device a100-80gb (80 GiB)"] or found == ["--device a100-80gb (79 GiB)"], found
    assert "t4" not in " ".join(remedies(fit(lasting=5, rest=5, device="8GiB"))), "it has no bf16"


def test_bf16_is_advised_where_half_of_the_activations_would_fit() -> None:
    assert any("bf16" in text for text in remedies(fit(lasting=10, rest=16, budget="24GiB", precision="fp32")))
    assert not any("bf16" in text for text in remedies(fit(lasting=10, rest=60, budget="24GiB", precision="fp32")))


def test_what_no_card_holds_is_said() -> None:
    (only,) = remedies(fit(lasting=300, rest=10))
    assert "weights and optimizer state alone take" in only
