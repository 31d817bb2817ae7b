"""fold_casts: exact casts cancel, rounding ones stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.passes.small_graphs import in_backward, operators, rewritten, traced

from wholestep.passes.fold_casts import fold_casts

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
X = torch.tensor([[1.0, -0.0, 3.14159], [1e30, float("inf"), 1e-40]])

CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.dtype, int]] = {
    "to its own type": (lambda x: torch.ops.aten._to_copy(x, dtype=F32), F32, 0),
    "bf16 up and back": (lambda x: x.to(F32).to(BF16), BF16, 0),
    "fp16 up and back": (lambda x: x.to(F64).to(F16), F16, 0),
    "up, up, down": (lambda x: x.to(F32).to(F64).to(BF16), BF16, 0),
    "up in two steps": (lambda x: x.to(F32).to(F64), BF16, 1),
    "bf16 to fp16 through fp32": (lambda x: x.to(F32).to(F16), BF16, 1),
    "down and up rounds": (lambda x: x.to(BF16).to(F32), F32, 2),
    "bf16 to fp16 and back rounds": (lambda x: x.to(F16).to(BF16), BF16, 2),
    "int64 to fp32 rounds": (lambda x: x.to(F32).to(torch.int64), torch.int64, 2),
    "int32 through fp64": (lambda x: x.to(F64).to(torch.int32), torch.int32, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_which_casts_are_left(name: str) -> None:
    function, dtype, left = CASES[name]
    x = X.to(dtype) if dtype.is_floating_point else torch.tensor([[1, -(2**24) - 1, 7], [2**31 - 1, 0, 5]], dtype=dtype)
    graph = traced(lambda t: (t.sum(), function(t * 1)), x)
    assert operators(rewritten(fold_casts, graph, x)).count("_to_copy") == left


def test_a_parameter_is_cast_once_per_phase() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = x.to(BF16) @ w.to(BF16), x.to(BF16).exp() @ w.to(BF16)
        with in_backward():
            third = x.to(BF16).sin() @ w.to(BF16)
        return first.sum(), second, third

    w, x = torch.randn(3, 3), torch.randn(2, 3)
    graph = traced(step, w, x, parameters=1)
    assert operators(graph).count("_to_copy") == 6
    changed = rewritten(fold_casts, graph, w, x)
    assert operators(changed).count("_to_copy") == 4, "of w and x, in forward and in backward"


def test_another_device_or_layout_is_no_cast() -> None:
    x = torch.randn(2, 3, 4, 4).to(BF16)
    graph = traced(lambda t: (t.sum(), t.to(F32, memory_format=torch.channels_last).to(BF16)), x)
    assert operators(rewritten(fold_casts, graph, x)).count("_to_copy") == 2
