"""A small residual network on handwritten digits: batch norm inside the captured step, accuracy on the plain module.

The step trains; evaluation is the module itself in eval mode, with the running statistics that the step has written.
The digits travel with the package (1,797 images of 8 x 8 pixels).

    python examples/resnet.py --steps 100
"""

from __future__ import annotations

import argparse
import gzip
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import wholestep

DIGITS = Path(wholestep.__file__).parent / "data" / "files" / "digits.csv.gz"
TRAINED_ON = 1400


class Residual(nn.Module):
    """Two convolutions around a residual; the shortcut is a convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        changes = stride != 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """8 x 8 images in, logits of the ten digits out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 32, 1))
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.blocks(F.relu(self.norm(self.stem(images))))
        return self.head(features.mean(dim=(2, 3)))


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images with pixels of about -1 to 1, and their labels, shuffled."""
    with gzip.open(DIGITS, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    np.random.default_rng(0).shuffle(table)
    images = torch.from_numpy(table[:, :64]).view(-1, 1, 8, 8)
    return images / 8 - 1, torch.from_numpy(table[:, 64]).long()


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """On the plain module, in eval mode."""
    model.eval()
    share = float((model(images).argmax(1) == labels).float().mean())
    model.train()
    return share


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--backend", choices=["inductor", "interpret"], default="interpret")
    given = parser.parse_args()
    torch.manual_seed(0)
    images, labels = digits()
    held_out = images[TRAINED_ON:], labels[TRAINED_ON:]
    model = SmallResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=given.steps)

    def batch() -> dict[str, torch.Tensor]:
        chosen = torch.randint(0, TRAINED_ON, (given.batch,))
        return {"images": images[chosen], "labels": labels[chosen]}

    step = wholestep.compile(model, loss_fn, optimizer, batch(), backend=given.backend)
    print(f"captured: {step.rung}")
    before = accuracy(model, *held_out)
    began = time.perf_counter()
    for number in range(1, given.steps + 1):
        loss = step(batch())
        scheduler.step()
        if number == 1 or number % max(given.steps // 5, 1) == 0:
            print(f"step {number:4d}  loss {float(loss):.3f}  held-out accuracy {accuracy(model, *held_out):.3f}")
    after = accuracy(model, *held_out)
    print(
        f"held-out accuracy {before:.3f} -> {after:.3f} in {time.perf_counter() - began:.1f} s; {step.captures} capture(s)"
    )
    return 0 if after > before else 1


if __name__ == "__main__":
    sys.exit(main())
