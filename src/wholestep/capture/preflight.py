"""What is refused or set aside before a step is traced: things that would go wrong in silence.

make_fx records no guards and runs Python once. A wrapper that does its work in hooks (DDP's all-reduce), a scaler, a
checkpoint, a compiled submodule: each is recognised here by name and is either an error that says what to use, or is set
aside for the trace and said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.utils._pytree import tree_map

from wholestep import compat
from wholestep.capture.gpu_autocast import gpu_autocast
from wholestep.capture.subject import Subject
from wholestep.errors import BadLoss, BadOption, CaptureRefused, UnsupportedModel, UnsupportedOptimizer

_WRAPPERS = {
    "DistributedDataParallel": "its gradient all-reduce runs in hooks that a captured step would lose",
    "FullyShardedDataParallel": "its parameters are gathered in hooks that a captured step would lose",
    "DataParallel": "it copies the model to every GPU inside forward",
}


def refuse_unsupported(subject: Subject) -> None:
    """Raise a named error for a model or optimizer that would train differently without anyone noticing."""
    for path, module in subject.root.named_modules():
        _refuse_wrapper(path, module)
    for name, p in [*subject.parameters.items(), *subject.buffers.items()]:
        _refuse_tensor(name, p, dry=subject.dry is not None)
    if subject.optimizer is not None:  # without one, the caller reduces p.grad before the update
        _refuse_world()
    if isinstance(subject.optimizer, torch.optim.LBFGS):
        raise UnsupportedOptimizer(
            "LBFGS re-evaluates the loss through a closure inside its step",
            hint="use optimizer=None: Wholestep fills p.grad, and your closure calls the step",
        )
    if not subject.trained:
        raise UnsupportedOptimizer(
            "nothing to train: no parameter of the optimizer requires a gradient",
            hint="check requires_grad and what the optimizer was given",
        )
    _refuse_post_accumulate_hooks(subject)


def _refuse_wrapper(path: str, module: nn.Module) -> None:
    for cls in type(module).__mro__:
        if cls.__name__ in _WRAPPERS and cls.__module__.startswith("torch."):
            raise UnsupportedModel(
                f"{path or 'the model'} is wrapped in {cls.__name__}: {_WRAPPERS[cls.__name__]}",
                hint="pass the bare module; for several GPUs keep torch's own loop until the distributed engine exists",
            )
        if cls.__name__ == "_FabricModule":
            raise UnsupportedModel(
                f"{path or 'the model'} is wrapped by Lightning Fabric, which casts around its forward",
                hint="pass model.module and optimizer.optimizer, and the precision to wholestep.compile",
            )
        if cls.__name__ == "FSDPModule":
            raise UnsupportedModel(
                f"{path or 'the model'} went through fully_shard (FSDP2): its gathers run in hooks",
                hint="pass the bare module, before fully_shard",
            )


def _refuse_tensor(name: str, tensor: torch.Tensor, *, dry: bool) -> None:
    if type(tensor).__name__ == "DTensor" or type(getattr(tensor, "data", tensor)).__name__ == "DTensor":
        raise UnsupportedModel(f"{name} is a DTensor", hint="pass a model with plain parameters")
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        raise UnsupportedModel(f"{name} has no shape yet (lazy module)", hint="run one forward on a real batch first")
    if tensor.device.type == "meta" and not dry:
        raise UnsupportedModel(f"{name} is on the meta device", hint="materialise it with to_empty() and initialise it")


def _refuse_world() -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise UnsupportedModel(
            f"this process is one of {distributed.get_world_size()} (torch.distributed is initialised): "
            "a captured step would train each replica alone",
            hint="the distributed engine is not built yet; use torch's own loop, or optimizer=None and reduce p.grad yourself",
        )


def _refuse_post_accumulate_hooks(subject: Subject) -> None:
    for name, p in subject.trained.items():
        if getattr(p, "_post_accumulate_grad_hooks", None):
            raise CaptureRefused(
                f"{name} has a post-accumulate-grad hook, which runs on p.grad in the middle of backward"
            )


def notes_on(subject: Subject) -> list[str]:
    """What is unusual about the modules and deserves a line in the report."""
    notes = []
    hooked = [p or type(m).__name__ for p, m in subject.root.named_modules() if m._forward_hooks or m._forward_pre_hooks]
    if hooked:
        notes.append(f"forward hooks of {_some(hooked)} ran once, while tracing; their Python effects do not repeat")
    liger = [p for p, m in subject.root.named_modules() if type(m).__module__.startswith("liger_kernel")]
    if liger:
        notes.append(f"Liger modules kept as they are: {_some(liger)}")
    return notes


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class Surroundings:
    """What the loss function met while it ran: filled by the patches of `set_aside`."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


