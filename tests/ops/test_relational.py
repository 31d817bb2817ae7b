"""Sums, products and softmax over tables: the Triton bodies against their references, on awkward tables."""

from __future__ import annotations

import pytest
import torch
from tests.ops.interpreter import assert_equal_when_interpreted

TRIED = """
import itertools, torch
from wholestep.ops.relational import gather, softmax, gather_triton, segments_triton, softmax_triton

CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
COUNTS = {  # entries of every target
    "empty targets": [0, 3, 0, 0, 5, 1, 0], "one entry": [1], "one target": [9], "no entries": [0, 0, 0],
    "hubs": [2, 0, 45, 3, 26], "on the borders of chunks": [8, 8, 0, 16, 7, 9], "many": [1] * 30, "hubs alone": [50],
}


def close(found, wanted):
    assert found.dtype == wanted.dtype or wanted.dtype == torch.float64
    assert found.shape == wanted.shape and found.is_contiguous()
    limit = CLOSE[found.dtype]
    largest = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    torch.testing.assert_close(found.double(), wanted.double(), rtol=limit, atol=limit * largest)


def table(counts, ids, device):
    ptr = torch.tensor([0, *counts]).cumsum(0)
    entries = int(ptr[-1])
    index, edge = torch.randint(0, 6, (entries,)), torch.full((entries,), -1)
    chosen = torch.randperm(entries)[: (entries + 1) // 2]  # half of the entries have an edge, in any order
    edge[chosen] = torch.randperm(len(chosen))
    return [t.to(ids).to(device) for t in (ptr, index, edge)] + [len(chosen)]


def wide(*tensors):
    return [t.double() if t is not None else None for t in tensors]


def sums_and_dots(counts, features, dtype, ids, device="cpu"):
    ptr, index, edge, edges = table(counts, ids, device)
    entries, targets = index.shape[0], len(counts)
    x, grad = (torch.randn(n, *features).to(dtype).to(device) for n in (6, targets))
    heads = features[:-1]
    for named, weight in ((None, None), (None, torch.randn(entries, *heads)), (edge, torch.randn(edges, *heads))):
        weight = None if weight is None else weight.to(dtype).to(device)
        exact = gather.sum_reference(*wide(x, weight), ptr, index, named, ptr, index, None)
        found = gather_triton.gather_sum(x, weight, ptr, index, named)
        close(found, exact)
        assert torch.equal(found, gather_triton.gather_sum(x, weight, ptr, index, named))
        if weight is not None:
            named = torch.arange(entries, device=device, dtype=ids) if named is None else named
            exact = gather.dot_reference(*wide(grad, x, weight), ptr, index, named)
            close(gather_triton.gather_dot(grad, x, weight, ptr, index, named) / 8, exact / 8)


def softmaxes(counts, heads, dtype, ids, device="cpu"):
    ptr = torch.tensor([0, *counts]).cumsum(0).to(ids).to(device)
    logits = (20 * torch.randn(sum(counts), *heads)).to(dtype).to(device)
    logits[::3] = float("-inf")
    found, wanted = softmax_triton.softmax(logits, ptr), softmax.reference(logits.double(), ptr)
    close(found, wanted)
    pull = torch.randn(logits.shape).to(dtype).to(device)
    exact = softmax.reference_backward(pull.double(), found.double(), ptr)
    close(softmax_triton.softmax_backward(pull, found, ptr), exact)


def try_all(device="cpu"):
    torch.manual_seed(0)
    for counts in COUNTS.values():
        for few in (0, 1 << 12):  # entries of long targets one after another, as over a large graph, or several at a time
            gather_triton.FEW_PROGRAMS = few
            sums_and_dots(counts, (2, 3), torch.float32, torch.int32, device)
        softmaxes(counts, (3,), torch.float32, torch.int64, device)
    for features in ((1,), (3,), (64,), (65,), (3, 1), (1, 4)):
        sums_and_dots([2, 0, 27, 3], features, torch.float32, torch.int64, device)
    for heads in ((), (1,), (5,)):
        softmaxes([2, 0, 27, 3], heads, torch.float32, torch.int32, device)
    for dtype in (torch.bfloat16, torch.float16):
        sums_and_dots([2, 0, 27, 3], (2, 5), dtype, torch.int32, device)
        softmaxes([2, 0, 27, 3], (2,), dtype, torch.int32, device)
    for features in ((0,), (2, 0)):
        assert gather_triton.gather_sum(torch.randn(6, *features), None, *table([2, 1], torch.int32, "cpu")[:2], None).numel() == 0


"""
INTERPRETED = (
    TRIED
    + """
segments_triton.CHUNK, gather_triton.TILE, gather_triton.COLUMNS = 8, 256, 32
softmax_triton.TILE, softmax_triton.HEADS = 32, 4
try_all()
for targets in (1, 2, 7, 8, 9, 15, 16, 70, 300):  # every chunk finds who has all of it
    counts = torch.randint(0, 40, (targets,)) * (torch.rand(targets) < 0.5)
    ptr = torch.tensor([0, *counts]).cumsum(0)
    first = torch.arange(int(ptr[-1]) // 8) * 8
    found = torch.searchsorted(ptr, first, right=True) - 1
    wanted = torch.where(ptr[found + 1] >= first + 8, found, -1)
    assert torch.equal(segments_triton.owners(ptr.int(), int(ptr[-1])).long(), wanted), targets
print("equal")
"""
)


def test_triton_bodies_under_their_interpreter() -> None:
    assert_equal_when_interpreted(INTERPRETED)


LAYER = """
import torch
from tests.relational.graphs import made
from tests.relational.test_layer import heads, rgat, tensors
from wholestep import relational as rel
from wholestep.ops.relational import gather, gather_triton, segments_triton, softmax

gather.in_triton = softmax.in_triton = lambda *_: True
segments_triton.CHUNK = 16
called, kernel = [], gather_triton.gather_dot
gather_triton.gather_dot = lambda *given: called.append(1) or kernel(*given)
for message in (rgat, heads):
    graph = made("hubs")
    x, _, params = tensors(graph, torch.float32)
    layer = rel.layer(message)
    found, wanted = (f(graph, {"x": x}, params) for f in (layer, layer.reference))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    leaves = [x, params["W"] if message is rgat else params["H"]]
    pairs = zip(*(torch.autograd.grad(f.square().sum(), leaves) for f in (found, wanted)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
assert called
print("equal")
"""


def test_layers_on_the_kernels_under_their_interpreter() -> None:
    """Through the operators and their derivatives, as on a GPU."""
    assert_equal_when_interpreted(LAYER)


@pytest.mark.gpu
def test_cuda() -> None:
    """The same tables, and one whose hub has many chunks, at the sizes that kernels really have."""
    names: dict[str, object] = {}
    exec(TRIED, names)
    names["try_all"]("cuda")  # type: ignore[operator]
    big = torch.randint(0, 40, (3000,), generator=torch.Generator().manual_seed(0)).tolist() + [70_000, 0, 129, 128]
    for dtype in (torch.float32, torch.bfloat16):
        for features in ((64,), (200,), (4, 16)):
            names["sums_and_dots"](big, features, dtype, torch.int32, "cuda")  # type: ignore[operator]
        names["softmaxes"](big, (4,), dtype, torch.int32, "cuda")  # type: ignore[operator]
