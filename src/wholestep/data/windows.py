"""Batches of text: windows over one long row of token ids, drawn from every place where a window fits.

In: ids, window length, batch size, a seed, and the form the model wants (`shape` of a batch). Out: batch `number` as a pure
function of (seed, number); held-out batches from the last part of the text, which is never drawn for training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wholestep.data.draws import generator_for
from wholestep.data.sources import HELD_OUT_PART
from wholestep.errors import BadOption

HELD_OUT_BATCHES = 4
"""Enough for two digits of the loss, and a fraction of a second for a small model on a CPU."""

Batch = dict[str, Tensor]
Form = Callable[[Tensor, torch.Generator], Batch]
"""(windows, generator for anything random) -> the batch a model takes."""


def next_token_form(windows: Tensor, generator: torch.Generator) -> Batch:
    """For models whose loss compares position i with target i: windows are one longer than the sequence."""
    return {"input_ids": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}


def labelled_form(windows: Tensor, generator: torch.Generator) -> Batch:
    """For Hugging Face's causal models, which shift the labels themselves."""
    return {"input_ids": windows, "labels": windows.clone()}


def continued_form(windows: Tensor, generator: torch.Generator) -> Batch:
    """For encoder-decoder models: read the first half, write the second."""
    half = windows.shape[1] // 2
    return {"input_ids": windows[:, :half].contiguous(), "labels": windows[:, half:].contiguous()}


@dataclasses.dataclass(frozen=True, slots=True)
class Masked:
    """For masked language models: 15 % of the positions are to be guessed, labels are -100 elsewhere.

    Of those, 80 % read as the mask, 10 % as a random token, 10 % as themselves. One position per row is always chosen, so
    that the loss is never the mean of nothing.
    """

    mask_id: int
    first_id: int
    """Random tokens are drawn from here ..."""
    end_id: int
    """... to before here."""
    rate: float = 0.15

    def __call__(self, windows: Tensor, generator: torch.Generator) -> Batch:
        rows, length = windows.shape
        chosen = torch.rand(rows, length, generator=generator) < self.rate
        chosen[torch.arange(rows), torch.randint(0, length, (rows,), generator=generator)] = True
        fate = torch.rand(rows, length, generator=generator)
        others = torch.randint(self.first_id, self.end_id, (rows, length), generator=generator)
        read = torch.where(chosen & (fate < 0.8), self.mask_id, windows)
        read = torch.where(chosen & (fate >= 0.9), others, read)
        return {"input_ids": read, "labels": torch.where(chosen, windows, -100)}


def split(ids: Any, window: int) -> tuple[Any, Any]:
    """(to train on, held out: the last 5 %, or nothing when that is shorter than one window)."""
    count = int(len(ids) * HELD_OUT_PART)
    if count < window or len(ids) - count < window:
        return ids, ids[:0]
    return ids[:-count], ids[-count:]


class TextBatches:
    """Windows of a text, `batch` at a time. Ids are a tensor, or an array of any integers in a mapped file."""

    unit = "tokens"

    def __init__(
        self, ids: Any, *, name: str, window: int, seq: int, batch: int, seed: int, form: Form, device: torch.device,
        text_bytes: int, held: Any = None, documents: int = 1,
    ) -> None:  # fmt: skip
        """`held`: what is held out, where that is decided already; None, or nothing, holds out the end of `ids`."""
        ids = np.asarray(ids)
        if len(ids) < window:
            raise BadOption(
                f"data {name!r} has {len(ids):,} tokens, fewer than one window of {window:,} (--seq {seq})",
                hint=f"use a longer text, or --seq {seq - (window - len(ids))} or less"
                if seq - (window - len(ids)) > 1 else "use a longer text",
            )  # fmt: skip
        self.name, self.window, self.seq, self.rows, self.seed, self.form = name, window, seq, batch, seed, form
        self.train, self.held = split(ids, window) if held is None or not len(held) else (ids, held)
        if len(self.held) < window:
            self.held = self.held[:0]
        self.device, self.text_bytes, self.units, self.documents = device, text_bytes, batch * seq, documents
        self.starts = len(self.train) - window + 1
        self.bytes_per_token = text_bytes / (len(self.train) + len(self.held))

    def batch(self, number: int) -> Batch:
        """Batch `number`, on the device."""
        generator = generator_for(self.seed, number, "windows")
        starts = torch.randint(0, self.starts, (self.rows,), generator=generator)
        return self._formed(self.train, starts, generator)

    def held_out(self) -> list[Batch]:
        """A few batches spread evenly over the held-out part; the same ones every time."""
        if not len(self.held):
            return []
        places = len(self.held) - self.window + 1
        count = min(HELD_OUT_BATCHES * self.rows, max(places // self.window, 1))
        count = max(count // self.rows, 1) * self.rows if count >= self.rows else count
        starts = torch.linspace(0, places - 1, count).long()
        return [
            self._formed(self.held, part, generator_for(self.seed, i, "held out"))
            for i, part in enumerate(starts.split(self.rows))
        ]

    def edges(self, size: int, fewest: int = 1) -> list[Batch]:
        """Awkward batches: a row of one token only, a row of the first and the last of `size` ids by turns, few rows.

        The other rows stay ordinary: where all are alike, the gradient of a bias is a sum of a thousand nearly equal numbers,
        which eager PyTorch's order of adding rounds better than Inductor's (by 1.5 times what the rule allows on a CPU).
        """
        starts = torch.arange(self.rows).mul(7).remainder(len(self.train) - self.window + 1)
        same = self._windows(self.train, starts)
        ends = same.clone()
        same[0] = min(size - 1, int(self.train[0]))
        ends[0] = torch.arange(self.window).remainder(2).mul(size - 1)
        few = self._windows(self.train, torch.zeros(fewest, dtype=torch.int64))
        return [
            self._on_device(self.form(w, generator_for(self.seed, i, "edges"))) for i, w in enumerate((same, ends, few))
        ]

    def passages(self, whole: bool) -> Iterator[Batch]:
        """What is held out, or the whole text, once from its start to its end; the last row of fewer tokens is left out."""
        for part in (self.train, self.held) if whole else (self.held,):
            starts = torch.arange(0, max(len(part) - self.window + 1, 0), self.seq * (self.window // self.seq))
            for i, rows in enumerate(starts.split(self.rows) if len(starts) else ()):
                yield self._formed(part, rows, generator_for(self.seed, i, "passages"))

    def describe(self) -> str:
        texts = f"{self.documents:,} texts, " if self.documents > 1 else ""
        held = f"{len(self.held):,} held out" if len(self.held) else "too short to hold anything out"
        return (
            f"{self.name}: {texts}{self.text_bytes:,} bytes, {len(self.train) + len(self.held):,} tokens "
            f"({self.bytes_per_token:.2f} bytes each), {held}; random windows of {self.seq}, {self.rows} per batch"
        )

    def _formed(self, ids: Tensor, starts: Tensor, generator: torch.Generator) -> Batch:
        return self._on_device(self.form(self._windows(ids, starts), generator))

    def _windows(self, ids: Any, starts: Tensor) -> Tensor:
        places = starts[:, None] + torch.arange(self.window)
        return torch.from_numpy(ids[places.numpy()].astype(np.int64))

    def _on_device(self, made: Batch) -> Batch:
        if self.device.type == "cuda":  # from pinned memory, so that the copy does not hold up the host
            return {key: value.pin_memory().to(self.device, non_blocking=True) for key, value in made.items()}
        return {key: value.to(self.device) for key, value in made.items()}
