"""What runs on a GPU, here on tensors of the CPU: the same numbers as the optimizer's own code, and nothing on a skipped update."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from tests.ops.updates.settings import PLAIN, SETTINGS, matrices

from wholestep.ops import IN_PLACE
from wholestep.ops.updates import UPDATES, operators, update_of

VECTORS = " of vectors"
ALONE = [
    *(name for name in SETTINGS if "groups" not in name),
    f"adafactor, all{VECTORS}",
    f"adafactor, foreach{VECTORS}",
]
SHAPES = ((5, 3), (3, 8), (4, 6), (7,), (1,), (2, 3, 4))


def operands(
    name: str, dtype: torch.dtype
) -> tuple[Any, Any, list[torch.Tensor], list[torch.Tensor], list[list[torch.Tensor]]]:
    """Record, plan-like description, parameters, gradients, states that have seen something."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    params = matrices(name, params)  # type: ignore[assignment]
    if name.startswith("adafactor"):  # matrices and vectors are updated apart
        params = [p for p in params if (p.dim() > 1) != name.endswith(VECTORS)]
    optimizer = SETTINGS[name.removesuffix(VECTORS)](params)
    update = update_of(optimizer)
    assert update is not None
    group = optimizer.param_groups[0]
    keys, flags = update.describe(optimizer, group, group["params"])
    tensors = [p.detach() for p in group["params"]]
    states = [[update.new_state(optimizer, key, p) for p in tensors] if key in keys else [] for key in update.states]
    for key, kept in zip(update.states, states, strict=True):
        for tensor in kept:
            if tensor.dim():  # an average of gradients is less than the root of the average of squares
                tensor.add_((torch.rand_like(tensor) + 0.1) * (0.1 if key == "grad_avg" else 1.0))
    return update, (group, flags), tensors, [torch.randn_like(p) for p in tensors], states


def on_device(update: Any, *rest: Any) -> None:
    module = importlib.import_module(f"wholestep.ops.updates.{update.kind}")
    operators.update_on_device(module.arithmetic, *rest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALONE)
def test_the_arithmetic_is_torchs(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "BYTES_AT_ONCE", 100)  # several parts
    update, (group, flags), params, grads, states = operands(name, dtype)
    copies = [[t.clone() for t in ts] for ts in (params, *states)]
    hyper = torch.tensor(update.fill(group, 2.0), dtype=torch.float64)
    scale = torch.tensor(0.5) if dtype is torch.float32 else None
    update.in_place(params, grads, *states, hyper, scale, *flags.values())
    numbers = dict(zip(update.numbers, hyper.unbind(), strict=True))
    on_device(update, copies[0], grads, copies[1:], numbers, scale, flags)
    # Muon's iterations are in bf16: a last bit of the momentum may become one of theirs
    limit = 1e-3 if name.startswith("muon") else 1e-5 if dtype is torch.float32 else 1e-9
    for ours, theirs in zip((t for ts in copies for t in ts), (t for ts in (params, *states) for t in ts), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit)


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_complex_parameters_take_the_kernels_of_real_ones(kind: str) -> None:
    """Compiled steps take torch's fused kernels, which know no complex numbers."""
    torch.manual_seed(0)
    params = [torch.randn(3, 2, dtype=torch.complex64), torch.randn(4)]
    optimizer = getattr(torch.optim, kind)(params, lr=0.1, **({"momentum": 0.9} if kind == "SGD" else {}))
    update, group = update_of(optimizer), optimizer.param_groups[0]
    assert update is not None
    keys, flags = update.describe(optimizer, group, params)
    hyper = torch.tensor(update.fill(group, 1.0), dtype=torch.float64)
    grads = [torch.randn_like(p).conj() for p in params]
    found = []
    for how in ("single", "fused"):
        states = [[update.new_state(optimizer, key, p) for p in params] if key in keys else [] for key in update.states]
        mine = [p.clone() for p in params]
        update.in_place(mine, grads, *states, hyper, None, *{**flags, "implementation": how}.values())
        found.append([*mine, *(t for kept in states for t in kept)])
    for one, other, before in zip(*found, [*params, *[None] * len(found[0])]):
        torch.testing.assert_close(one, other)
        assert before is None or not torch.equal(one, before)


