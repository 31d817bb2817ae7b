"""The subject of a capture: the user's modules, loss and optimizer, with their tensors named once.

Whatever the user passes as `model` (one module, a dict or a tuple of them) becomes one root module here, so that every
parameter and buffer has one name; tied ones have one name and several aliases.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from wholestep.capture import optimizers
from wholestep.capture.edits import Edits
from wholestep.capture.loss_scale import LossScale
from wholestep.errors import BadLoss, BadOption, NotBuiltYet, UnsupportedModel, UnsupportedOptimizer
from wholestep.graph.mesh import ALONE, Ranks
from wholestep.graph.training_graph import Target

NONFINITE = ("allow", "skip")
"""What becomes of an update whose gradients are not finite: it is made, as torch does, or left out."""


_HOOKS, _LATE_HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


class Bundle(nn.Module):
    """Several modules under one root, without touching them."""

    def __init__(self, members: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, module in members.items():
            self.add_module(name, module)


@dataclasses.dataclass(slots=True)
class Subject:
    """What is trained, and how; the tensors are looked up live, never copied."""

    model: Any
    root: nn.Module
    loss_fn: Callable[[Any, Any], Any]
    optimizer: Optimizer | None
    precision: str = "fp32"
    accumulate: int = 1
    clip_norm: float | None = None
    nonfinite: str = "allow"
    chunked_loss: bool | None = None
    """Cross-entropy over a linear layer's output in chunks of rows: None where the logits are large, or always, or never."""
    dry: str | None = None
    """Captured to be planned, not to run, for a "cuda" or a "cpu" device: tensors need no data (device meta)."""
    parameters: dict[str, nn.Parameter] = dataclasses.field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    """Every name a tensor has -> the one it is known by here."""
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    """Where the trained parameters live."""
    loss_scale: LossScale | None = None
    """With precision "fp16"; its steps are skipped, and its buffers kept, where gradients are not finite."""
    edits: Edits = dataclasses.field(default_factory=Edits)
    """What a recipe makes of the modules while the loss is called."""
    ranks: Ranks = ALONE
    """Who runs the step; parameters and state here are the user's, whole."""
    hookless: int | None = None
    """The number that torch's next hook had when no parameter had one."""

    def gradient_hooks(self) -> list[Any]:
        """Hooks of the parameters, before and behind the sum in p.grad. Looked for only where torch has given a hook a number
        since there was none: looking at every parameter costs more than all of Dynamo's guards."""
        number = RemovableHandle.next_id
        if number == self.hookless:
            return []
        tables = [table for get in (_HOOKS, _LATE_HOOKS) for table in map(get, self.parameters.values()) if table]
        self.hookless = None if tables else number
        return [hook for table in tables for hook in table.values()]

    def refresh(self) -> None:
        """Look all tensors up again (a module may have been changed by the user)."""
        self.hookless = None
        self.parameters = dict(self.root.named_parameters())
        self.buffers = dict(self.root.named_buffers())
        first = {id(t): n for n, t in [*self.parameters.items(), *self.buffers.items()]}
        every = [
            *self.root.named_parameters(remove_duplicate=False),
            *self.root.named_buffers(remove_duplicate=False),
        ]
        self.aliases = {n: first[id(t)] for n, t in every}
        self.device = next((p.device for p in self.trained.values()), torch.device("cpu"))
        if self.dry is not None and self.device.type == "meta":
            self.device = torch.device("cpu")  # of the stand-ins; autograd cannot take fake CUDA tensors everywhere

    @property
    def target(self) -> Target:
        """What the step is captured for, here or elsewhere."""
        return Target(self.dry or self.device.type)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters the step differentiates: the optimizer's, or all that require a gradient."""
        wanted = {n: p for n, p in self.parameters.items() if p.requires_grad}
        if self.optimizer is None:
            return wanted
        members = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return {n: p for n, p in wanted.items() if id(p) in members}


