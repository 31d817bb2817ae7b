"""Checkpoints from any training loop: `save` writes one folder, `load` puts everything back, bit for bit.

In: a folder, the live objects, and two values of the user's (where the data stood, the configuration).
Out: `folder/step-000123/`, which holds
    model.safetensors      model.state_dict(); tied tensors once, their other names in the metadata under "aliases"
    optimizer.safetensors  the tensors of optimizer.state_dict()
    rng.safetensors        torch's generators
    checkpoint.json        all that is no tensor, and the size of each file
    config.json, tokenizer.json ...   for other programs, where `files` gives them
    checkpoint.sha256      a hash of each file; written last, compared on loading
Nothing is pickled: safetensors and JSON can be read from anywhere, and reading them runs no code.

A folder has one writer. It is written under a temporary name, synced and renamed, so a run killed at any moment leaves the
checkpoints it had, or one more. Names that begin with a dot are unfinished, and are removed by the next `save`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wholestep.capture.optimizers import UNUSED
from wholestep.errors import BadCheckpoint, BadOption, WholestepWarning
from wholestep.lower.footprint.owners import plain_modules
from wholestep.options import is_whole
from wholestep.passes.stream_state import place_of
from wholestep.runtime.step import Step
from wholestep.tiers.arena import pinned_like
from wholestep.train.checkpoint_files import (
    Stored,
    checkpoints,
    clean,
    discard,
    folder_name,
    open_stored,
    read_tensors,
    telling_what_the_disk_refused,
    write,
)
from wholestep.train.encoding import decode, encode, savable


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """What `load` found."""

    number: int
    """Steps taken when it was saved."""
    data: Any
    config: Any
    path: Path


def save(
    folder: str | os.PathLike[str],
    *,
    model: Any,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    step: Step | int | None = None,
    data: Any = None,
    config: Any = None,
    files: Mapping[str, bytes] | None = None,
    keep: int | None = 3,
) -> Path:
    """Write `folder/step-<number>/`, whole or not at all, and return its path.

    Args:
        folder: where this run keeps its checkpoints; made when absent.
        model: a Module, or a dict or tuple of Modules.
        optimizer, scheduler: saved through their `state_dict()`.
        step: the Step, whose count is the checkpoint's number; in a loop without one, the number itself;
            None takes the number after the newest.
        data: where the data stood, as any JSON value; `load` returns it.
        config: any JSON value; `load` returns it.
        files: name -> content of further files, for other programs: a configuration, a tokenizer.
        keep: how many of the newest stay, once the new one is complete; None keeps all.
    """
    if keep is not None and (not is_whole(keep) or keep < 1):
        raise BadOption(f"keep={keep!r}", hint="use a whole number, 1 or more, or None to keep all")
    if isinstance(step, Step):
        step.refuse_unsound()
    elif step is not None and (not is_whole(step) or step < 0):
        raise BadOption(f"step={step!r}", hint="give the Step, or the number of steps taken, 0 or more")
    _refuse_other_kinds("state_dict", optimizer, scheduler)
    for name, content in (files or {}).items():
        if not isinstance(content, bytes) or name in (".", "..") or Path(name).name != name:
            kind = f"a {type(content).__name__} for {name!r}"
            raise BadOption(f"files={{...}} with {kind}", hint="give bytes under the name of a file, without folders")
    root = Path(folder)
    tensors, facts = _gather(model, optimizer, scheduler, step, data, config)
    with telling_what_the_disk_refused(root):
        root.mkdir(parents=True, exist_ok=True)
        clean(root)
        present = [number for number, _ in checkpoints(root)]
        number = _number(step, present)
        if present and number < present[0]:
            text = f"step {number} is saved beside {folder_name(present[0])}, which `load({str(root)!r})` takes as the newest"
            warnings.warn(text + "; remove that one, or save to another folder", WholestepWarning, stacklevel=2)
        path = write(root, number, tensors, facts, files or {})
    for old, other in checkpoints(root)[keep:] if keep is not None else ():
        if old != number:
            discard(other)
    return path


def load(
    folder: str | os.PathLike[str],
    *,
    model: Any,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    step: Step | None = None,
) -> Loaded:
    """Restore the newest checkpoint below `folder`, or the one that `folder` is.

    Model, optimizer, scheduler and step are changed in place, and the random generators of torch, Python and numpy are set;
    nothing is changed when the checkpoint does not fit or is damaged. The error then names the newest that is good.
    """
    return restore(open_stored(Path(folder)), model=model, optimizer=optimizer, scheduler=scheduler, step=step)


def restore(
    stored: Stored, *, model: Any, optimizer: Optimizer | None = None, scheduler: Any = None, step: Step | None = None
) -> Loaded:
    """`load`, of a checkpoint that was opened and so found sound."""
    _refuse_other_kinds("load_state_dict", optimizer, scheduler)
    if step is not None and not isinstance(step, Step):
        raise BadOption(f"step={step!r}", hint="give the Step that goes on, or leave it out")
    plan = _plan_model(stored, model)
    plan_optimizer = None if optimizer is None else _plan_optimizer(stored, optimizer)
    scheduler_state = None if scheduler is None else stored.part("scheduler")
    for module, state in plan.states:
        module.load_state_dict(state, strict=True)
    if optimizer is not None and plan_optimizer is not None:
        _restore_optimizer(optimizer, plan_optimizer, same_dtypes=not plan.cast, step=step)
    if scheduler is not None:
        scheduler.load_state_dict(scheduler_state)
    if plan.cast:
        text = f"{stored.path.name} is converted on loading, {plan.cast[0]}: training goes on, but not bit for bit"
        warnings.warn(text, WholestepWarning, stacklevel=3)
    if step is not None:
        _restore_step(stored, step)
    _restore_generators(stored)
    return Loaded(stored.number, stored.part("data"), stored.part("config"), stored.path)


def load_weights(stored: Stored, model: Any) -> None:
    """The weights alone, all of them; what is in one and not in the other is an error by name."""
    for module, state in _plan_model(stored, model).states:
        module.load_state_dict(state, strict=True)


# ---- gathering what is saved ----


def _gather(
    model: Any, optimizer: Optimizer | None, scheduler: Any, step: Step | int | None, data: Any, config: Any
) -> tuple[dict[str, tuple[dict[str, Tensor], dict[str, str]]], dict[str, Any]]:
    """(file -> its tensors and metadata, the facts for JSON). Refusals come from here, before the disk is touched."""
    weights, aliases = model_tensors(model)
    files = {"model.safetensors": (weights, {"format": "pt", "aliases": json.dumps(aliases)})}
    facts: dict[str, Any] = {"torch": torch.__version__}
    if optimizer is not None:
        state = optimizer.state_dict()
        tensors: dict[str, Tensor] = {}
        facts["optimizer"] = encode({**state, "state": _used_state(state["state"])}, "optimizer", tensors)
        files["optimizer.safetensors"] = (tensors, {"format": "pt"})
    generators, facts["rng"] = _generators()
    files["rng.safetensors"] = (generators, {"format": "pt"})
    if scheduler is not None:
        facts["scheduler"] = encode(scheduler.state_dict(), "scheduler")
    if isinstance(step, Step):
        facts["step"] = step.state_dict()
    return files, facts | {"data": encode(data, "data"), "config": encode(config, "config")}


def _used_state(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Without buffers made before their first step: torch would have none yet, and its first step differs (dampening)."""
    return {
        index: {key: value for key, value in entry.items() if not hasattr(value, UNUSED)}
        if isinstance(entry, dict)
        else entry
        for index, entry in state.items()
    }