@pytest.mark.parametrize("name", PLAIN)
def test_a_skipped_update_changes_nothing(name: str) -> None:
    update, (group, flags), params, grads, states = operands(name, torch.float32)
    kept = [[t.clone() for t in ts] for ts in (params, *states)]
    hyper = torch.tensor(update.fill(group, 2.0), dtype=torch.float64)
    numbers = dict(zip(update.numbers, hyper.unbind(), strict=True))
    bad = [torch.full_like(g, float("nan")) for g in grads]
    on_device(update, params, bad, states, numbers, torch.tensor(-1.0), flags)
    update.in_place(params, bad, *states, hyper, torch.tensor(-1.0), *flags.values())
    for ours, before in zip((t for ts in (params, *states) for t in ts), (t for ts in kept for t in ts), strict=True):
        assert torch.equal(ours, before)


@pytest.mark.parametrize("name", PLAIN)
def test_the_functional_form_leaves_its_arguments_alone(name: str) -> None:
    update, (group, flags), params, grads, states = operands(name, torch.float32)
    given = (params, grads, *states)
    kept = [[t.clone() for t in ts] for ts in given]
    hyper = torch.tensor(update.fill(group, 0.0), dtype=torch.float64)
    made = update.operator(*given, hyper, None, *flags.values())
    assert all(torch.equal(a, b) for ts, us in zip(given, kept, strict=True) for a, b in zip(ts, us, strict=True))
    update.in_place(params, grads, *states, hyper, None, *flags.values())
    assert all(torch.equal(a, b) for a, b in zip(made, [t for ts in (params, *states) for t in ts], strict=True))
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [[mode.from_tensor(t) for t in ts] for ts in given]
        shapes = [t.shape for t in update.operator(*fakes, mode.from_tensor(hyper), None, *flags.values())]
    assert shapes == [t.shape for t in made]


@pytest.mark.parametrize("name", PLAIN)
def test_narrow_gradients_are_widened(name: str) -> None:
    """bf16 gradients of float32 parameters, as the pass lean_gradients leaves them."""
    update, (group, flags), params, grads, states = operands(name, torch.float32)
    narrow = [g.bfloat16() for g in grads]
    hyper = torch.tensor(update.fill(group, 0.0), dtype=torch.float64)
    wide = update.operator(params, [g.float() for g in narrow], *states, hyper, None, *flags.values())
    ours = update.operator(params, narrow, *states, hyper, None, *flags.values())
    assert all(torch.equal(a, b) for a, b in zip(ours, wide, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALONE)
def test_on_a_gpu_within_a_cuda_graph(name: str, dtype: torch.dtype) -> None:
    """Recorded once and replayed with other numbers: as the CPU computes it, within rounding."""
    if dtype is torch.bfloat16 and name == "muon, plain":
        pytest.skip("refused")
    update, (group, flags), params, grads, states = operands(name, torch.float32)
    params, grads, states = (
        [p.to(dtype) for p in params],
        [g.to(dtype) for g in grads],
        [[s.to(dtype) for s in k] for k in states],
    )
    given = [[t.cuda() for t in ts] for ts in (params, grads, *states)]
    hyper, scale = torch.tensor(update.fill(group, 2.0), dtype=torch.float64).cuda(), torch.tensor(-1.0).cuda()
    update.in_place(*given, hyper, scale, *flags.values())  # warm, and left out
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update.in_place(*given, hyper, scale, *flags.values())
    for steps in (2.0, 3.0):
        numbers = torch.tensor(update.fill(group, steps), dtype=torch.float64)
        hyper.copy_(numbers)
        scale.fill_(0.5)
        graph.replay()
        host = [[t.float() for t in ts] for ts in (params, grads, *states)]
        update.in_place(*host, numbers, torch.tensor(0.5), *flags.values())
        params = [t.to(dtype) for t in host[0]]
        states = [[t.to(dtype) for t in ts] for ts in host[2:]]
    limit = 3e-2 if dtype is torch.bfloat16 else 2e-3 if name.startswith("muon") else 1e-5
    for ours, theirs in zip(
        (t for ts in (given[0], *given[2:]) for t in ts), (t for ts in (params, *states) for t in ts), strict=True
    ):
        torch.testing.assert_close(ours.cpu().float(), theirs.float(), rtol=limit, atol=limit)


def test_every_operator_is_in_the_table_of_twins() -> None:
    assert {update.operator: update.in_place for update in UPDATES.values()} == IN_PLACE
