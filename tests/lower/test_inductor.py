"""Compiled regions compute what the graph computes, with the traced strides, and each distinct one compiles once."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from wholestep.errors import CompilerMissing
from wholestep.graph import serialise
from wholestep.graph.training_graph import Output, OutputKind, Role
from wholestep.lower import compile_region, lower_inductor, lower_interpret, regions

AUX, UPDATE = OutputKind.AUX, OutputKind.UPDATE


def test_layers_compile_once_and_train_like_interpret(traced):
    step = traced("stack-3")
    watched = next(n.name for n in step.graph.operations() if "gelu" in n.name)
    told = []
    runner = lower_inductor(step.graph, watch=[watched], progress=lambda *event: told.append(event))
    facts = runner.describe()
    assert facts["notes"] == []
    assert facts["regions"] > facts["unique_regions"] == len(told)
    assert any("(layer backward x" in text for text, _, _ in told)
    assert told[-1][1:] == (len(told), len(told))
    plain = lower_interpret(step.graph, watch=[watched])
    ours, theirs = step.fresh(), step.fresh()
    pointers = [t.data_ptr() for t in ours]
    for _ in range(3):
        torch.testing.assert_close(runner(ours), plain(theirs))
    torch.testing.assert_close(ours, theirs)
    assert [t.data_ptr() for t in ours] == pointers
    assert not torch.equal(ours[0], step.tensors[0])
    again = lower_inductor(step.graph, watch=[watched])
    assert again._keep[0] is runner._keep[0]


def test_batch_norm_statistics_and_strides(traced):
    step = traced("conv")
    runner, plain = lower_inductor(step.graph), lower_interpret(step.graph)
    assert runner.describe()["notes"] == []
    ours, theirs = step.fresh(), step.fresh()
    for _ in range(2):
        torch.testing.assert_close(runner(ours), plain(theirs))
    torch.testing.assert_close(ours, theirs)
    buffers = step.graph.indices(Role.BUFFER)
    assert all(not torch.equal(ours[i], step.tensors[i]) for i in buffers)


def test_outputs_have_the_traced_strides_and_their_own_memory(functional_trace):
    def body(x, w, state):
        y = torch.nn.functional.conv2d(x, w)
        shuffled = (y.permute(0, 2, 3, 1) * 2).sin()
        pooled = torch.nn.functional.max_pool2d(y, 2)
        new = state * 0.5 + y.mean().exp()
        return y, y.relu(), shuffled.transpose(1, 2), pooled, (y.flatten(1) @ y.flatten(1).t()).t(), new, new

    tensors = [torch.randn(2, 3, 5, 6), torch.randn(4, 3, 2, 2), torch.ones(3)]
    outputs = [*(Output(AUX, str(i)) for i in range(6)), Output(UPDATE, "state", 2)]
    step = functional_trace(body, tensors, outputs)
    expected, after = step.reference()
    runner = lower_inductor(step.graph)
    assert runner.describe()["notes"] == []
    inputs = step.fresh()
    got = runner(inputs)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(inputs, after)
    assert [t.stride() for t in got] == [t.stride() for t in expected]
    kept = got[-1].clone()
    runner(inputs)
    assert torch.equal(got[-1], kept)


@pytest.mark.parametrize("broken", [False, True], ids=["compiled", "uncompiled"])
def test_a_kernel_that_returns_other_strides_than_traced_is_copied(functional_trace, monkeypatch, broken):
    """hardtanh's backward follows a transposed gradient and announces a contiguous result: both called directly, and last
    in a region that runs uncompiled."""
    backward = torch.ops.aten.hardtanh_backward.default
    direct = torch.ops.aten.convolution.default if broken else backward  # the convolution reads what the region gives
    known = regions.record_of
    monkeypatch.setattr(
        regions,
        "record_of",
        lambda n: dataclasses.replace(known(n), compiled=False) if n.target is direct else known(n),
    )
    if broken:
        monkeypatch.setattr(compile_region, "_compile", _failing_for(backward, compile_region._compile))
        compile_region._in_process.clear()

    def body(x, gradient, weight):
        made = backward((gradient * 2).exp().sin().permute(1, 2, 3, 0), x.cos().exp() * 2, 0.0, 20.0)
        seen = torch.ops.aten.convolution.default(made, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        return made.sin().exp().sum(0), seen.sin().exp() * 2

    tensors = [torch.randn(shape, dtype=torch.float64) for shape in ((6, 3, 4, 20), (20, 6, 3, 4), (2, 3, 2, 2))]
    step = functional_trace(body, tensors, [Output(AUX, "a"), Output(AUX, "b")])
    expected, _ = step.reference()
    runner = lower_inductor(step.graph)
    assert runner.describe()["direct_calls"] >= 1
    assert bool(runner.describe()["notes"]) is broken
    torch.testing.assert_close(runner(step.fresh()), expected)
    compile_region._in_process.clear()


def _failing_for(target, compile_it):
    def chosen(module, signature):
        if any(node.target is target for node in module.graph.nodes):
            raise RuntimeError("no such lowering")
        return compile_it(module, signature)

    return chosen


def test_restride_gives_any_dense_order():
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    output = graph.output((node,))
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        node.meta["val"] = torch.empty(2, 3, 4)
        wanted = torch.empty(4, 2, 3).permute(1, 2, 0)
    made = compile_region._restride(graph, output, node, wanted, mode)
    assert made.meta["val"].stride() == wanted.stride() == (3, 1, 6)
    with mode, pytest.raises(ValueError, match="strides"):
        compile_region._restride(graph, output, node, torch.empty(2, 3, 8)[..., ::2], mode)


def test_a_region_that_fails_runs_uncompiled_and_says_so(traced, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such lowering\nmore text")

    monkeypatch.setattr(compile_region, "_compile_anew", broken)
    monkeypatch.setattr(compile_region.region_cache, "load", lambda *_: None)
    compile_region._in_process.clear()
    step = traced("mlp")
    runner = lower_inductor(step.graph)
    (note,) = runner.describe()["notes"]
    assert "runs uncompiled" in note
    assert "RuntimeError: no such lowering" in note
    expected, after = step.reference()
    inputs = step.fresh()
    torch.testing.assert_close(runner(inputs), expected)
    torch.testing.assert_close(inputs, after)
    compile_region._in_process.clear()


def test_symbolic_sizes(symbolic_graph):
    runner, plain = lower_inductor(symbolic_graph), lower_interpret(symbolic_graph)
    assert runner.describe()["notes"] == []
    for size in (4, 7):
        inputs = [torch.randn(size, 3, 6), torch.randn(6, 6)]
        torch.testing.assert_close(runner(inputs), plain(inputs))


def test_no_compiler_is_one_clear_error(traced, monkeypatch):
    monkeypatch.setattr(compile_region.shutil, "which", lambda name: None)
    with pytest.raises(CompilerMissing, match="interpret"):
        lower_inductor(traced("mlp").graph)


_CHILD = """
import sys, torch
torch.set_num_threads(int(sys.argv[2]))
from wholestep.graph import serialise
from wholestep.lower import compile_region, lower_inductor
def refuse(*_): raise SystemExit("compiled anew")
compile_region._compile_anew = refuse
graph = serialise.loads(open(sys.argv[1], "rb").read())
runner = lower_inductor(graph)
print(runner.describe()["cache_hits"], float(runner([torch.ones(5, 3)])[0]))
"""


@pytest.mark.slow
def test_another_process_finds_the_code_on_disk(functional_trace, tmp_path):
    step = functional_trace(lambda x: ((x * 3).sin().exp().sum(),), [torch.ones(5, 3)], [Output(AUX, "s")])
    here = lower_inductor(step.graph)
    path = tmp_path / "graph.bin"
    path.write_bytes(serialise.dumps(step.graph))
    command = [sys.executable, "-c", _CHILD, str(path), str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    hits, value = done.stdout.split()[-2:]
    assert int(hits) == 1
    assert float(value) == pytest.approx(float(here([torch.ones(5, 3)])[0]))
