"""Windows of text: every place is drawn, a batch depends on its number alone, what is held out stays out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from wholestep.data.draws import generator_for
from wholestep.data.windows import Masked, TextBatches, continued_form, labelled_form, next_token_form, split
from wholestep.errors import BadOption


def batches(
    count: int = 1000, window: int = 9, rows: int = 4, seed: int = 0, form: Any = next_token_form
) -> TextBatches:
    return TextBatches(
        torch.arange(count), name="numbers", window=window, seq=window - 1, batch=rows, seed=seed, form=form,
        device=torch.device("cpu"), text_bytes=2 * count,
    )  # fmt: skip


def test_a_batch_depends_on_seed_and_number_alone() -> None:
    one, other = batches(), batches()
    drawn = [one.batch(n)["input_ids"] for n in range(5)]
    assert other.batch(3)["input_ids"].equal(drawn[3])  # without those before it
    torch.manual_seed(99)
    assert one.batch(0)["input_ids"].equal(drawn[0])
    assert len({tuple(d.flatten().tolist()) for d in drawn}) == 5
    assert not batches(seed=1).batch(0)["input_ids"].equal(drawn[0])


def test_drawing_leaves_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    batches().batch(0)
    assert torch.get_rng_state().equal(before)


def test_every_window_is_drawn_also_the_first_and_the_last() -> None:
    made = batches(count=30, window=20, rows=8)  # too short to hold anything out: 11 places
    starts = {int(row[0]) for n in range(60) for row in made.batch(n)["input_ids"]}
    assert starts == set(range(11))
    assert made.held_out() == [] and "too short" in made.describe()


def test_a_text_of_exactly_one_window() -> None:
    assert batches(count=9).batch(0)["targets"][0].tolist() == list(range(1, 9))


def test_a_text_shorter_than_one_window_is_told_with_numbers() -> None:
    with pytest.raises(BadOption, match=r"8 tokens, fewer than one window of 9 .*--seq 7 or less"):
        batches(count=8)


def test_held_out_is_the_last_part_and_never_drawn() -> None:
    made = batches(count=1000)
    train, held = split(torch.arange(1000), 9)
    assert len(held) == 50 and int(held[0]) == 950 == int(train[-1]) + 1
    assert max(int(made.batch(n)["targets"].max()) for n in range(1500)) == 949
    out = made.held_out()
    assert out and all(b["input_ids"].min() >= 950 for b in out)
    assert int(out[0]["input_ids"].min()) == 950 and int(out[-1]["targets"].max()) == 999
    assert [b["input_ids"].tolist() for b in made.held_out()] == [b["input_ids"].tolist() for b in out]


@pytest.mark.parametrize("form", [next_token_form, labelled_form, continued_form])
def test_ids_travel_as_int64(form: Any) -> None:
    made = batches(form=form).batch(0)
    assert all(value.dtype == torch.int64 and value.is_contiguous() for value in made.values())


def test_forms() -> None:
    windows = torch.arange(8).reshape(1, 8)
    nothing = generator_for(0, 0, "")
    assert next_token_form(windows, nothing)["targets"].tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert labelled_form(windows, nothing)["labels"].equal(windows)
    assert continued_form(windows, nothing)["labels"].tolist() == [[4, 5, 6, 7]]


def test_awkward_batches() -> None:
    same, ends, single = batches(count=1000, rows=4).edges(size=50)
    assert [row.unique().numel() == 1 for row in same["input_ids"]] == [True, False, False, False]
    assert ends["input_ids"][0].unique().tolist() == [0, 49] and not ends["input_ids"][1].equal(ends["input_ids"][3])
    assert single["input_ids"].shape[0] == 1 and same["input_ids"].shape[0] == 4


def test_masking_hides_fifteen_percent_eighty_ten_ten() -> None:
    mask = Masked(mask_id=3, first_id=4, end_id=1004)
    windows = torch.randint(4, 1004, (200, 512), generator=generator_for(0, 0, "text"))
    made = mask(windows, generator_for(0, 0, "mask"))
    chosen = made["labels"] != -100
    assert abs(float(chosen.float().mean()) - 0.15) < 0.005
    assert made["labels"][chosen].equal(windows[chosen]) and made["input_ids"][~chosen].equal(windows[~chosen])
    read = made["input_ids"][chosen]
    masked, kept = read == 3, read == windows[chosen]
    assert abs(float(masked.float().mean()) - 0.8) < 0.01
    assert abs(float(kept.float().mean()) - 0.1) < 0.01
    assert abs(float((~masked & ~kept).float().mean()) - 0.1) < 0.01
    assert read[~masked].min() >= 4 and read.max() < 1004
    again = mask(windows, generator_for(0, 0, "mask"))
    assert again["input_ids"].equal(made["input_ids"]) and again["labels"].equal(made["labels"])


def test_masking_always_asks_for_something() -> None:
    made = Masked(mask_id=3, first_id=4, end_id=9)(torch.full((500, 1), 5), generator_for(0, 0, "mask"))
    assert (made["labels"] == 5).all()