def _modules(model: Any) -> dict[str, nn.Module]:
    """Prefix of the keys -> module. What torch.compile wrapped is saved under the names of the plain module."""
    named = plain_modules(model)
    for name, module in named.items():
        if not isinstance(module, nn.Module):
            what = f"model holds a {type(module).__name__}"
            raise BadCheckpoint(what, where=name or None, hint="give a Module or a dict of Modules")
    return {f"{name}." if name else "": module for name, module in named.items()}


def model_tensors(model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to write, and for every further name of one of them that it has."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_name: dict[tuple, str] = {}
    for prefix, module in _modules(model).items():
        for key, value in module.state_dict().items():
            name = prefix + key
            if name in tensors or name in aliases:
                raise BadCheckpoint(f"two tensors would be saved as {name!r}", hint="give the modules other names")
            if not isinstance(value, Tensor):
                hint = "have get_extra_state return a tensor, or save it yourself through data="
                raise BadCheckpoint(
                    f"{name!r} of model.state_dict() is a {type(value).__name__}, not a tensor", hint=hint
                )
            place = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
            if value.numel() and place in first_name:
                aliases[name] = first_name[place]
                continue
            first_name[place] = name
            tensors[name] = savable(value, name)
    return tensors, aliases


def _generators() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The states of torch's generators as tensors, of Python's and numpy's as JSON."""
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors |= {f"cuda:{i}": state.cpu() for i, state in enumerate(torch.cuda.get_rng_state_all())}
    numpy_state = json.loads(json.dumps(np.random.get_state(legacy=False), default=lambda array: array.tolist()))
    return tensors, {"python": encode(random.getstate(), "random.getstate()"), "numpy": numpy_state}


# ---- writing ----


def _number(step: Step | int | None, present: list[int]) -> int:
    if isinstance(step, Step):
        return step.count
    if step is None:
        return present[0] + 1 if present else 0
    return int(step)


def _refuse_other_kinds(method: str, optimizer: Any, scheduler: Any) -> None:
    for name, value, kind in (("optimizer", optimizer, "Optimizer"), ("scheduler", scheduler, "scheduler")):
        if value is not None and not hasattr(value, method):
            raise BadOption(f"{name}={value!r}", hint=f"give the {kind} itself")


# ---- restoring ----


@dataclasses.dataclass(frozen=True, slots=True)
class _ModelPlan:
    """What each module will be given, found to fit."""

    states: list[tuple[nn.Module, dict[str, Tensor]]]
    cast: list[str]
    """Tensors whose dtype will change."""


def _plan_model(stored: Stored, model: Any) -> _ModelPlan:
    tensors, metadata = read_tensors(stored.path / "model.safetensors")
    tensors |= {name: tensors[target] for name, target in json.loads(metadata["aliases"]).items()}
    modules = _modules(model)
    expected = {prefix + key: value for prefix, module in modules.items() for key, value in module.state_dict().items()}
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected]
    other = [
        name for name, value in expected.items()
        if name in tensors and _shape(value) != _shape(tensors[name]) and not name.endswith("_extra_state")
    ]  # fmt: skip
    problems = _misfits("the model has {} {}, the checkpoint has not", missing, lambda name: _shape(expected[name]))
    problems += _misfits("the checkpoint has {} {}, the model has not", unexpected, lambda name: _shape(tensors[name]))
    problems += _misfits(
        "{} is {}",
        other,
        lambda name: f"{_shape(tensors[name])} in the checkpoint, {_shape(expected[name])} in the model",
    )
    if problems:
        what = f"{stored.path.name} does not fit the model: {'; '.join(problems)}"
        raise BadCheckpoint(what, hint="build the model it was saved from")
    states = [
        (module, {key: tensors[prefix + key] for key in module.state_dict()}) for prefix, module in modules.items()
    ]
    cast = [
        f"{name} from {tensors[name].dtype} to {value.dtype}" for name, value in expected.items()
        if isinstance(value, Tensor) and value.dtype != tensors[name].dtype
    ]  # fmt: skip
    return _ModelPlan(states, cast)


