"""Handwritten digits as batches of images: 1,797 of 8 x 8 pixels, enlarged to the size a model wants.

In: image size, channels, batch size, a seed. Out: batch `number` as a pure function of (seed, number), each image moved by up to
one of its original pixels; the last images are held out and never moved.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from wholestep.data.draws import generator_for
from wholestep.data.texts import FILES

HELD_OUT = 297
"""The last images; 1,500 are left to train on."""
PIXELS = 8
BRIGHTEST = 16
CLASSES = 10

Batch = dict[str, Tensor]


def read_digits() -> tuple[Tensor, Tensor, str]:
    """(images [n, 8, 8] from 0 to 16, labels [n], digest of the file's content)."""
    content = gzip.decompress((FILES / "digits.csv.gz").read_bytes())
    table = torch.from_numpy(np.loadtxt(content.decode("ascii").splitlines(), delimiter=",", dtype=np.int64))
    digest = hashlib.sha256(content).hexdigest()[:12]
    return table[:, :-1].reshape(-1, PIXELS, PIXELS).float(), table[:, -1].contiguous(), digest


class DigitBatches:
    """Digits, `batch` at a time, as {"pixel_values", "labels"}."""

    unit = "samples"

    def __init__(self, *, image: int, channels: int, batch: int, seed: int, device: torch.device) -> None:
        images, labels, self.digest = read_digits()
        self.image, self.channels, self.units, self.seed, self.device = image, channels, batch, seed, device
        training = images[:-HELD_OUT]
        self.mean, self.spread = float(training.mean()), float(training.std())
        self.images, self.labels = images.unsqueeze(1), labels
        self.count = len(training)

    def batch(self, number: int) -> Batch:
        """Batch `number`, on the device."""
        generator = generator_for(self.seed, number, "digits")
        chosen = torch.randint(0, self.count, (self.units,), generator=generator)
        moved = (2 * torch.rand(self.units, 2, generator=generator) - 1) * (2 / PIXELS)
        return self._formed(self.images[chosen], self.labels[chosen], moved)

    def held_out(self) -> list[Batch]:
        """The held-out images in equal batches, so that the mean of their losses is the mean over images."""
        images, labels = self.images[self.count :], self.labels[self.count :]
        size = len(labels) // max(len(labels) // self.units, 1)
        parts = list(zip(images.split(size), labels.split(size)))
        return [self._formed(i, v, torch.zeros(size, 2)) for i, v in parts if len(v) == size]

    def passages(self, whole: bool) -> Iterator[Batch]:
        """Every held-out image once, or every image."""
        chosen = torch.arange(0 if whole else self.count, len(self.labels))
        for part in chosen.split(self.units):
            yield self._formed(self.images[part], self.labels[part], torch.zeros(len(part), 2))

    def edges(self, fewest: int = 2) -> list[Batch]:
        """Awkward batches: black, white, and as few images as can be (BatchNorm needs two)."""
        labels, still = self.labels[torch.arange(self.units) % len(self.labels)], torch.zeros(self.units, 2)
        shape = (self.units, 1, PIXELS, PIXELS)
        batches = [self._formed(torch.full(shape, value), labels, still) for value in (0.0, float(BRIGHTEST))]
        return [*batches, self._formed(self.images[:fewest], self.labels[:fewest], torch.zeros(fewest, 2))]

    def describe(self) -> str:
        return (
            f"digits: {self.count:,} handwritten digits of {PIXELS}x{PIXELS} pixels, {HELD_OUT} more held out; "
            f"enlarged to {self.image}x{self.image}, moved by up to one pixel, {self.units} per batch"
        )

    def _formed(self, images: Tensor, labels: Tensor, moved: Tensor) -> Batch:
        """Enlarge, move and normalise in one sampling, on the device."""
        images = ((images - self.mean) / self.spread).to(self.device)
        edge = -self.mean / self.spread
        place = torch.eye(2, 3).repeat(len(images), 1, 1)
        place[:, :, 2] = moved
        size = [len(images), 1, self.image, self.image]
        grid = F.affine_grid(place.to(self.device), size, align_corners=False)
        # What lies outside of the picture is background, which is not 0 once normalised.
        drawn = F.grid_sample(images - edge, grid, align_corners=False) + edge
        drawn = drawn.expand(-1, self.channels, -1, -1).contiguous()
        return {"pixel_values": drawn, "labels": labels.to(self.device)}
