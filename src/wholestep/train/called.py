"""`--data package.module:callable`: batches from a function of the user's, for a model of Wholestep's or of transformers.

In: the name, and sizes that the function may ask for by naming a parameter `batch`, `seq` or `seed`. Out: Batches, over the
iterable it returns (a DataLoader, a dataset of batches). Where it has a parameter `held_out`, it is called once more with True.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from wholestep.errors import BadOption
from wholestep.train import resolve
from wholestep.train.families import Family
from wholestep.train.loader import LoaderBatches, is_iterable_of_batches

MOST_HELD_OUT = 64
"""Batches kept of what is held out."""


class CalledBatches(LoaderBatches):
    """What the function's iterable gives."""

    def __init__(self, name: str, *, batch: int, seq: int | None, seed: int, device: torch.device) -> None:
        self.name = name
        function = resolve.find_function(name, what="data")
        takes, _ = resolve.parameters(function)
        given = {"batch": batch, "seq": seq, "seed": seed}
        self._given = {key: value for key, value in given.items() if key in takes}
        self._function, self._holds_out = function, "held_out" in takes
        super().__init__(self._called(), seed, device)
        self.digest = _digest(self.batch(0))

    def _called(self, **more: Any) -> Any:
        made = resolve.call_one(self.name, self._function, {**self._given, **more})
        listed = isinstance(made, (list, tuple)) and made and all(isinstance(batch, Mapping) for batch in made)
        if not listed and not is_iterable_of_batches(made):
            what = f"{self.name} returned {type(made).__name__}, no batches"
            raise BadOption(what, hint="return a DataLoader, a list of dicts, or an object whose __iter__ gives them")
        return made

    def held_out(self) -> list[Any]:
        """The first batches that the function holds out; none where it has no such parameter."""
        return list(itertools.islice(self.passages(False), MOST_HELD_OUT))

    def passages(self, whole: bool) -> Iterator[Any]:
        """What is held out, once; or every batch of the training part."""
        if not whole and not self._holds_out:
            return
        loader = LoaderBatches(self._called(**({} if whole else {"held_out": True})), self.seed, self.device)
        for number in itertools.count():
            made = loader.batch(number)
            if loader._epoch > 0:
                return
            yield made

    def describe(self) -> str:
        return f"{self.name}: {super().describe()}"


def check_batch(batch: Any, name: str, family: Family, ids: int) -> None:
    """An error when a batch is not what the model takes; `ids`: how many it knows, 0 for images."""
    keys = (
        ("pixel_values", "labels")
        if family.reads_images
        else ("input_ids", "targets" if family.task == "next" else "labels")
    )
    hint = f"give dicts of tensors: {', '.join(keys)}"
    if not isinstance(batch, Mapping):
        raise BadOption(f"{name} gives a {type(batch).__name__} as a batch", hint=hint)
    for key in keys:
        if not isinstance(batch.get(key), Tensor):
            has = ", ".join(map(str, batch)) or "nothing"
            raise BadOption(f"{name} gives batches without a tensor {key!r}: they hold {has}", hint=hint)
    read = batch[keys[0]]
    if ids and (read.is_floating_point() or read.ndim != 2):
        shape = "x".join(map(str, read.shape)) or "no"
        raise BadOption(f"{name}: input_ids are {shape} values of {read.dtype}", hint="give rows of whole numbers")
    if ids and read.numel() and not 0 <= int(read.min()) <= int(read.max()) < ids:
        worst = int(read.max()) if int(read.max()) >= ids else int(read.min())
        raise BadOption(
            f"{name} gives the id {worst}, the model knows {ids}",
            hint=f"--set vocab_size={worst + 1} or more" if worst >= ids else "ids are 0 or more",
        )


def _digest(batch: Any) -> str:
    """Twelve digits of the first batch: the best that can be known of a function."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            digest.update(repr((value.dtype, value.shape)).encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            digest.update(repr(value).encode())

    add(batch)
    return digest.hexdigest()[:12]
