"""Whose memory is it: modules, optimizer and batch in, address of a storage -> Block out.

Tied weights, views and expanded tensors share one storage, which counts once. What is alive and belongs to none of
them is found through Python's garbage collector on a CPU, and by the allocator's own list on CUDA.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep.capture.subject import modules_of
from wholestep.lower.footprint.blocks import BATCH, BUFFERS, GRADIENTS, OTHER, STATE, WEIGHTS, Block


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """(address, bytes) of the storage; (0, 0) when there is none: meta and fake tensors, exotic layouts."""
    try:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":
            return 0, 0
        return storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError, TypeError):
        return 0, 0


def plain_modules(model: Any) -> dict[str, nn.Module]:
    """`modules_of`, with what torch.compile wrapped in place of its wrapper: the user's names are those within."""
    return {name: getattr(module, "_orig_mod", module) for name, module in modules_of(model).items()}


def tensors_of(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a nested batch, with its path."""
    if isinstance(value, torch.Tensor):
        yield "", value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from ((f"{key}.{path}".rstrip("."), tensor) for path, tensor in tensors_of(entry))
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from ((f"{index}.{path}".rstrip("."), tensor) for path, tensor in tensors_of(entry))
    elif hasattr(value, "__dict__"):
        yield from tensors_of(vars(value))


def named_parameters(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, module in plain_modules(model).items():
        yield from module.named_parameters(prefix=prefix)


def owned(model: Any, optimizer: Optimizer | None, batch: Any, device: torch.device) -> dict[int, Block]:
    """Address -> Block of everything that the step owns now and that is on the device."""
    found: dict[int, Block] = {}
    for category, name, why, tensor in _owned(model, optimizer, batch):
        address, count = storage_of(tensor)
        if address and tensor.device.type == device.type and address not in found:
            module = "" if category == BATCH else name.split("/")[0].rpartition(".")[0]
            found[address] = Block(
                bytes=count, category=category, name=name, module=module, why=why, shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."), scales=category == BATCH,
            )  # fmt: skip
    return found


def gradients_of(model: Any) -> dict[int, str]:
    """Address -> name of the parameter whose `.grad` lies there now."""
    return {storage_of(p.grad)[0]: name for name, p in named_parameters(model) if p.grad is not None}


def elsewhere(known: Iterable[int], device: torch.device) -> dict[int, Block]:
    """Tensors that Python still holds and that nobody named: the garbage collector's list, less the known addresses."""
    gc.collect()
    taken, found = set(known), dict[int, Block]()
    for thing in gc.get_objects():
        # isinstance asks __class__, which some proxies answer with an import
        if not issubclass(type(thing), torch.Tensor):
            continue
        address, count = storage_of(thing)
        if count and address not in taken and thing.device.type == device.type:
            taken.add(address)
            found[address] = Block(
                bytes=count, category=OTHER, why="held outside the step", shape=tuple(thing.shape),
                dtype=str(thing.dtype).removeprefix("torch."),
            )  # fmt: skip
    return found


def _owned(model: Any, optimizer: Optimizer | None, batch: Any) -> Iterator[tuple[str, str, str, torch.Tensor]]:
    names: dict[torch.Tensor, str] = {}
    for name, parameter in named_parameters(model):
        names[parameter] = name
        yield WEIGHTS, name, "a parameter", parameter
    for prefix, module in plain_modules(model).items():
        for name, buffer in module.named_buffers(prefix=prefix):
            yield BUFFERS, name, "a buffer", buffer
    for parameter, name in names.items():
        if parameter.grad is not None:
            yield GRADIENTS, name, f"gradient of {name}", parameter.grad
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield STATE, f"{names.get(parameter, '?')}/{key}", f"state of {type(optimizer).__name__}", value
    for name, tensor in tensors_of(batch):
        yield BATCH, name or "batch", "the batch", tensor