@contextlib.contextmanager
def set_aside(subject: Subject) -> Iterator[Surroundings]:
    """While the user's code runs for the trace: no recompute, no scaler, no nested compiler, no second autocast."""
    seen = Surroundings()
    with contextlib.ExitStack() as stack:
        for manager in (_no_checkpointing, _no_scaler, _no_nested_compile, _watched_autocast, _cond_through_dynamo):
            stack.enter_context(manager(subject, seen))
        yield seen


@contextlib.contextmanager
def _no_checkpointing(subject: Subject, seen: Surroundings) -> Iterator[None]:
    """Burned-in recomputation would be paid twice, by the user's checkpoints and by our planner."""
    flagged = [m for m in subject.root.modules() if getattr(m, "gradient_checkpointing", None) is True]
    said = "activation checkpointing set aside: the whole step is planned by Wholestep"

    class Direct:
        @staticmethod
        def apply(function: Callable, preserve: bool, *args: Any) -> Any:
            seen.note(said)
            return function(*args)

    def direct_generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        seen.note(said)
        yield

    if flagged:
        seen.note(said)
    with _attributes(flagged, "gradient_checkpointing", False), _replaced(
        torch_checkpoint, CheckpointFunction=Direct, _checkpoint_without_reentrant_generator=direct_generator
    ):
        yield


@contextlib.contextmanager
def _no_scaler(subject: Subject, seen: Surroundings) -> Iterator[None]:
    def scale(self: Any, outputs: Any) -> Any:
        raise BadLoss("loss_fn scales its loss with a GradScaler", hint="return the unscaled loss; precision='fp16' scales it")

    with _replaced(torch.amp.GradScaler, scale=scale):
        yield


@contextlib.contextmanager
def _no_nested_compile(subject: Subject, seen: Surroundings) -> Iterator[None]:
    compiled = [m for m in subject.root.modules() if getattr(m, "_compiled_call_impl", None) is not None]
    if compiled or any(type(m).__name__ == "OptimizedModule" for m in subject.root.modules()):
        seen.note("torch.compile on the model (or a part) set aside: its code is traced as plain Python")
    with _attributes(compiled, "_compiled_call_impl", None), torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _watched_autocast(subject: Subject, seen: Surroundings) -> Iterator[None]:
    enter = torch.autocast.__enter__

    def watched(self: torch.autocast) -> Any:
        if subject.precision != "fp32" and self._enabled and not getattr(self, "_wholestep", False):
            raise BadOption(
                f"precision={subject.precision!r} and loss_fn enters torch.autocast itself",
                hint="use one of the two: drop the autocast, or leave precision='fp32'",
            )
        return enter(self)

    with _replaced(torch.autocast, __enter__=watched):
        yield


@contextlib.contextmanager
def _cond_through_dynamo(subject: Subject, seen: Surroundings) -> Iterator[None]:
    """torch.cond compiles itself, which is off here; traced as it is, it would not differentiate what its branches close over.

    On real tensors (the eager reference) both branches run and one is selected: as in torch, the other gets zero gradients.
    """

    def cond(pred: Any, true_fn: Callable, false_fn: Callable, operands: Any = ()) -> Any:
        if compat.is_fake(pred):
            raise NotImplementedError("torch.cond is captured through Dynamo")
        chosen = torch.as_tensor(pred)
        return tree_map(lambda a, b: torch.where(chosen, a, b), true_fn(*operands), false_fn(*operands))

    with _replaced(torch, cond=cond):
        yield


@contextlib.contextmanager
def _attributes(owners: list[Any], name: str, value: Any) -> Iterator[None]:
    kept = [getattr(owner, name) for owner in owners]
    for owner in owners:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, old in zip(owners, kept, strict=True):
            setattr(owner, name, old)


@contextlib.contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    kept = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)


def autocast_for(subject: Subject) -> Any:
    """The autocast context that `precision` asks for; weights are cast where used, not through autocast's cache."""
    return _gpu_autocast(subject) if subject.dry == "cuda" and subject.precision != "fp32" else _plain_autocast(subject)


@contextlib.contextmanager
def _gpu_autocast(subject: Subject) -> Iterator[None]:
    with gpu_autocast(), _plain_autocast(subject):
        yield


def _plain_autocast(subject: Subject) -> Any:
    if subject.precision == "fp32":
        return contextlib.nullcontext()
    dtype = torch.float16 if subject.precision == "fp16" else torch.bfloat16
    context = torch.autocast(subject.device.type, dtype, cache_enabled=False)
    context._wholestep = True  # type: ignore[attr-defined]
    return context
