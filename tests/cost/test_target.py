"""The card a plan is for: names, amounts, and what is neither."""

from __future__ import annotations

import pytest

from wholestep.cost.devices import DEVICES
from wholestep.cost.target import find_target
from wholestep.errors import BadOption


def test_names_amounts_and_what_their_times_are_worth() -> None:
    assert find_target("h200").times == "calibrated" and find_target("H200").device is DEVICES["h200"]
    assert find_target("l4").times == "not calibrated"
    card = find_target("24GiB")
    assert (
        card.times == "relative"
        and card.device.memory_bytes == 24 * 2**30
        and card.device.name == "24GiB"
        and card.is_gpu
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [("h20", "did you mean h200"), ("12GBs", "not an amount"), ("0GiB", "less than one byte"), ("", "known:")],
)
def test_what_is_no_card(text: str, said: str) -> None:
    with pytest.raises(BadOption, match=said):
        find_target(text)
