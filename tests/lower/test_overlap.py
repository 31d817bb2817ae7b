"""What runs beside the capture: one thread at a time finds out which vector instructions the CPU has."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import fx
from torch._inductor import cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile

from wholestep.lower import compile_region, overlap, region_cache


def test_one_thread_at_a_time_probes_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """While torch tries some out it changes flags that all threads share: code would be kept where no later process looks."""
    inside: list[int] = []
    most: list[int] = []

    def pick() -> str:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return "some"

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", pick)
    region_cache._same_vector_isa.cache_clear()
    known = threading.Thread(target=region_cache._same_vector_isa, args=("some",))
    threads = [known, *(threading.Thread(target=overlap.vector_isa) for _ in range(3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    region_cache._same_vector_isa.cache_clear()
    assert most == [1, 1, 1, 1]


def test_the_first_compilation_waits_for_what_was_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(overlap, "vector_isa", lambda: order.append("probed"))
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: order.append("compiled"))
    before = set(threading.enumerate())
    overlap.warm_up("cpu")
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert order == ["probed", "compiled"]


def test_a_region_of_the_cpu_waits_for_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(compile_region, "vector_isa", lambda: order.append("probed"))
    monkeypatch.setattr(compile_region, "_compile_anew", lambda *_: order.append("compiled"))
    monkeypatch.setattr(region_cache, "load", lambda *_: None)
    graph = fx.Graph()
    placeholder = graph.placeholder("x")
    placeholder.meta["val"] = torch.empty(2)
    graph.output((placeholder,))
    compile_region._compile(fx.GraphModule({}, graph), "a signature")
    assert order == ["probed", "compiled"]
