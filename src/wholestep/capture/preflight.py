"""What is refused before a step is captured, because it would go wrong in silence; what is set aside for a reference.

A wrapper that does its work in hooks (DDP's all-reduce), a scaler, an optimizer that calls back: each is recognised here by
name and is an error that says what to use.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.utils._pytree import tree_map

from wholestep.capture.front.unguardable import refuse_hooked_accumulators
from wholestep.capture.gpu_autocast import gpu_autocast
from wholestep.capture.optimizers import needs_closure
from wholestep.capture.subject import Subject
from wholestep.errors import BadLoss, CaptureRefused, UnsupportedModel, UnsupportedOptimizer
from wholestep.graph.notes import Note
from wholestep.ops.updates import update_of

_WRAPPERS = {
    "DistributedDataParallel": "its gradient all-reduce runs in hooks that a captured step would lose",
    "FullyShardedDataParallel": "its parameters are gathered in hooks that a captured step would lose",
    "DataParallel": "it copies the model to every GPU inside forward",
}


def refuse_unsupported(subject: Subject) -> None:
    """Raise a named error for a model or optimizer that would train differently without anyone noticing."""
    if torch.is_inference_mode_enabled():
        raise UnsupportedModel("inside of torch.inference_mode() nothing can be trained", hint="compile outside of it")
    for path, module in subject.root.named_modules():
        _refuse_wrapper(path, module)
    for name, p in [*subject.parameters.items(), *subject.buffers.items()]:
        _refuse_tensor(name, p, dry=subject.dry is not None)
    if subject.optimizer is not None:  # without one, the caller reduces p.grad before the update
        refuse_world()
    if subject.optimizer is not None and needs_closure(subject.optimizer):
        raise UnsupportedOptimizer(
            f"{type(subject.optimizer).__name__} re-evaluates the loss through a closure inside its step",
            hint="use optimizer=None: Wholestep fills p.grad, and your closure calls the step",
        )
    _refuse_scaler(subject.loss_fn)
    if not subject.trained:
        raise UnsupportedOptimizer(
            "nothing to train: no parameter of the optimizer requires a gradient",
            hint="check requires_grad and what the optimizer was given",
        )
    _refuse_post_accumulate_hooks(subject)


def refuse_in_parts(subject: Subject) -> None:
    """What cannot be done with one part of a parameter, without the others."""
    cuts = subject.ranks.cuts
    if not cuts:
        return
    for name, parameter in subject.trained.items():
        if name in cuts and parameter._backward_hooks:
            hint = "take the hook off, or leave the parameter whole"
            raise UnsupportedModel(f"{name} is cut ({cuts[name].line}), and a hook on it would see a part", hint=hint)
    update = None if subject.optimizer is None else update_of(subject.optimizer)
    if update is None or update.elementwise:
        return
    members = {id(p) for group in subject.optimizer.param_groups for p in group["params"]}  # type: ignore[union-attr]
    for name in cuts:
        if id(subject.parameters[name]) in members:
            kind = type(subject.optimizer).__name__
            hint = "leave the parameter whole, or use an optimizer that updates every element by itself, such as AdamW"
            raise UnsupportedOptimizer(
                f"{kind} needs whole parameters, and {name} is cut ({cuts[name].line})", hint=hint
            )


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
    if tensor.is_inference():
        what = f"{name} was made inside of torch.inference_mode(), so it has no gradient"
        raise UnsupportedModel(what, hint="make the model outside of it")


def refuse_world() -> None:
    """An error where this process is one of several, whether they know of each other yet or not."""
    distributed = torch.distributed
    initialised = distributed.is_available() and distributed.is_initialized()
    said = os.environ.get(
        "WORLD_SIZE", ""
    )  # set by torchrun and its like; a single process may be told of a world of one
    size = distributed.get_world_size() if initialised else int(said) if said.isdecimal() else 1
    if size > 1:
        why = (
            "torch.distributed is initialised"
            if initialised
            else f"WORLD_SIZE={said}, and torch.distributed is not initialised"
        )
        raise UnsupportedModel(
            f"this process is one of {size} ({why}): a captured step would train each replica alone",
            hint="the distributed engine is not built yet; start one process, use torch's own loop, or optimizer=None and "
            "reduce p.grad yourself",
        )


def _refuse_scaler(loss_fn: Any) -> None:
    """A loss that names a GradScaler scales itself, and would be scaled twice or not unscaled."""
    function = inspect.unwrap(getattr(loss_fn, "__func__", loss_fn))
    code = getattr(function, "__code__", None)
    if code is None or "scale" not in code.co_names:
        return
    cells = [cell for cell in function.__closure__ or () if cell != types.CellType()]
    held = [cell.cell_contents for cell in cells] + [function.__globals__.get(name) for name in code.co_names]
    if any(isinstance(value, torch.amp.GradScaler) for value in held):
        raise BadLoss(
            "loss_fn scales its loss with a GradScaler", hint="return the unscaled loss; precision='fp16' scales it"
        )


def _refuse_post_accumulate_hooks(subject: Subject) -> None:
    for name, p in subject.trained.items():
        if getattr(p, "_post_accumulate_grad_hooks", None):
            raise CaptureRefused(
                f"{name} has a post-accumulate-grad hook, which runs on p.grad in the middle of backward"
            )
    if subject.dry is None:
        refuse_hooked_accumulators(subject.trained.items())


def notes_on(subject: Subject) -> list[Note]:
    """What is unusual about the modules and deserves a line in the report."""
    liger = [p for p, m in subject.root.named_modules() if type(m).__module__.startswith("liger_kernel")]
    return [Note("capture", f"Liger modules kept as they are: {_some(liger)}")] if liger else []


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextlib.contextmanager
def set_aside(subject: Subject) -> Iterator[None]:
    """While the user's own code runs as a reference: as it was written, no recompute, no nested compiler, torch.cond on plain
    tensors."""
    flagged = [m for m in subject.root.modules() if getattr(m, "gradient_checkpointing", None) is True]
    compiled = [m for m in subject.root.modules() if getattr(m, "_compiled_call_impl", None) is not None]
    with contextlib.ExitStack() as stack:
        stack.enter_context(subject.edits.set_aside())
        # recomputed in the backward, a random number would be drawn without its key
        stack.enter_context(_attributes(flagged, "gradient_checkpointing", False))
        stack.enter_context(_replaced(torch_checkpoint, **_direct(subject.root)))
        stack.enter_context(_attributes(compiled, "_compiled_call_impl", None))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_replaced(torch, cond=_cond))
        yield


def _direct(module: nn.Module) -> dict[str, Any]:
    """In place of both kinds of checkpoint: the function itself, and once more for the statistics of `module` that it writes, which
    eager computes twice."""

    def versions() -> list[int]:
        return [buffer._version for buffer in module.buffers() if not buffer.is_inference()]

    class Direct:
        @staticmethod
        def apply(function: Callable, preserve: bool, *args: Any) -> Any:
            before = versions()
            result = function(*args)
            if versions() != before:
                with torch.no_grad():
                    function(*args)
            return result

    def generator(
        function: Callable,
        preserve: Any,
        context: Any,
        check: Any,
        debug: Any,
        early_stop: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[None]:
        before = versions()
        yield
        if versions() != before and torch.is_grad_enabled():
            with torch.no_grad():
                function(*args, **kwargs)

    return {"CheckpointFunction": Direct, "_checkpoint_without_reentrant_generator": generator}


def _cond(pred: Any, true_fn: Callable, false_fn: Callable, operands: Any = ()) -> Any:
    """Both branches run and one is selected: as in torch, the other gets zero gradients."""
    chosen = torch.as_tensor(pred)
    return tree_map(lambda a, b: torch.where(chosen, a, b), true_fn(*operands), false_fn(*operands))


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
    return torch.autocast(subject.device.type, dtype, cache_enabled=False)
