"""Speech recognition in the manner of Deep Speech 2 (Amodei et al., 2015): convolutions, bidirectional GRUs, CTC.

In: sizes. Out: a Training. The recordings are synthetic: every character is a spectrum of its own, held for a few frames under
noise; what is learned is to tell them apart and where each begins.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.bench.workload import Part, Training, one_part
from wholestep.bench.workloads.making import cycled, drawn, moved
from wholestep.data.draws import generator_for
from wholestep.data.windows import Batch
from wholestep.train.optimizers import make_optimizer

CHARACTERS = 29
"""26 letters, space and apostrophe, and the blank of CTC, which is 0."""
FRAMES_PER_SECOND = 100
SLOWEST = 10
"""Frames of one character: from half of this to all of it."""


class DeepSpeech2(nn.Module):
    """Spectrograms [rows, 1, bins, frames] in; log-probabilities [frames / 2, rows, characters] out."""

    def __init__(self, *, bins: int, channels: int, width: int, layers: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, channels, (41, 11), (2, 2), padding=(20, 5), bias=False), nn.BatchNorm2d(channels),
            nn.Hardtanh(0, 20), nn.Conv2d(channels, channels, (21, 11), (2, 1), padding=(10, 5), bias=False),
            nn.BatchNorm2d(channels), nn.Hardtanh(0, 20),
        )  # fmt: skip
        heard = channels * ((bins + 3) // 4)  # halved twice, rounding up
        inside = [heard] + [width] * (layers - 1)
        self.recurrent = nn.ModuleList(nn.GRU(size, width, batch_first=True, bidirectional=True) for size in inside)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in inside)
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, spectrograms: Tensor) -> Tensor:
        x = self.convolutions(spectrograms).flatten(1, 2).transpose(1, 2)  # [rows, frames, features]
        for norm, recurrent in zip(self.norms, self.recurrent):
            both, _ = recurrent(x)
            forwards, backwards = both.chunk(2, dim=2)
            # Over all frames of all recordings at once, as in the paper.
            x = norm((forwards + backwards).flatten(0, 1)).view_as(forwards)
        return self.head(x).log_softmax(dim=2).transpose(0, 1)


def speech_loss(model: Any, batch: Batch) -> Tensor:
    """CTC per character, averaged over the recordings."""
    log_probs = model(batch["spectrograms"])
    return F.ctc_loss(log_probs.float(), batch["transcripts"], batch["frames"], batch["lengths"], zero_infinity=True)


def recordings(rows: int, frames: int, bins: int, seed: int, number: int) -> Batch:
    """Characters at different speeds, until the recording is full."""
    spectra = torch.randn(CHARACTERS, bins, generator=generator_for(seed, 0, "spectra"))
    generator = generator_for(seed, number, "speech")
    most = frames // (SLOWEST // 2) + 1
    transcripts = torch.randint(1, CHARACTERS, (rows, most), generator=generator)
    ends = torch.randint(SLOWEST // 2, SLOWEST + 1, (rows, most), generator=generator).cumsum(1)
    # The character at a frame is the first one that ends after it; only characters heard to their end are written down.
    heard = torch.searchsorted(ends, torch.arange(frames).expand(rows, frames).contiguous(), right=True)
    sound = spectra[transcripts.gather(1, heard)] + 0.3 * torch.randn(rows, frames, bins, generator=generator)
    lengths = (ends <= frames).sum(1)
    return {
        "spectrograms": sound.transpose(1, 2).unsqueeze(1).contiguous(), "transcripts": transcripts, "lengths": lengths,
        "frames": torch.full((rows,), (frames + 1) // 2),
    }  # fmt: skip


def build_speech(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
    """Deep Speech 2, clipped."""
    rows, frames, bins = sizes["batch"], sizes["frames"], sizes["bins"]
    model = drawn(
        seed, device,
        lambda: DeepSpeech2(bins=bins, channels=sizes["channels"], width=sizes["width"], layers=sizes["layers"]),
    )  # fmt: skip
    batches = cycled(lambda n: moved(recordings(rows, frames, bins, seed, n), device), device)
    part = Part(
        name="model", model=model, loss_fn=speech_loss, clip_norm=100.0, example_batch=batches(0),
        optimizer=make_optimizer("adamw", model, lr=sizes["lr"], weight_decay=0.0),
    )  # fmt: skip
    return one_part(part, batches, units=rows * frames / FRAMES_PER_SECOND, precision=sizes["precision"])
