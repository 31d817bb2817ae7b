"""A job without weights and without data: what a capture needs to plan a step on a machine that could not run it.

In: MODEL and sizes as for `make_job`. Out: a DryJob whose model, optimizer and batch lie on the meta device, so that eight
billion parameters take no memory and no time. No text is read and no tokenizer trained: only the sizes of a batch count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from wholestep.train import families
from wholestep.train.build import FORMS
from wholestep.train.families import Family
from wholestep.train.job import Job, compile_options_of, make_job, num_parameters, own_job
from wholestep.train.optimizers import make_optimizer
from wholestep.train.settings import resolve_settings

_BYTE_IDS = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DryJob:
    """What a capture needs, and nothing that has values."""

    name: str
    settings: dict[str, Any]
    model: Any
    loss_fn: Callable[[Any, Any], Any] | None
    optimizer: Optimizer
    example: Any
    """One micro-batch."""
    compile_options: dict[str, Any]
    real: bool = False
    """The user's own function made its tensors, with values."""

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.model)


def make_dry_job(
    model: str,
    *,
    sets: Sequence[str] = (),
    batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    on_gpu: bool = True,
) -> DryJob:
    """What `make_job` would make for a GPU (or for a CPU), without its values."""
    settings, family = resolve_settings(model, sets=sets, batch=batch, seq=seq, precision=precision, on_gpu=on_gpu)
    if family is None:
        return dry(own_job(settings, torch.device("cpu")))
    if family.reads_graphs:  # its tables have sizes that only their values decide
        return dry(make_job(model, sets=sets, batch=batch, seq=seq, precision=settings["precision"], device="cpu"))
    config = family.configure(_with_vocabulary(settings, family))
    with torch.device("meta"):
        module = family.build(config, None)
        example = _example(settings, family, config)
    optimizer = make_optimizer(settings["optimizer"], module, lr=settings["lr"], weight_decay=settings["weight_decay"])
    if family.task == "next":
        settings = settings | {"config": {**settings["config"], "vocab_size": config.vocab_size}}
    return DryJob(
        name=settings["model"], settings=settings, model=module, loss_fn=family.loss_fn, optimizer=optimizer, example=example,
        compile_options=compile_options_of(settings),
    )  # fmt: skip


def dry(job: Job) -> DryJob:
    """A job that was made with values; a batch is the first that its loader yields, one micro-batch of it."""
    return DryJob(
        name=job.name, settings=job.settings, model=job.model, loss_fn=job.loss_fn, optimizer=job.optimizer,
        example=job.batches.batch(0), compile_options=job.compile_options, real=True,
    )  # fmt: skip


def _with_vocabulary(settings: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """A GPT of this package has as many ids as its tokenizer yields, which is what the tokenizer was asked for."""
    changes = dict(settings["config"])
    if family.task == "next" and not changes.get("vocab_size"):
        changes["vocab_size"] = settings["vocabulary"] if settings["tokenizer"] == "bpe" else _BYTE_IDS
    return changes


def _example(settings: Mapping[str, Any], family: Family, config: Any) -> dict[str, torch.Tensor]:
    """A micro-batch of the right sizes."""
    rows = settings["batch"] // settings["accumulate"]
    if family.reads_images:
        size, channels = families.image_shape(config)
        return {"pixel_values": torch.empty(rows, channels, size, size), "labels": torch.empty(rows, dtype=torch.int64)}
    seq = settings["seq"]
    if family.task == "masked":
        ids = torch.empty(rows, seq, dtype=torch.int64)
        return {"input_ids": ids, "labels": torch.empty_like(ids)}
    form, sequences, more = FORMS[family.task]
    return form(torch.empty(rows, sequences * seq + more, dtype=torch.int64), torch.Generator("cpu"))
