"""Tables of the one-launch kernels, and their Triton bodies in Triton's interpreter on CPU."""

import pytest
import torch
from tests.ops.interpreter import assert_equal_when_interpreted

from wholestep.ops import IN_PLACE, multi_tensor
from wholestep.ops.multi_tensor import BLOCK

INTERPRETED = """
import torch
import wholestep.ops
from wholestep.ops import adamw_triton, sgd_triton

adamw, sgd = torch.ops.ws.adamw, torch.ops.ws.sgd

torch.manual_seed(0)
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 8e-3}  # the interpreter truncates to bf16
scale = torch.tensor(0.5)


def wide(tensors):
    return [t.double() for t in tensors]


def close(got, want):
    for a, b in zip(got, want, strict=True):
        error = (a.double() - b.double()).abs() / b.double().abs().clamp(min=0.1)
        assert (error <= TOLERANCE[a.dtype]).all(), error


for dtype, decoupled, amsgrad, maximize in (
    (torch.float32, True, False, False), (torch.float64, False, True, True), (torch.bfloat16, True, False, False)
):
    # More than one block, a short tensor, a transposed one, a strided one that is not dense, and an empty one.
    params = [torch.randn(3, 700), torch.randn(5), torch.randn(8, 6).t(), torch.randn(4, 6)[:, ::2], torch.randn(0)]
    params = [p.to(dtype) for p in params]
    grads = [torch.randn(p.shape).to(dtype) for p in params]
    states = [[torch.rand(p.shape).to(dtype) for p in params] for _ in range(3 if amsgrad else 2)]
    hyper = torch.tensor([3, 1e-2, 0.9, 0.999, 1e-8, 0.1], dtype=torch.float64)
    lists = states if amsgrad else [*states, []]
    inputs = (wide(params), wide(grads), *map(wide, lists))
    want = adamw(*inputs, hyper, scale, amsgrad, maximize, decoupled, "single")
    got = [[t.clone(memory_format=torch.preserve_format) for t in group] for group in (params, *states)]
    adamw_triton.launch(got[0], grads, got[1:], hyper, scale, maximize=maximize, decoupled=decoupled)
    close([t for group in got for t in group], want)
    kept = [t.clone() for group in got for t in group]
    adamw_triton.launch(got[0], grads, got[1:], hyper, -scale, maximize=maximize, decoupled=decoupled)
    assert all(torch.equal(a, b) for a, b in zip((t for group in got for t in group), kept, strict=True))

    hyper = torch.tensor([1e-2, 0.9, 0.1, 0.1], dtype=torch.float64)
    for buffers, nesterov in ((states[0], True), (states[0], False), ([], False)):
        want = sgd(wide(params), wide(grads), wide(buffers), hyper, None, nesterov, maximize, "single")
        new_params, new_buffers = [t.clone() for t in params], [t.clone() for t in buffers]
        sgd_triton.launch(
            new_params, grads, [new_buffers] if buffers else [], hyper, None, nesterov=nesterov, maximize=maximize
        )
        close(new_params + new_buffers, want)
        kept = [t.clone() for t in new_params + new_buffers]
        sgd_triton.launch(
            new_params, grads, [new_buffers] if buffers else [], hyper, -scale, nesterov=nesterov, maximize=maximize
        )
        assert all(torch.equal(a, b) for a, b in zip(new_params + new_buffers, kept, strict=True))
    view = torch.zeros(4, 6, dtype=dtype)[:, ::2]  # the result must reach a tensor that is not dense
    sgd_triton.launch([view], [torch.ones(4, 3, dtype=dtype)], [], hyper, None, nesterov=False, maximize=False)
    close([view], [torch.full((4, 3), -1e-2, dtype=dtype)])

# Gradients narrower than their parameters: the bits are those of the widened gradients.
params = [torch.randn(3, 700), torch.randn(5), torch.randn(8, 6).t(), torch.randn(4, 6)[:, ::2], torch.randn(3)]
for narrow in (torch.bfloat16, torch.float16):
    grads = [torch.randn(p.shape).to(narrow) for p in params[:-1]] + [torch.randn(3)]  # and one that is not
    grads[2] = torch.randn(8, 6).to(narrow).t()
    states = [[torch.rand(p.shape) for p in params] for _ in range(3)]
    results = []
    for given in (grads, [g.float() for g in grads]):
        for count in (2, 3):
            got = [[t.clone() for t in group] for group in (params, *states[:count])]
            hyper = torch.tensor([3, 1e-2, 0.9, 0.999, 1e-8, 0.1], dtype=torch.float64)
            adamw_triton.launch(got[0], given, got[1:], hyper, scale, maximize=False, decoupled=True)
            results.append([t for group in got for t in group])
        got = [[t.clone() for t in group] for group in (params, states[0])]
        hyper = torch.tensor([1e-2, 0.9, 0.1, 0.1], dtype=torch.float64)
        sgd_triton.launch(got[0], given, got[1:], hyper, None, nesterov=True, maximize=False)
        results.append([t for group in got for t in group])
    half = len(results) // 2
    for ours, theirs in zip(results[:half], results[half:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
print("equal")
"""


