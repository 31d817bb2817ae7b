"""How good a trained model is: loss, and perplexity or accuracy, over what it was not trained on.

In: a Trained, and other data than its own. Out: an Evaluation. The model's own data is measured over the part that was held out;
other data over all of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wholestep.data.token_files import is_token_file
from wholestep.errors import BadOption
from wholestep.train.build import find_data, image_logits
from wholestep.train.held_out import evaluating
from wholestep.train.saved import Kept
from wholestep.train.settings import resolve_settings
from wholestep.train.trained import Trained

OWN_BATCHES = 20
"""Of a function of the user's own, which says nothing of what is held out."""
_DATA = ("data", "glob", "field")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What was measured."""

    run: str
    checkpoint: str
    data: str
    part: str
    """Which part of the data."""
    loss: float
    perplexity: float | None
    """exp(loss), of a model that guesses tokens."""
    bits_per_byte: float | None
    """Of a model that guesses the next token: what does not depend on how a text is cut."""
    accuracy: float | None
    """The share of classes, or of masked tokens, that were guessed."""
    unit: str
    count: int
    """How many tokens or samples were looked at."""
    complete: bool
    """All of that part, or the first batches of it."""
    seconds: float


def evaluate(
    trained: Trained, *, data: str | None = None, glob: str | None = None, field: str | None = None, batch: int | None = None,
    seq: int | None = None, batches: int | None = None,
) -> Evaluation:  # fmt: skip
    """Measure `trained` on its own held-out part, or on `data`; `batches`: at most so many."""
    began = time.perf_counter()
    if trained.family is None:
        source, part, described = _own_batches(trained, data), "its own", trained.settings["model"]
        task, unit, per_token = "own", "samples", None
        batches = batches or OWN_BATCHES
    else:
        settings = _settings(trained, {"data": data, "glob": glob, "field": field, "batch": batch, "seq": seq})
        found = find_data(settings, trained.family, trained.device, _kept(trained, data))
        whole = data is not None and not _same(data, trained.settings.get("data"))
        source, part, described = found.batches.passages(whole), "all" if whole else "held out", settings["data"]
        task, unit = trained.family.task, found.batches.unit
        # ids in a file stand for texts of which nobody knows how long they were
        per_token = None if is_token_file(settings["data"]) else getattr(found.batches, "bytes_per_token", None)
    rest = iter(source)
    totals = _measure(trained, task, itertools.islice(rest, batches))
    if not totals.batches:
        what = f"data {described!r} holds out nothing" if part == "held out" else f"data {described!r} holds no batch"
        raise BadOption(what, hint="give other data with --data, or a smaller --seq")
    loss = totals.loss / totals.weight
    text = task in ("next", "causal", "seq2seq", "masked")
    return Evaluation(
        run=trained.name, checkpoint=str(trained.path), data=described, part=part, loss=loss,
        perplexity=math.exp(min(loss, 700.0)) if text else None,
        bits_per_byte=loss / math.log(2) / per_token
        if task in ("next", "causal") and per_token and trained.settings.get("tokenizer") != "ids" else None,
        accuracy=totals.right / totals.asked if totals.asked else None, unit=unit, count=totals.units,
        complete=next(rest, None) is None, seconds=time.perf_counter() - began,
    )  # fmt: skip


def _own_batches(trained: Trained, data: str | None) -> Iterable[Any]:
    assert trained.job is not None
    if data is not None:
        hint = "leave it out: a few of the function's own batches are measured"
        raise BadOption(f"--data {data}: {trained.settings['model']} makes its own batches", hint=hint)
    return (trained.job.batches.batch(number) for number in range(OWN_BATCHES))


def _settings(trained: Trained, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the run, with other data and sizes."""
    asked = {name: value for name, value in given.items() if value is not None}
    if asked:  # as train would look at it: is it data for this model, can it read so many tokens?
        resolve_settings(str(trained.path), on_gpu=trained.device.type == "cuda", **asked)
    if asked.get("data") is not None:
        asked |= {"data_digest": None} | {name: given[name] for name in _DATA}
        if _same(asked["data"], trained.settings.get("data")):
            asked |= {name: trained.settings.get(name) for name in _DATA if given[name] is None}
    settings = {**trained.settings, **asked}
    if settings.get("tokenizer") in ("bpe", "file"):
        settings["tokenizer"] = "file"
        settings.pop("tokenizer_digest", None)
        if trained.tokens is None:
            raise BadOption(
                f"{trained.name} holds no tokenizer", hint="name the one it was trained with by --tokenizer"
            )
    if trained.tokens is not None and trained.tokens.kind == "file" and settings["tokenizer"] != "file":
        settings["tokenizer"] = "file"
    return settings


