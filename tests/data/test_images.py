"""Images by class: sizes, channels, what is held out, batches as functions of their number, the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.own_files import images

from wholestep.data.images import ImageBatches
from wholestep.errors import BadOption, WholestepWarning

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def batches(folder: Path, **changes: Any) -> ImageBatches:
    return ImageBatches(folder, **({"image": 8, "channels": 3, "batch": 4, "seed": 0, "device": CPU} | changes))


def test_a_batch_depends_on_its_number_alone_and_the_cache_gives_the_same(tmp_path: Path, cache: Path) -> None:
    folder = images(tmp_path / "pets")
    one, other = batches(folder), batches(folder)
    assert one.batch(3)["pixel_values"].equal(other.batch(3)["pixel_values"]) and len(list(cache.iterdir())) == 1
    assert one.batch(3)["pixel_values"].shape == (4, 3, 8, 8) and one.digest == other.digest
    assert not one.batch(3)["pixel_values"].equal(one.batch(4)["pixel_values"])
    assert batches(folder, channels=1).batch(0)["pixel_values"].shape == (4, 1, 8, 8)


def test_pixels_are_normalised_by_those_trained_on(tmp_path: Path) -> None:
    made = batches(images(tmp_path / "pets", each=30))
    pixels = torch.stack([made._formed(made.train[i : i + 1])["pixel_values"][0] for i in range(len(made.train))])
    assert pixels.mean((0, 2, 3)).abs().max() < 1e-3 and (pixels.std((0, 2, 3)) - 1).abs().max() < 1e-2


def test_of_every_class_each_tenth_is_held_out_or_the_last_of_few(tmp_path: Path) -> None:
    made = batches(images(tmp_path / "pets", each=6))
    assert len(made.held) == 3 and len(made.train) == 15 and made.labels[made.held].tolist() == [0, 1, 2]
    many = batches(images(tmp_path / "more", each=25))
    assert len(many.held) == 6 and sum(len(b["labels"]) for b in many.passages(False)) == 6
    assert sum(len(b["labels"]) for b in many.passages(True)) == 75


def test_a_folder_may_say_what_is_held_out(tmp_path: Path) -> None:
    images(tmp_path / "pets" / "train", each=4)
    images(tmp_path / "pets" / "val", each=2)
    made = batches(tmp_path / "pets")
    assert len(made.train) == 12 and len(made.held) == 6 and made.classes == ["cat", "dog", "newt"]


def test_other_images_are_read_with_the_classes_of_a_run(tmp_path: Path) -> None:
    known = batches(images(tmp_path / "pets")).known
    other = batches(images(tmp_path / "two", classes=("newt", "cat")), known=known)
    assert set(other.labels.tolist()) == {0, 2} and other.mean == known["mean"]
    with pytest.raises(BadOption, match="has a class 'yak'"):
        batches(images(tmp_path / "yaks", classes=("cat", "yak")), known=known)


def test_awkward_batches(tmp_path: Path) -> None:
    black, white, few = batches(images(tmp_path / "pets")).edges(fewest=2)
    assert black["pixel_values"].max() <= 0 <= white["pixel_values"].min() and len(few["labels"]) == 2


def test_colours_that_a_model_does_not_see_and_empty_folders_are_told(tmp_path: Path) -> None:
    folder = images(tmp_path / "pets")
    grey = batches(folder, channels=1)
    assert grey.unseen_colours is not None and grey.unseen_colours.suffix == ".png"
    assert (
        batches(folder).unseen_colours is None and batches(folder, channels=1, known=grey.known).unseen_colours is None
    )
    (folder / "bird").mkdir()
    with pytest.warns(WholestepWarning, match="bird holds no image: it is no class"):
        assert "bird" not in batches(folder).classes


def test_grey_images_saved_in_colour_are_grey(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for number in range(3):
            image.new("L", (9, 9), 40 * number).convert("RGB").save(tmp_path / name / f"{number}.jpg")
    assert batches(tmp_path, channels=1).unseen_colours is None


def test_what_is_wrong_with_an_image_is_told(tmp_path: Path) -> None:
    folder = images(tmp_path / "pets")
    whole = next(folder.rglob("*.png"))
    whole.write_bytes(whole.read_bytes()[:45])
    with pytest.raises(BadOption, match=r"is no image that Pillow can read: [A-Za-z]+, .*truncated"):
        batches(folder)
