"""`precision="fp16"`: the loss scale, kept and changed on the device, inside the captured step.

Gradients in fp16 vanish below 6e-8 and overflow above 65504. So the loss is multiplied by a scale before differentiation and the
update divides by it (through its `scale` argument, at no cost). When a gradient is not finite the update is left out and the
scale is halved; after 2000 good steps in a row it is doubled. All of it is data: one float32 tensor of three numbers goes into
the graph and comes out of it, chosen by selects, and no value travels to the host.

    [scale, good steps in a row, updates left out so far]

The third number is what an update's step count is corrected by: torch's GradScaler does not count a step that it leaves out. Scales
are powers of two, so scaling and unscaling change no bit of a gradient that neither vanishes nor overflows.
"""

from __future__ import annotations

from typing import Any

import torch

INITIAL = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
GROWTH_INTERVAL = 2000
LEAST, MOST = 2.0**-14, 2.0**32
"""Where halving and doubling end: a model that is never finite must not bring the scale to zero."""
KEYS = ("scale", "good_steps", "skipped")


class LossScale:
    """The live numbers; one per Step, read and written by every captured variant of it."""

    def __init__(self) -> None:
        self.numbers = torch.tensor([INITIAL, 0.0, 0.0])

    def on(self, device: torch.device) -> torch.Tensor:
        """The tensor that graphs read and write; it moves with the model."""
        if self.numbers.device != device:
            self.numbers = self.numbers.to(device)
        return self.numbers

    def state_dict(self) -> dict[str, float]:
        return dict(zip(KEYS, self.numbers.tolist(), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.numbers.copy_(torch.tensor([float(state[key]) for key in KEYS]))

    def after_eager(self, finite: bool) -> None:
        """The same change as in a captured step; an eager optimizer that did not step did not count either."""
        skipped = self.numbers[2].clone()
        self.numbers.copy_(following(self.numbers, torch.tensor(finite, device=self.numbers.device)))
        self.numbers[2] = skipped


def following(numbers: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """The numbers after a step whose gradients were, or were not, finite (a 0-d bool)."""
    scale, good, skipped = numbers.unbind()
    good = good + 1
    grows = good >= GROWTH_INTERVAL
    grown = torch.where(grows, scale * GROWTH, scale)
    return torch.stack(
        [
            torch.where(finite, grown, scale * BACKOFF).clamp(LEAST, MOST),
            torch.where(finite & ~grows, good, torch.zeros_like(good)),
            torch.where(finite, skipped, skipped + 1),
        ]
    )


def counted(hyper: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """An update's numbers, the first of which is its step count, without the steps that were left out."""
    count = (hyper[:1] - numbers[2].to(hyper.dtype)).clamp(min=1.0)
    return torch.cat([count, hyper[1:]])
