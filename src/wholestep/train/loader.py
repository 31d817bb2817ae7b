"""Batches that come from the user's own function: one batch, repeated, or an iterable such as a DataLoader, gone through again.

In: what the function returned as the fourth. Out: Batches. The random numbers an iterable draws (shuffling, augmentation in this
process) are kept apart from those of training and depend on (seed, epoch), so that skipping to a position gives what an
uninterrupted run would have had.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wholestep.errors import BadBatch
from wholestep.graph.counted import counted


def is_iterable_of_batches(value: Any) -> bool:
    """A DataLoader, a dataset, a generator: what can be gone through and is not itself a batch."""
    if isinstance(value, (Tensor, Mapping, list, tuple, str, bytes, np.ndarray)) or dataclasses.is_dataclass(value):
        return False
    return hasattr(value, "__iter__") or (hasattr(value, "__getitem__") and hasattr(value, "__len__"))


def on_device(value: Any, device: torch.device) -> Any:
    """Tensors inside of dicts, lists and tuples moved; anything else as it is."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: on_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(on_device(item, device) for item in value))
    if type(value) in (list, tuple):
        return type(value)(on_device(item, device) for item in value)
    if isinstance(value, Mapping) and hasattr(value, "to"):  # what Hugging Face's tokenizers return
        return value.to(device)
    return value


def rows(batch: Any) -> int:
    """Length of the first dimension of the first tensor; 1 where there is none."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    inside = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    for item in inside:
        if isinstance(item, (Tensor, Mapping, list, tuple)):
            return rows(item)
    return 1


class OneBatch:
    """The same batch again and again."""

    unit = "samples"

    def __init__(self, batch: Any, device: torch.device) -> None:
        self._batch, self.units = on_device(batch, device), rows(batch)

    def batch(self, number: int) -> Any:
        return self._batch

    def describe(self) -> str:
        return f"one batch of {self.units} samples, the same at every step: return a DataLoader to train on more"


class LoaderBatches:
    """An iterable, gone through from the start again whenever it ends."""

    unit = "samples"

    def __init__(self, iterable: Any, seed: int, device: torch.device) -> None:
        self.iterable, self.seed, self.device = iterable, seed, device
        self.once = iter(iterable) is iterable if hasattr(iterable, "__next__") else False
        self._length: int | None = None
        self._restart()
        self.units = rows(self.batch(0))

    def _restart(self) -> None:
        self._next, self._epoch, self._in_epoch = 0, -1, 0
        self._iterator: Iterator[Any] | None = None
        self._last: tuple[int, Any] | None = None

    def batch(self, number: int) -> Any:
        """Batch `number`: the next one is read, an earlier one begins again, a later one is skipped to."""
        if self._last is not None and self._last[0] == number:
            return self._last[1]
        if number < self._next:
            if self.once:
                raise BadBatch(
                    f"batch {number} was asked for after batch {self._next - 1}, and the batches can be gone through only once",
                    hint="return a list in a Dataset, a DataLoader, or an object with __iter__",
                )
            self._restart()
        made: Any = None
        while self._next <= number:
            made = self._read()
            self._next += 1
        made = on_device(made, self.device)
        self._last = (number, made)
        return made

    def _read(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._epoch += 1
                self._in_epoch = 0
                self._states = _seeded(self.seed, self._epoch)
                with self._own_randomness():
                    self._iterator = iter(self.iterable)
            with self._own_randomness():
                for made in self._iterator:
                    self._in_epoch += 1
                    return made
            if self.once:
                break
            self._length, self._iterator = self._in_epoch, None
        if self._next == 0:
            raise BadBatch("there are no batches: the iterable is empty", hint="check the data set and drop_last")
        raise BadBatch(
            f"the batches ended after {self._next}",
            hint="return a DataLoader, or an object with __iter__, to go through again",
        )

    @contextlib.contextmanager
    def _own_randomness(self) -> Iterator[None]:
        outside = _states()
        _set_states(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _set_states(outside)

    def describe(self) -> str:
        size = counted(len(self.iterable), "batch", "batches") if hasattr(self.iterable, "__len__") else "batches"
        again = (
            "gone through once" if self.once else "gone through again and again, in an order that depends on the seed"
        )
        return f"{size} from a {type(self.iterable).__name__}, {self.units} samples in the first, {again}"


_States = tuple[Tensor, Any, Any]


def _states() -> _States:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _set_states(states: _States) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def _seeded(seed: int, epoch: int) -> _States:
    """The states of generators freshly seeded for an epoch."""
    mixed = (seed * 1_000_003 + epoch) % 2**63
    return (
        torch.Generator().manual_seed(mixed).get_state(),
        random.Random(mixed).getstate(),
        np.random.RandomState(mixed % 2**32).get_state(),
    )