def _misfits(text: str, names: list[str], detail: Callable[[str], str]) -> list[str]:
    """One sentence on the first of `names`, and how many more there are."""
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return [text.format(repr(names[0]), detail(names[0])) + more] if names else []


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _plan_optimizer(stored: Stored, optimizer: Optimizer) -> dict[str, Any]:
    state = stored.part("optimizer", stored.tensors("optimizer.safetensors"))
    saved, live = (
        [len(group["params"]) for group in groups] for groups in (state["param_groups"], optimizer.param_groups)
    )
    if saved != live:
        what = f"{stored.path.name} does not fit the optimizer: parameters per group are {saved} in the checkpoint, {live} here"
        raise BadCheckpoint(what, hint="build the optimizer as it was when it was saved")
    for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        lacking = [name for name in own if name not in group and name not in _FILLED_IN]
        if lacking:
            names = ", ".join(sorted(set(group) - {"params"}))
            what = f"{type(optimizer).__name__} has {lacking[0]!r}, the one that was saved {names}"
            raise BadCheckpoint(
                f"{stored.path.name} does not fit the optimizer: {what}", hint="build the one that was saved"
            )
    return state


_FILLED_IN = {
    "amsgrad", "nesterov", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay", "initial_lr",
}  # fmt: skip
"""What later versions of torch and schedulers add to groups, and fill in where it is absent."""