def test_triton_bodies_agree_with_torch_in_the_interpreter() -> None:
    assert_equal_when_interpreted(INTERPRETED)


@pytest.mark.parametrize("scale", [None, 0.5, -1.0])
@pytest.mark.parametrize("implementation", ["single", "foreach", "fused"])
def test_narrow_gradients_are_widened_whatever_the_implementation(scale: float | None, implementation: str) -> None:
    """bf16 gradients of float32 parameters give the bits of the same gradients in float32, and stay as they are."""
    params = [torch.randn(3, 700), torch.randn(5), torch.randn(())]
    grads = [torch.randn(p.shape).bfloat16() for p in params[:-1]] + [torch.randn(())]
    kept = [g.clone() for g in grads]
    states = [[torch.rand(p.shape) for p in params] for _ in range(3)]
    factor = None if scale is None else torch.tensor(scale)
    adam = torch.tensor([3, 1e-2, 0.9, 0.999, 1e-8, 0.1], dtype=torch.float64)
    numbers = torch.tensor([1e-2, 0.9, 0.1, 0.1], dtype=torch.float64)
    results = []
    for given in (grads, [g.float() for g in grads]):
        updated = torch.ops.ws.adamw(params, given, *states, adam, factor, True, False, True, implementation)
        updated += torch.ops.ws.sgd(params, given, states[0], numbers, factor, True, True, implementation)
        results.append(updated)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True)), "gradients must not be changed"
    assert all(torch.equal(a, b) for a, b in zip(results[0], params, strict=False)) == (scale == -1.0)


def test_copied_gradients_are_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_tensor, "MAX_COPIED_BYTES", 400)
    params = [torch.zeros(n) for n in (10, 90, 1, 1000, 3, 4)]
    wide, narrow = [torch.zeros_like(p) for p in params], [torch.zeros_like(p).bfloat16() for p in params]
    assert multi_tensor.parts_to_copy(params, wide, None) == [slice(None)]
    expected = [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 6)]
    assert multi_tensor.parts_to_copy(params, narrow, None) == expected
    assert multi_tensor.parts_to_copy(params, wide, torch.tensor(0.5)) == expected


def test_chunks_cover_every_element_once() -> None:
    sizes = (1, BLOCK, BLOCK + 1, 5 * BLOCK - 1)
    chunks = multi_tensor.chunks_of(multi_tensor.TableStore(torch.device("cpu")), sizes)
    assert chunks.num_chunks == 1 + 1 + 2 + 5
    covered = [0] * len(sizes)
    for tensor, start in zip(chunks.tensor.tolist(), chunks.start.tolist(), strict=True):
        assert start == covered[tensor]
        covered[tensor] = min(start + BLOCK, sizes[tensor])
    assert tuple(covered) == sizes == tuple(chunks.size.tolist())


