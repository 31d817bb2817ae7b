"""Triton kernels compiled for a Hopper GPU where there is none: a compiler that fails does so here and not on a user's card."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64", torch.int32: "*i32",
    torch.int64: "*i64",
}  # fmt: skip
MOST_SHARED = 227 << 10
"""Of a program on Hopper."""
MOST_STACK = 2 << 10
"""Of a thread, outside of its registers: the driver keeps as much for every thread that a card can hold, here 0.5 GiB."""


class Launches:
    """Stands in for the launch of kernels: each is compiled as it would be for these arguments, once, and not run. What it takes
    of an SM must be there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        jit = pytest.importorskip("triton.runtime.jit")
        self.done: set[str] = set()
        self.folder = folder
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
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            self.done.add(key)
            stack = self._stack(made.asm["cubin"])
            assert made.metadata.shared <= MOST_SHARED and stack <= MOST_STACK, (key, made.metadata.shared, stack)

    def _stack(self, binary: bytes) -> int:
        """Bytes a thread, by the tool that Triton brings along."""
        import triton

        file = self.folder / "kernel.cubin"
        file.write_bytes(binary)
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        told = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
        return max(int(found) for found in re.findall(r"STACK:(\d+)", told))
