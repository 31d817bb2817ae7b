"""Triton kernels compiled for a Hopper GPU where there is none: a compiler that fails does so here and not on a user's card."""

from __future__ import annotations

from typing import Any

import pytest
import torch

POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


class Launches:
    """Stands in for the launch of kernels: each is compiled as it would be for these arguments, once, and not run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        jit = pytest.importorskip("triton.runtime.jit")
        self.done: set[str] = set()
        monkeypatch.setattr(
            jit.JITFunction, "__getitem__", lambda kernel, grid: lambda *a, **k: self._compile(kernel, a, k)
        )

    def _compile(self, kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
        given = dict(zip(kernel.arg_names, args, strict=False)) | named
        fixed = {p.name for p in kernel.params if p.is_constexpr}
        signature, constants, facts = {}, {}, {}
        for place, name in enumerate(kernel.arg_names):
            value = given[name]
            if name in fixed or (isinstance(value, int) and value == 1):  # Triton compiles for a one apart
                signature[name], constants[(place,)] = "constexpr", value
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                signature[name] = POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "i32"
                if isinstance(value, torch.Tensor) or value % 16 == 0:
                    facts[(place,)] = [["tt.divisibility", 16]]
        key = f"{kernel.__name__} {signature} {constants} {facts} {options}"
        if key not in self.done:
            source = ASTSource(kernel, signature, constants, facts)
            triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            self.done.add(key)
