"""A Job: everything one training run needs, built from what was asked on the command line.

In: MODEL (a preset, `hf:<model_type>`, a folder with a config.json, a run, or `package.module:callable`), data, sizes.
Out: model, loss, optimizer, schedule and a source of batches, ready for `wholestep.compile`, and the settings they came from.

What was asked is first resolved into settings, plain JSON; the Job is then built from the settings alone. `make_job_again` is that
second half, so a saved run can be rebuilt on any day.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from wholestep.capture.subject import modules_of
from wholestep.errors import BadOption
from wholestep.train import resolve
from wholestep.train.build import build
from wholestep.train.checkpoint import load_weights
from wholestep.train.checkpoint_files import open_stored
from wholestep.train.families import Family, find_family
from wholestep.train.loader import LoaderBatches, OneBatch, is_iterable_of_batches, on_device
from wholestep.train.optimizers import make_optimizer
from wholestep.train.saved import IN_EVERY_JOB, Kept
from wholestep.train.schedule import make_scheduler
from wholestep.train.settings import resolve_settings


class Batches(Protocol):
    """Where batches come from. A batch is a pure function of its number, so one integer is the position in the data."""

    unit: str
    """What a batch holds: `tokens` or `samples`."""
    units: int
    """How many of them per batch."""

    def batch(self, number: int) -> Any:
        """Batch `number` (from 0), on the device of the model."""
        ...

    def describe(self) -> str:
        """One line: what the data is, how much of it, how it is cut."""
        ...


@dataclasses.dataclass(slots=True, kw_only=True)
class Job:
    """What a run needs. Making it again from the same settings gives the same numbers."""

    name: str
    settings: dict[str, Any]
    """Resolved, as JSON: model and its configuration, data, sizes, learning rate ... Saved with every run and checkpoint."""
    model: Any
    loss_fn: Callable[[Any, Any], Any] | None
    optimizer: Optimizer
    scheduler: Any
    """One of torch's, stepped after every step; or None."""
    batches: Batches
    compile_options: dict[str, Any]
    """For `wholestep.compile`: precision, clip_norm, accumulate."""
    held_out: Sequence[Any] = ()
    """Batches that are not trained on, on the device; may be empty."""
    edge_batches: Sequence[Any] = ()
    """Awkward batches for `verify`."""
    write_sample: Callable[[], str] | None = None
    """A text the model writes, or what it says about a few images; None when there is nothing to show."""
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    """Written beside the weights of every checkpoint: configuration and tokenizer, for other programs."""
    data_files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The files it trains on: name -> hash."""


def make_job(model: str | None, *, device: str | None = None, **asked: Any) -> Job:
    """What to train: `model` and what was asked, as for `resolve_settings`; without a device the GPU where there is one."""
    where = device_named(device)
    settings, family = resolve_settings(model, on_gpu=where.type == "cuda", **asked)
    return own_job(settings, where) if family is None else _job(settings, family, where)


def make_job_again(
    settings: Mapping[str, Any], *, steps: int | None = None, device: str | None = None, kept: Kept | None = None
) -> Job:
    """The Job whose `settings` these are. `steps` may be changed: nothing else depends on it.

    `kept`: what the run holds of itself. With a checkpoint, weights and tokenizer come from there.
    """
    where = device_named(device)
    settings = dict(settings) | ({} if steps is None else {"steps": steps})
    missing = [name for name in IN_EVERY_JOB if name not in settings]
    if missing:
        raise BadOption(
            f"these are not the settings of a Job: {missing[0]} is missing", hint="use what Job.settings holds"
        )
    if settings["family"] is None:
        return own_job(settings, where)
    return _job(settings, find_family(settings["family"], said=settings["model"]), where, kept or Kept())


def device_named(name: str | None) -> torch.device:
    """The GPU where there is one, when None."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadOption(f"--device {name!r} is no device", hint="use cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadOption(f"--device {name}: this machine has no GPU that torch can use", hint="use cpu")
    return device


# ---- building ----


def _job(settings: dict[str, Any], family: Family, device: torch.device, kept: Kept | None = None) -> Job:
    """The Job of resolved settings."""
    parts = build(settings, family, device, kept or Kept())
    optimizer = make_optimizer(
        settings["optimizer"], parts.model, lr=settings["lr"], weight_decay=settings["weight_decay"]
    )
    scheduler = make_scheduler(
        settings["schedule"],
        optimizer,
        warmup=settings["warmup"],
        total=settings["schedule_steps"] or settings["steps"],
    )
    return Job(
        name=settings["model"], settings=settings | parts.found, model=parts.model, loss_fn=family.loss_fn,
        optimizer=optimizer, scheduler=scheduler, batches=parts.batches, compile_options=compile_options_of(settings),
        held_out=parts.held_out, edge_batches=parts.edge_batches, write_sample=parts.write_sample, files=parts.files,
        data_files=parts.data_files,
    )  # fmt: skip


def num_parameters(model: Any) -> int:
    """Those of all its modules, shared ones once."""
    return sum(p.numel() for p in {p for module in modules_of(model).values() for p in module.parameters()})


def compile_options_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: settings[key] for key in ("precision", "clip_norm", "accumulate")}


# ---- the user's own function ----


def own_job(settings: dict[str, Any], device: torch.device) -> Job:
    """What the function returned, as a Job. It places its own model; batches follow the model."""
    name, seed = settings["model"], settings["seed"]
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    model, loss_fn, optimizer, fourth = resolve.resolve(name, settings["config"])
    if not isinstance(optimizer, Optimizer):
        what = "no optimizer" if optimizer is None else f"a {type(optimizer).__name__} as its optimizer"
        raise BadOption(f"{name} returned {what}", hint="return one of torch.optim: training needs it")
    if settings["init"]:
        load_weights(open_stored(Path(settings["init"])), model)
    modules = [module for module in modules_of(model).values() if isinstance(module, nn.Module)]
    place = next((parameter.device for module in modules for parameter in module.parameters()), device)
    return job_of(settings, model, loss_fn, optimizer, fourth, place)


def job_of(
    settings: dict[str, Any], model: Any, loss_fn: Any, optimizer: Optimizer, batches: Any, place: torch.device
) -> Job:
    """A Job of the user's own objects; `batches` is a loader, or one batch."""
    many = is_iterable_of_batches(batches)
    return Job(
        name=settings["model"], settings=settings, model=model, loss_fn=loss_fn, optimizer=optimizer, scheduler=None,
        batches=LoaderBatches(batches, settings["seed"], place) if many else OneBatch(on_device(batches, place), place),
        compile_options=compile_options_of(settings),
    )  # fmt: skip