def _same(data: str, other: Any) -> bool:
    return data == other or os.path.abspath(os.path.expanduser(data)) == other


def _kept(trained: Trained, data: str | None) -> Kept:
    run = trained.path.parent.parent
    return Kept(Kept.by(run).files if data is None else None, trained.path)


@dataclasses.dataclass(slots=True)
class _Totals:
    loss: float = 0.0
    weight: float = 0.0
    right: int = 0
    asked: int = 0
    units: int = 0
    batches: int = 0


def _measure(trained: Trained, task: str, batches: Iterable[Any]) -> _Totals:
    totals = _Totals()
    precision = trained.settings.get("precision", "fp32")
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    cast: Any = contextlib.nullcontext if dtype is None else lambda: torch.autocast(trained.device.type, dtype)
    members = trained.model.values() if isinstance(trained.model, dict) else trained.model
    roots = [members] if isinstance(members, torch.nn.Module) else list(members)
    with contextlib.ExitStack() as stack:
        for root in roots:
            stack.enter_context(evaluating(root))
        for batch in batches:
            with cast():
                loss, weight, right, asked, units = _MEASURES[task](trained, batch)
            totals.loss += float(loss.double()) * weight
            totals.weight += weight
            totals.right, totals.asked, totals.units = totals.right + right, totals.asked + asked, totals.units + units
            totals.batches += 1
    return totals


_Measured = tuple[Tensor, float, int, int, int]
"""The loss of a batch, its weight among the batches, guesses that are right and all, tokens or samples."""


def _next(trained: Trained, batch: Any) -> _Measured:
    assert trained.family is not None and trained.family.loss_fn is not None
    rows = len(batch["targets"])
    return trained.family.loss_fn(trained.model, batch), rows, 0, 0, batch["targets"].numel()


def _labelled(trained: Trained, batch: Any) -> _Measured:
    return trained.model(**batch).loss, len(batch["labels"]), 0, 0, batch["labels"].numel()


def _masked(trained: Trained, batch: Any) -> _Measured:
    made, asked = trained.model(**batch), batch["labels"] != -100
    right = int((made.logits.argmax(-1) == batch["labels"])[asked].sum())
    return made.loss, int(asked.sum()), right, int(asked.sum()), batch["labels"].numel()


def _image(trained: Trained, batch: Any) -> _Measured:
    logits, labels = image_logits(trained.model)(batch), batch["labels"]
    count = len(labels)
    return F.cross_entropy(logits.float(), labels), count, int((logits.argmax(-1) == labels).sum()), count, count


def _graph(trained: Trained, batch: Any) -> _Measured:
    logits, labels = trained.model(batch["graph"])[batch["nodes"]], batch["labels"]
    count = len(labels)
    return F.cross_entropy(logits.float(), labels), count, int((logits.argmax(-1) == labels).sum()), count, count


def _own(trained: Trained, batch: Any) -> _Measured:
    from wholestep.train.loader import rows

    assert trained.job is not None
    loss_fn = trained.job.loss_fn
    made = trained.model(**batch).loss if loss_fn is None else loss_fn(trained.model, batch)
    return (made[0] if isinstance(made, tuple) else made), rows(batch), 0, 0, rows(batch)


_MEASURES = {
    "next": _next, "causal": _labelled, "seq2seq": _labelled, "masked": _masked, "image": _image, "graph": _graph, "own": _own,
}  # fmt: skip
