"""The operator of an update, from two functions: what the optimizer itself calls, and the same for a GPU.

In: names of states, numbers and flags; `eager`, the optimizer's own code; for a GPU either `arithmetic`, which reads its numbers
from 0-d tensors, or `launch`, which starts one kernel; what else its record says. Out: the record, an `Update`, with `ws::<name>`
and its in-place twin:

    name(params, grads, <one list per state>, hyper, scale, <flags>, implementation) -> new params and states, concatenated

On the CPU `eager` runs on the tensors themselves, hence its very bits. On a GPU no value may travel to the host (the step is
recorded as a CUDA graph), so `arithmetic` runs, in float32 (float64 for float64 parameters), a few parameters at a time: what it
makes in passing stays small. A `scale` below zero leaves everything as it was: chosen by a select there, by a question here.
Gradients are of their parameters' dtypes, or narrower ones that are widened as they are read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wholestep.ops import multi_tensor
from wholestep.ops.updates.update import Update
from wholestep.ops.wide import wide_dtype

Lists: TypeAlias = list[list[Tensor]]
Eager: TypeAlias = Callable[[list[Tensor], list[Tensor], Lists, Mapping[str, float], Mapping[str, Any]], None]
"""(params, grads, states, numbers, flags): in place; gradients are only read. Flags hold the `implementation`."""
Arithmetic: TypeAlias = Callable[[list[Tensor], list[Tensor], Lists, Mapping[str, Tensor], Mapping[str, Any]], None]
"""The same, where numbers are 0-d float64 tensors beside the parameters. All tensors of a call are of one dtype."""
Launch: TypeAlias = Callable[[list[Tensor], list[Tensor], Lists, Tensor, Tensor | None, Mapping[str, Any]], None]
"""(params, grads, the states that are kept, hyper, scale, flags): in place, by one Triton kernel. Without Triton the optimizer's
own code runs, which waits for the GPU."""

BYTES_AT_ONCE = 64 << 20
"""Of parameters on a GPU: copies and intermediate values of so many exist at a time."""
LIBRARY = torch.library.Library("ws", "FRAGMENT")


def define_update(
    name: str,
    *,
    states: tuple[str, ...],
    numbers: tuple[str, ...],
    flags: Mapping[str, str],
    eager: Eager,
    arithmetic: Arithmetic | None = None,
    launch: Launch | None = None,
    **facts: Any,
) -> Update:
    """`flags`: name -> type in the schema, beside the implementation. `facts`: the other fields of the `Update`."""
    lists = "".join(f", Tensor[] {key}s" for key in states)
    fixed = "".join(f", {kind} {key}" for key, kind in flags.items())
    schema = f"(Tensor[] params, Tensor[] grads{lists}, Tensor hyper, Tensor? scale{fixed}, str implementation)"
    LIBRARY.define(f"{name}{schema} -> Tensor[]")
    count = len(states)

    @torch.no_grad()
    def in_place(params: list[Tensor], grads: list[Tensor], *rest: Any) -> None:
        kept, (hyper, scale, *chosen) = [list(kept) for kept in rest[:count]], rest[count:]
        named = dict(zip((*flags, "implementation"), chosen, strict=True))
        on_gpu = bool(params) and params[0].is_cuda
        if on_gpu or named["implementation"] == "fused":  # kernels know real numbers
            params, grads, *kept = map(multi_tensor.as_real, (params, grads, *kept))
        if on_gpu and launch and multi_tensor.triton_reason() is None:
            launch(params, grads, [tensors for tensors in kept if tensors], hyper, scale, named)
        elif on_gpu and arithmetic:
            values = dict(zip(numbers, hyper.unbind(), strict=True))
            update_on_device(arithmetic, list(params), list(grads), kept, values, scale, named)
        elif params and not multi_tensor.skipped(scale):
            values = dict(zip(numbers, hyper.tolist(), strict=True))
            _update_on_host(eager, list(params), list(grads), kept, values, multi_tensor.factor(scale), named)

    def fake(params: list[Tensor], grads: list[Tensor], *rest: Any) -> list[Tensor]:
        kept = {f"{key}s": tensors for key, tensors in zip(states, rest, strict=False) if tensors}
        multi_tensor.check_lengths(params, {"grads": grads, **kept}, f"ws::{name}")
        return [torch.empty_like(t) for tensors in (params, *kept.values()) for t in tensors]

    in_place.__name__ = in_place.__qualname__ = f"{name}_in_place"
    torch.library.register_fake(f"ws::{name}", fake, lib=LIBRARY)
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, functools.partial(multi_tensor.on_copies, in_place, count), device)
    operator = getattr(torch.ops.ws, name).default
    return Update(kind=name, operator=operator, in_place=in_place, states=states, numbers=numbers, **facts)


def _update_on_host(
    eager: Eager,
    params: list[Tensor],
    grads: list[Tensor],
    states: Lists,
    numbers: Mapping[str, float],
    scale: Tensor | None,
    flags: Mapping[str, Any],
) -> None:
    if flags["implementation"] == "fused":
        flags = {**flags, "implementation": multi_tensor.fused_or_single(params, [kept for kept in states if kept])}
    for part in multi_tensor.parts_to_copy(params, grads, scale):
        scaled = [multi_tensor.scaled_grad(g, p, scale) for g, p in zip(grads[part], params[part], strict=True)]
        eager(params[part], scaled, [kept[part] for kept in states], numbers, flags)


@torch.no_grad()
def update_on_device(
    arithmetic: Arithmetic,
    params: list[Tensor],
    grads: list[Tensor],
    states: Lists,
    numbers: Mapping[str, Tensor],
    scale: Tensor | None,
    flags: Mapping[str, Any],
) -> None:
    """In place, without a question to the host."""
    for members in _parts(params):
        old = [[tensors[i] for i in members] for tensors in (params, *states) if tensors]
        new = [[_widened(t) if scale is None else _widened(t, copy=True) for t in tensors] for tensors in old]
        pulls = [_widened(grads[i]).to(wide_dtype(params[i].dtype)) for i in members]
        if scale is not None:
            pulls = [pull * scale.to(pull.dtype) for pull in pulls]
        filled = iter(new[1:])
        arithmetic(new[0], pulls, [next(filled) if kept else [] for kept in states], numbers, flags)
        for before, after in zip((t for ts in old for t in ts), (t for ts in new for t in ts), strict=True):
            if scale is not None:
                before.copy_(torch.where(scale < 0, before.to(after.dtype), after))
            elif after is not before:
                before.copy_(after)


def _parts(params: list[Tensor]) -> Iterator[list[int]]:
    """Members of one dtype, so many at a time."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, param in enumerate(params):
        by_dtype.setdefault(param.dtype, []).append(index)
    for indices in by_dtype.values():
        part: list[int] = []
        total = 0
        for index in indices:
            size = params[index].numel() * params[index].element_size()
            if part and total + size > BYTES_AT_ONCE:
                yield part
                part, total = [], 0
            part.append(index)
            total += size
        yield part


def _widened(tensor: Tensor, copy: bool = False) -> Tensor:
    return tensor.to(wide_dtype(tensor.dtype), copy=copy)