def _restore_optimizer(optimizer: Optimizer, state: dict[str, Any], same_dtypes: bool, step: Step | None) -> None:
    """Through `load_state_dict`, which casts state to its parameter's dtype; state that had another keeps its own. What the step
    keeps in the host's memory does not pass through the card, which may have no room for it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    apart = _with_state_on_host(step)
    waiting: dict[Any, dict[str, Tensor]] = {}
    given = dict(state["state"])
    for index, parameter in zip(indices, parameters):
        if id(parameter) in apart and index in given:
            large = {key: value for key, value in given[index].items() if isinstance(value, Tensor) and value.dim()}
            waiting[parameter] = large
            given[index] = {key: value for key, value in given[index].items() if key not in large}
    optimizer.load_state_dict({**state, "state": given})
    for parameter, large in waiting.items():
        for key, value in large.items():
            kept = value if same_dtypes else value.to(parameter.dtype)
            optimizer.state[parameter][key] = pinned_like(kept).copy_(kept) if parameter.is_cuda else kept.clone()
    if not same_dtypes:
        return
    for index, parameter in zip(indices, parameters):
        live = optimizer.state.get(parameter, {})
        for key, value in given.get(index, {}).items():
            if isinstance(value, Tensor) and isinstance(live.get(key), Tensor) and live[key].dtype != value.dtype:
                live[key] = value.to(live[key].device)


def _with_state_on_host(step: Step | None) -> set[int]:
    """Ids of the parameters whose state the plan leaves in the host's memory."""
    if step is None or step.plan is None:
        return set()
    patterns = step.plan.state
    return {id(p) for name, p in step.subject.parameters.items() if place_of(name, patterns) == "host"}


def _restore_step(stored: Stored, step: Step) -> None:
    if "step" in stored.facts:
        step.load_state_dict(stored.facts["step"])
        return
    text = f"{stored.path.name} was saved without a Step: dropout and random numbers go on from this Step's own seed"
    warnings.warn(text, WholestepWarning, stacklevel=3)
    step.load_state_dict({"seed": step.seed, "count": stored.number})


def _restore_generators(stored: Stored) -> None:
    tensors = stored.tensors("rng.safetensors")
    torch.set_rng_state(tensors.pop("cpu").clone())
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for name, state in tensors.items():
        index = int(name.removeprefix("cuda:"))
        if index < devices:
            torch.cuda.set_rng_state(state.clone(), index)
        else:
            text = f"{stored.path.name} holds the random state of {name}, which this machine does not have"
            warnings.warn(text, WholestepWarning, stacklevel=3)
    random.setstate(decode(stored.facts["rng"]["python"]))
    np.random.set_state(stored.facts["rng"]["numpy"])


__all__ = ["Loaded", "load", "load_weights", "restore", "save"]