def make_subject(
    model: Any,
    loss_fn: Callable[[Any, Any], Any] | None,
    optimizer: Optimizer | None,
    *,
    precision: str = "fp32",
    accumulate: int = 1,
    clip_norm: float | None = None,
    nonfinite: str = "allow",
    chunked_loss: bool | None = None,
    dry: str | None = None,
) -> Subject:
    """Check the arguments of `compile` that need no batch, and name every tensor."""
    root = root_of(model)
    if loss_fn is None:
        if not isinstance(model, nn.Module):
            raise BadLoss("loss_fn=None means model(**batch).loss, which needs a single module", hint="pass a loss_fn")
        loss_fn = model_loss
    if not callable(loss_fn):
        raise BadLoss(
            f"loss_fn is a {type(loss_fn).__name__}, not a function of (model, batch)",
            hint="pass loss_fn(model, batch) -> loss, or None for model(**batch).loss",
        )
    _refuse_criterion(loss_fn)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise UnsupportedOptimizer(
            f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer",
            hint="pass the optimizer itself, or optimizer=None to get gradients in p.grad and step it yourself",
        )
    optimizer = None if optimizer is None else optimizers.unwrapped(optimizer)
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise BadOption(f"accumulate={accumulate!r}", hint="use a whole number of micro-batches, 1 or more")
    if clip_norm is not None and not (isinstance(clip_norm, int | float) and clip_norm > 0):
        raise BadOption(f"clip_norm={clip_norm!r}", hint="use a positive number, or None for no clipping")
    if nonfinite not in NONFINITE:
        raise BadOption(f"nonfinite={nonfinite!r}", hint=f"use one of {', '.join(map(repr, NONFINITE))}")
    if nonfinite == "skip" and optimizer is None:
        raise BadOption("nonfinite='skip' without an optimizer: the update is yours", hint="look at p.grad before it")
    if not isinstance(chunked_loss, bool | None):
        raise BadOption(f"chunked_loss={chunked_loss!r}", hint="use None (by the size of the logits), True or False")
    scaled = precision == "fp16"
    nonfinite = "skip" if scaled else nonfinite
    subject = Subject(model, root, loss_fn, optimizer, precision, accumulate, clip_norm, nonfinite, chunked_loss, dry)
    subject.refresh()
    _check_optimizer_members(subject)
    if scaled:
        _check_fp16(subject)
        subject.loss_scale = LossScale()
    return subject


def _refuse_criterion(loss_fn: Any) -> None:
    """`nn.CrossEntropyLoss()`, `F.cross_entropy` and functions like them take predictions, and would be handed the model."""
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    torchs = isinstance(loss_fn, nn.modules.loss._Loss) or getattr(loss_fn, "__module__", None) == "torch.nn.functional"
    try:
        first, second = list(inspect.signature(function).parameters)[:2]
    except (TypeError, ValueError):  # no signature to be had, or fewer than two parameters
        first = second = ""
    if not torchs and not (first in _PREDICTIONS and second in _TARGETS):
        return
    name = type(loss_fn).__name__ if isinstance(loss_fn, nn.Module) else getattr(loss_fn, "__name__", "loss_fn")
    raise BadLoss(
        f"loss_fn is {name}, a criterion: it would be called as {name}(model, batch)",
        hint="wrap it: loss_fn=lambda model, batch: criterion(model(batch[0]), batch[1])",
    )


_PREDICTIONS = {
    "input",
    "inputs",
    "logits",
    "pred",
    "preds",
    "prediction",
    "predictions",
    "output",
    "outputs",
    "y_pred",
    "y_hat",
}
_TARGETS = {"target", "targets", "label", "labels", "y_true", "truth"}
"""What criteria call their first and their second parameter."""


def _check_fp16(subject: Subject) -> None:
    """Loss scaling needs the update, on float32 weights."""
    other = "use precision='bf16', which needs no loss scaling"
    if subject.optimizer is None:
        raise BadOption("precision='fp16' without an optimizer: the gradients you get would be scaled", hint=other)
    reason = optimizers.supported(subject.optimizer)
    if reason is not None:
        raise NotBuiltYet(f"precision='fp16' needs an update that can be captured: {reason}", hint=other)
    for name, parameter in subject.trained.items():
        if parameter.dtype == torch.float16:
            raise BadOption(
                f"precision='fp16' keeps float32 weights, and {name} is float16",
                hint="call model.float(): weights are cast where they are used",
            )


def model_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The default loss: what Hugging Face models return when the batch holds labels."""
    output = model(**batch) if isinstance(batch, Mapping) else model(batch)
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and not torch.compiler.is_compiling():  # traced, it is told by who reads the graph
        raise no_loss(model)
    return loss


def no_loss(model: Any) -> BadLoss:
    hint = "put labels in the batch, or pass loss_fn(model, batch)"
    return BadLoss(f"{type(model).__name__} returned no .loss", hint=hint)


def modules_of(model: Any) -> dict[str, Any]:
    """What was given as the model, each module under its name; alone it has none."""
    if isinstance(model, Mapping):
        return {str(name): module for name, module in model.items()}
    if isinstance(model, list | tuple):
        return {str(number): module for number, module in enumerate(model)}
    return {"": model}


def root_of(model: Any) -> nn.Module:
    """One module that holds all that was given."""
    if isinstance(model, nn.Module):
        return model
    members = modules_of(model)
    if members and all(isinstance(module, nn.Module) for module in members.values()):
        return Bundle(members)
    raise UnsupportedModel(
        f"model is a {type(model).__name__}", hint="pass an nn.Module, or a dict or tuple of all modules the loss reads"
    )


def _check_optimizer_members(subject: Subject) -> None:
    if subject.optimizer is None:
        return
    known = {id(p) for p in subject.parameters.values()}
    for g, group in enumerate(subject.optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if id(p) not in known:
                raise UnsupportedOptimizer(
                    f"parameter {i} of optimizer group {g}, shape {tuple(p.shape)}, is in none of the modules given",
                    hint="pass every module that is trained: model={'a': a, 'b': b}",
                )
