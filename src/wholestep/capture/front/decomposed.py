"""Operators that torch takes apart while it traces, into something else than eager computes: mended, or kept whole.

In: torch's Python kernels, which run in a trace and nowhere else. Out: what eager's kernels give, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp.decompositions import upsample_compute_output_size
from torch._dispatch.python import no_python_dispatcher
from torch.fx.experimental.symbolic_shapes import guard_or_false

from wholestep.ops.record import arguments_of, record

aten = torch.ops.aten


def _margin_loss(input: torch.Tensor, target: torch.Tensor, reduction: int) -> tuple[torch.Tensor, torch.Tensor]:
    """F.multilabel_margin_loss as it is computed; torch (2.11, 2.13) traces it as if what stands behind the end of a row's targets
    named class 0."""
    rows, named = torch.atleast_2d(input), torch.atleast_2d(target)
    counts = (named == -1).cumsum(-1) == 0
    places = torch.arange(rows.shape[1], device=rows.device)
    is_target = ((named.unsqueeze(-1) == places) & counts.unsqueeze(-1)).any(1)
    chosen = rows.gather(-1, torch.where(counts, named, 0))
    margins = torch.relu(1.0 - chosen.unsqueeze(-1) + rows.unsqueeze(1)) / rows.shape[1]
    counted = counts.unsqueeze(-1) & ~is_target.unsqueeze(1)
    loss = torch.where(counted, margins, 0.0).sum((1, 2))
    loss = loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss.reshape(input.shape[:-1])
    return loss, is_target.to(input.dtype).reshape(target.shape)


_margins = aten.multilabel_margin_loss_forward.default
if DispatchKey.Autograd in _margins.py_kernels:
    _margins.py_kernels[DispatchKey.Autograd] = _margin_loss
    _margins._dispatch_cache.clear()


NEAREST = ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
OTHERS = (
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d",
    "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
)  # fmt: skip


def _has_a_rule(sizes: Sequence[Any], resized: Sequence[Any], scales: Sequence[Any], *, doubles: bool) -> bool:
    """Whether eager's kernel copies, or doubles, whatever the scale is: `scale_factor=1.1` makes 4 places of 4."""
    for size, out, scale in zip(sizes, resized, scales, strict=True):
        if scale is not None and scale > 0:
            if (scale != 1 and guard_or_false(size == out)) or (
                doubles and scale != 2 and guard_or_false(out == 2 * size)
            ):
                return True
    return False


def _as_the_kernel(operator: Any, plain: Callable[..., Any], *, doubles: bool) -> Callable[..., Any]:
    def resize(*args: Any, **kwargs: Any) -> Any:
        """aten's operator taken apart, which looks at scales alone; whole where its kernel looks at sizes."""
        given = arguments_of(operator, args, kwargs)
        shape, resized = args[0].shape, given["output_size"]
        by_names = [value for name, value in given.items() if name.startswith("scales")]
        scales = given.get("scale_factors") or by_names
        if resized is None:
            resized = upsample_compute_output_size(shape, None, scales)
        if len(scales) == len(shape) - 2 and _has_a_rule(shape[2:], resized, scales, doubles=doubles):
            with no_python_dispatcher():
                return operator(*args, **kwargs)
        return plain(*args, **kwargs)

    return resize


for _name in (*NEAREST, *OTHERS):
    for _operator in (getattr(aten, _name).vec, getattr(aten, _name).default):
        for _key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd):
            if _key in _operator.py_kernels:
                _plain = _operator.py_kernels[_key]
                _operator.py_kernels[_key] = _as_the_kernel(_operator, _plain, doubles=_name in NEAREST)
        _operator._dispatch_cache.clear()
    # in a graph they are what must not be taken apart, and compilers would
    record(f"aten::{_name}", f"aten::{_name}_backward", compiled=False)
