"""Object detection: RetinaNet on pictures with several handwritten digits in them.

In: sizes. Out: a Training. It stands where TBD had Faster R-CNN: one stage instead of two, so that every shape is fixed, with the
same backbone, pyramid, anchors and matching by overlap.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from wholestep.bench.workload import Part, Training, one_part
from wholestep.bench.workloads.making import cycled, drawn, moved
from wholestep.bench.workloads.retinanet import RetinaNet, detection_loss
from wholestep.data.digits import BRIGHTEST, read_digits
from wholestep.data.draws import generator_for
from wholestep.data.windows import Batch
from wholestep.train.optimizers import make_optimizer

SMALLEST, LARGEST = 0.15, 0.5
"""Of a digit, as a share of the picture's side."""


class Scenes:
    """Pictures of up to `most` digits, `rows` at a time, with their boxes and classes."""

    def __init__(self, *, image: int, rows: int, most: int, seed: int, device: torch.device) -> None:
        self.image, self.rows, self.most, self.seed, self.device = image, rows, most, seed, device
        digits, self.labels, _ = read_digits()
        self.digits = digits[:, None] / BRIGHTEST

    def batch(self, number: int) -> Batch:
        """Batch `number`; slots without a digit have boxes of no size."""
        generator = generator_for(self.seed, number, "scenes")
        shape = (self.rows, self.most)
        chosen = torch.randint(0, len(self.labels), shape, generator=generator)
        half = SMALLEST + (LARGEST - SMALLEST) * torch.rand(*shape, 1, generator=generator)  # the picture spans -1 to 1
        centre = (2 * torch.rand(*shape, 2, generator=generator) - 1) * (1 - half)
        filled = torch.arange(self.most) < torch.randint(1, self.most + 1, (self.rows, 1), generator=generator)
        boxes = torch.cat([(centre + 1) / 2, half, half], dim=2) * self.image * filled[..., None]
        place = torch.cat([torch.eye(2).expand(*shape, 2, 2) / half[..., None], -(centre / half)[..., None]], dim=3)
        drawn_digits = self.digits[chosen] * filled[..., None, None, None]
        noise = 0.1 * torch.randn(self.rows, 1, self.image, self.image, generator=generator)
        given = moved({"digits": drawn_digits, "place": place, "noise": noise}, self.device)
        scene = given["noise"]
        for slot in range(self.most):
            size = [self.rows, 1, self.image, self.image]
            grid = F.affine_grid(given["place"][:, slot], size, align_corners=False)
            scene = torch.maximum(scene, F.grid_sample(given["digits"][:, slot], grid, align_corners=False))
        pixels = scene.expand(-1, 3, -1, -1).contiguous()
        return {"pixel_values": pixels} | moved({"boxes": boxes, "labels": self.labels[chosen]}, self.device)


def build_detection(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
    """RetinaNet with AdamW and clipping."""
    model = drawn(
        seed, device,
        lambda: RetinaNet(
            depth=sizes["depth"], backbone_width=sizes["backbone_width"], image=sizes["image"], width=sizes["width"],
            looks=sizes["looks"], classes=sizes["classes"],
        ),
    )  # fmt: skip
    scenes = Scenes(image=sizes["image"], rows=sizes["batch"], most=sizes["most"], seed=seed, device=device)
    batches = cycled(scenes.batch, device)
    part = Part(
        name="model", model=model, loss_fn=detection_loss, clip_norm=1.0, example_batch=batches(0),
        optimizer=make_optimizer("adamw", model, lr=sizes["lr"], weight_decay=1e-4),
    )  # fmt: skip
    return one_part(part, batches, units=sizes["batch"], precision=sizes["precision"])
