"""Compile time, overlapped: Python writes the next region's code while g++ or Triton compiles the last one's.

Inductor waits for the code of a region before it returns. Waiting once, after the last region, gives all cores work all the
time. And what every first compilation pays (probing the vector instructions, precompiling a header) needs no graph: it runs
beside the capture. Measured with a 12-layer GPT on two cores and ResNet-50 on an H200: see docs/measured.md.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

_TRIVIAL_KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0)
{
    auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0, static_cast<int64_t>(1));
    tmp0.store(out_ptr0, static_cast<int64_t>(1));
}
"""


_PROBING = threading.RLock()


@contextlib.contextmanager
def probing() -> Iterator[None]:
    """One thread at a time finds out which vector instructions this CPU has: while torch tries some out it changes the compiler
    flags of an object that all threads share, and two threads at once leave flags that no later process would compile with."""
    with _PROBING:
        yield


def vector_isa() -> str:
    """The instructions that Inductor compiles for on this CPU; probed once per process."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    with probing():
        return str(pick_vec_isa())


def warm_up(device: str = "cpu") -> None:
    """Start Inductor's compile workers, and on the CPU its first compilation, in the background.

    The imports happen in the calling thread: torch's modules import each other in a circle, and two threads that enter
    it at different places break each other.
    """
    try:
        import torch._inductor.compile_fx  # noqa: F401
        from torch._inductor.async_compile import AsyncCompile
    except ImportError:  # compiling reports its own errors; this only saves time
        return

    def work() -> None:
        # whatever fails here fails again, with its reason, when a region is compiled
        with contextlib.suppress(Exception):
            if (
                device == "cpu"
            ):  # g++ runs under threads; the worker processes are for Triton, and cost seconds to start
                vector_isa()
                AsyncCompile().cpp_pybinding(["const float*", "float*"], _TRIVIAL_KERNEL)
            elif hasattr(AsyncCompile, "warm_pool"):
                AsyncCompile.warm_pool()

    threading.Thread(target=work, name="wholestep-warm-up", daemon=True).start()


@contextlib.contextmanager
def one_wait_for_all() -> Iterator[None]:
    """Regions compiled inside are waited for together, when the block ends; their kernels must not be called before."""
    from torch._inductor import async_compile

    AsyncCompile = async_compile.AsyncCompile
    kernels = getattr(async_compile, "CompiledTritonKernels", None)
    wait = AsyncCompile.wait
    pending: list[tuple[Any, dict[str, Any]]] = []

    def wait_later(self: Any, scope: dict[str, Any]) -> None:
        pending.append((self, scope))
        if kernels is not None:
            kernels.cache_clear()  # a result can be taken once: the next region asks for a kernel of its own

    AsyncCompile.wait = wait_later  # type: ignore[method-assign]
    try:
        yield
    finally:
        AsyncCompile.wait = wait  # type: ignore[method-assign]
        for compiler, scope in pending:
            wait(compiler, scope)
