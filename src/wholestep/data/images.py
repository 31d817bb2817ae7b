"""A folder of images, one folder per class, as batches: read once by Pillow, resized, and kept in the cache folder.

In: the folder, size and channels the model takes, batch size, a seed. Out: batch `number` as a pure function of (seed, number).
Of every class each tenth image is held out, by its name; a folder with `train` and `val` in it says so itself. Pixels are
normalised by the mean and spread of those trained on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wholestep.data.draws import generator_for
from wholestep.data.encoded import building
from wholestep.data.image_files import first_in_colour, list_images, read_image
from wholestep.data.rows import needs
from wholestep.data.sources import DIGITS, hash_files, key_of
from wholestep.disk import cache_folder, read_json
from wholestep.errors import BadOption

VERSION = 1
"""Raised when the same files would give other pixels."""
_PART = 256
"""Images looked at together for mean and spread."""

Batch = dict[str, Tensor]


class ImageBatches:
    """Images, `batch` at a time, as {"pixel_values", "labels"}."""

    unit = "samples"

    def __init__(
        self, folder: Path, *, image: int, channels: int, batch: int, seed: int, device: torch.device, glob: str | None = None,
        known: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`known`: classes, mean and spread of the run this belongs to; None finds them here."""
        self.name, self.image, self.channels, self.units = str(folder.resolve()), image, channels, batch
        self.seed, self.device = seed, device
        paths, named, held = list_images(folder, glob)
        classes = sorted(set(named))
        self.classes = list(known["classes"]) if known else classes
        for name in classes:
            if name not in self.classes:
                listed = ", ".join(self.classes[:10])
                raise BadOption(f"data {str(folder)!r} has a class {name!r}", hint=f"the model knows {listed}")
        self.files = hash_files(paths)
        self.key = key_of("images", VERSION, self.files, image, channels)
        self.pixels = _pixels(paths, self.key[:32], image, channels)
        self.unseen_colours = first_in_colour(paths, named) if channels == 1 and known is None else None
        """An image in colour where the model sees grey; of a run that is resumed or evaluated it was told."""
        self.labels = torch.tensor([self.classes.index(name) for name in named])
        self.train, self.held = torch.tensor(held).logical_not().nonzero()[:, 0], torch.tensor(held).nonzero()[:, 0]
        if not len(self.train):
            raise BadOption(f"data {str(folder)!r} leaves no image to train on", hint="give more images")
        mean_and_std = (known["mean"], known["std"]) if known else _mean_and_std(self.pixels, self.train)
        self.mean: list[float] = mean_and_std[0]
        self.std: list[float] = mean_and_std[1]

    @property
    def digest(self) -> str:
        return self.key[:DIGITS]

    @property
    def known(self) -> dict[str, Any]:
        """For the settings of a run."""
        return {"classes": self.classes, "mean": self.mean, "std": self.std}

    def batch(self, number: int) -> Batch:
        """Batch `number`, on the device."""
        generator = generator_for(self.seed, number, "images")
        return self._formed(self.train[torch.randint(0, len(self.train), (self.units,), generator=generator)])

    def held_out(self) -> list[Batch]:
        """The held-out images in equal batches, so that the mean of their losses is the mean over images."""
        size = len(self.held) // max(len(self.held) // self.units, 1)
        return [self._formed(part) for part in self.held.split(size) if len(part) == size] if size else []

    def passages(self, whole: bool) -> Iterator[Batch]:
        """Every held-out image once, or every image."""
        chosen = torch.arange(len(self.labels)) if whole else self.held
        yield from (self._formed(part) for part in chosen.split(self.units) if len(part))

    def edges(self, fewest: int = 2) -> list[Batch]:
        """Awkward batches: black, white, and as few images as can be (BatchNorm needs two)."""
        plain = self._formed(self.train[torch.arange(self.units) % len(self.train)])
        pixels = plain["pixel_values"]
        black, white = ({**plain, "pixel_values": self._normal(torch.full_like(pixels, v))} for v in (0.0, 1.0))
        return [black, white, self._formed(self.train[torch.arange(fewest) % len(self.train)])]

    def describe(self) -> str:
        held = f"{len(self.held):,} more held out" if len(self.held) else "too few to hold any out"
        return (
            f"{self.name}: {len(self.train):,} images of {len(self.classes)} classes, {held}; "
            f"resized to {self.image}x{self.image}, {self.units} per batch"
        )

    def _formed(self, chosen: Tensor) -> Batch:
        pixels = torch.from_numpy(np.ascontiguousarray(self.pixels[chosen.numpy()])).to(self.device)
        return {"pixel_values": self._normal(pixels.float() / 255), "labels": self.labels[chosen].to(self.device)}

    def _normal(self, pixels: Tensor) -> Tensor:
        mean, std = (torch.tensor(v, device=pixels.device).reshape(1, -1, 1, 1) for v in (self.mean, self.std))
        return (pixels - mean) / std


def _pixels(paths: Mapping[str, Path], key: str, image: int, channels: int) -> Any:
    """[n, channels, image, image] of bytes, mapped from the cache or read now."""
    shape = (len(paths), channels, image, image)
    folder = cache_folder("data") / key
    try:
        if tuple(read_json(folder / "facts.json")) == shape:
            return np.memmap(folder / "pixels.bin", np.uint8, "r", shape=shape)
    except (OSError, ValueError, TypeError):
        pass  # not there, or not whole
    needs("PIL", "a folder of images", install="pillow")
    try:
        with building(folder) as made:
            with (made / "pixels.bin").open("wb") as file:
                for path in paths.values():
                    file.write(read_image(path, image, channels).tobytes())
            (made / "facts.json").write_text(json.dumps(shape))
        return np.memmap(folder / "pixels.bin", np.uint8, "r", shape=shape)
    except OSError:  # a disk that refuses the cache is no reason not to train
        return np.stack([read_image(path, image, channels) for path in paths.values()])


def _mean_and_std(pixels: Any, chosen: Tensor) -> tuple[list[float], list[float]]:
    """Per channel, of values from 0 to 1."""
    count = 0
    total = squares = np.zeros(pixels.shape[1])
    for part in chosen.split(_PART):
        values = pixels[part.numpy()].astype(np.float64) / 255
        count += values.size // values.shape[1]
        total, squares = total + values.sum((0, 2, 3)), squares + (values**2).sum((0, 2, 3))
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    return [round(float(m), 6) for m in mean], [round(max(float(s), 0.01), 6) for s in std]
