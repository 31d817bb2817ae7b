"""Digits: shapes, purity, and what is held out."""

from __future__ import annotations

import torch

from wholestep.data.digits import HELD_OUT, DigitBatches, read_digits

CPU = torch.device("cpu")


def batches(image: int = 16, channels: int = 1, batch: int = 6, seed: int = 0) -> DigitBatches:
    return DigitBatches(image=image, channels=channels, batch=batch, seed=seed, device=CPU)


def test_the_file_is_whole() -> None:
    images, labels, digest = read_digits()
    assert images.shape == (1797, 8, 8) and images.min() == 0 and images.max() == 16
    assert labels.unique().tolist() == list(range(10)) and len(digest) == 12


def test_a_batch_depends_on_seed_and_number_alone() -> None:
    one = batches()
    before = torch.get_rng_state()
    first, fourth = one.batch(0), one.batch(3)
    assert torch.get_rng_state().equal(before)
    assert batches().batch(3)["pixel_values"].equal(fourth["pixel_values"])
    assert not first["pixel_values"].equal(fourth["pixel_values"])
    assert not batches(seed=1).batch(0)["pixel_values"].equal(first["pixel_values"])


def test_images_have_the_size_and_channels_a_model_wants() -> None:
    made = batches(image=24, channels=3).batch(0)
    assert made["pixel_values"].shape == (6, 3, 24, 24) and made["pixel_values"].is_contiguous()
    assert made["pixel_values"][:, 0].equal(made["pixel_values"][:, 2]) and made["labels"].dtype == torch.int64


def test_at_their_own_size_images_are_only_normalised() -> None:
    made = batches(image=8, batch=297)
    (held,) = made.held_out()
    images, labels, _ = read_digits()
    expected = (images[-HELD_OUT:] - images[:-HELD_OUT].mean()) / images[:-HELD_OUT].std()
    torch.testing.assert_close(held["pixel_values"][:, 0], expected, atol=1e-5, rtol=0)
    assert held["labels"].equal(labels[-HELD_OUT:])


def test_training_images_are_moved_and_background_stays_background() -> None:
    made = batches(image=8, batch=500)
    drawn = made.batch(0)["pixel_values"]
    still = made._formed(made.images[:500], made.labels[:500], torch.zeros(500, 2))["pixel_values"]
    black = -made.mean / made.spread
    assert abs(float(drawn.min()) - black) < 1e-5 and not drawn.flatten(1).equal(still.flatten(1))
    moved = made._formed(made.images[:1], made.labels[:1], torch.tensor([[0.25, 0.0]]))["pixel_values"][0, 0]
    torch.testing.assert_close(moved[:, :7], still[0, 0, :, 1:], atol=1e-5, rtol=0)
    torch.testing.assert_close(moved[:, 7], torch.full((8,), black), atol=1e-5, rtol=0)


def test_held_out_batches_are_equal_in_size() -> None:
    for size in (1, 64, 100, 297, 400):
        held = batches(batch=size, image=8).held_out()
        lengths = {len(b["labels"]) for b in held}
        assert len(lengths) == 1 and HELD_OUT - 64 < lengths.pop() * len(held) <= HELD_OUT


def test_awkward_batches() -> None:
    black, white, two = batches(batch=6).edges()
    assert black["pixel_values"].unique().numel() == 1 and white["pixel_values"].max() > 1
    assert two["labels"].shape == (2,)
    assert len(batches(batch=2000, image=8).edges()[0]["labels"]) == 2000