def test_addresses_and_alignment() -> None:
    store = multi_tensor.TableStore(torch.device("cpu"))
    base = torch.zeros(64)
    start = (-base.data_ptr() // 4) % 4  # first element at a multiple of 16 bytes
    table, aligned = multi_tensor.address_table(store, [[base[start:]], [base[start + 4 :]]])
    assert aligned and table.tolist() == [base.data_ptr() + 4 * start, base.data_ptr() + 4 * start + 16]
    assert not multi_tensor.address_table(store, [[base[start + 1 :]]])[1]


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).t(), True),
        (torch.zeros(2, 3, 4).permute(1, 2, 0), True),
        (torch.zeros(3, 8)[:, ::2], False),
        (torch.zeros(3, 1).expand(3, 4), False),
        (torch.zeros(()), True),
    ],
)
def test_is_dense(tensor: torch.Tensor, dense: bool) -> None:
    assert multi_tensor.is_dense(tensor) is dense


def test_groups_leave_out_empty_tensors() -> None:
    params = [torch.zeros(2), torch.zeros(0), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3)]
    grads = [p.float() for p in params]
    groups = multi_tensor.group_by_dtype([params, grads])
    assert groups == {(torch.float32, torch.float32): [0, 3], (torch.bfloat16, torch.float32): [2]}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_scale_below_zero_leaves_everything_as_it_is(kind: str, device: str) -> None:
    def tensors(value: float) -> list[torch.Tensor]:
        return [torch.full((n,), value, device=device) for n in (3, 5000)]

    grads, nan = tensors(1.0), tensors(float("nan"))
    adam = torch.tensor([1, 0.1, 0.9, 0.99, 1e-8, 0.1], dtype=torch.float64, device=device)
    sgd = torch.tensor([0.1, 0.9, 0.0, 0.1], dtype=torch.float64, device=device)
    for scale in (1.0, multi_tensor.SKIP):
        given = torch.tensor(scale, device=device)
        states = [tensors(2.0), tensors(3.0), tensors(4.0)]
        if kind == "adamw":
            gradients = grads if scale > 0 else nan
            operands = (states[0], gradients, states[1], states[2], [], adam, given, False, False, True, "single")
        else:
            operands = (states[0], grads if scale > 0 else nan, states[1], sgd, given, False, False, "single")
            states = states[:2]
        operator = getattr(torch.ops.ws, kind).default
        new = operator(*operands)
        IN_PLACE[operator](*operands)
        unchanged = [torch.full((n,), v, device=device) for v in (2.0, 3.0, 4.0)[: len(states)] for n in (3, 5000)]
        flat = [t for group in states for t in group]
        for i in range(len(unchanged)):
            assert torch.equal(new[i], flat[i]) and torch.equal(flat[i], unchanged[i]) is (scale < 0)


@pytest.mark.parametrize("implementation", ["single", "foreach", "fused"])
@pytest.mark.parametrize("clipped", [False, True])
def test_gradients_and_states_may_lie_in_memory_otherwise_than_their_parameters(
    implementation: str, clipped: bool
) -> None:
    """torch's fused kernels go through memory: a gradient of a convolution over channels-last images is in another order."""

    def laid(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        shapes = [(4, 3, 2, 2), (5, 6), (4, 3), (3, 4, 2, 2)]
        found = [torch.rand(shape) + 0.1 for shape in shapes]
        if seed % 2:
            found[0], found[1] = found[0].contiguous(memory_format=torch.channels_last), found[1].t().contiguous().t()
        found[2] = torch.cat([found[2], found[2]], 1)[:, ::2].copy_(found[2]) if seed == 0 else found[2]  # not dense
        return found

    scale = torch.tensor(0.5) if clipped else None
    sgd = torch.tensor([1e-2, 0.9, 0.0, 0.1], dtype=torch.float64)
    adamw = torch.tensor([3, 1e-2, 0.9, 0.999, 1e-8, 0.1], dtype=torch.float64)
    for first in (0, 2):
        found = {}
        for how, dense in ((implementation, False), ("single", True)):
            given = [[t.contiguous() if dense else t for t in laid(first + i)] for i in range(4)]
            flags = (False, False, True, how)
            moved = torch.ops.ws.sgd.default(given[0], given[1], given[2], sgd, scale, False, False, how)
            adam = torch.ops.ws.adamw.default(given[0], given[1], given[3], given[2], [], adamw, scale, *flags)
            IN_PLACE[torch.ops.ws.sgd.default](given[0], given[1], given[2], sgd, scale, False, False, how)
            found[how, dense] = [*moved, *adam, *given[0], *given[2]]
        ours, plain = found.values()
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)
