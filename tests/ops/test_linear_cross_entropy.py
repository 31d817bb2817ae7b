"""ws::linear_cross_entropy is F.cross_entropy(F.linear(...)), chunked: losses, gradients, odd sizes, ignored targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ops.interpreter import assert_equal_when_interpreted
from torch import Tensor

from wholestep.ops import linear_cross_entropy, weight_gradient
from wholestep.ops.linear_cross_entropy import CHUNK_BYTES, chunk_rows

ROWS, WIDTH, CLASSES = 13, 6, 11
OP = torch.ops.ws.linear_cross_entropy


def made(dtype: torch.dtype, *, bias: bool = True, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    source = torch.Generator().manual_seed(3)
    x = torch.randn(rows, WIDTH, generator=source, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(CLASSES, WIDTH, generator=source, dtype=torch.float64).to(dtype).requires_grad_()
    shift = torch.randn(CLASSES, generator=source, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    target = torch.randint(0, CLASSES, (rows,), generator=source)
    if rows > 4:
        target[0], target[1], target[2], target[4] = 0, CLASSES - 1, -100, -100
    return x, weight, shift, target


def plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *, ignore_index: int = -100, smoothing: float = 0.0,
    z: float = 0.0, cap: float = 0.0, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    logits = F.linear(x, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if cap:
        logits = cap * torch.tanh(logits / cap)
    loss = F.cross_entropy(logits, target, ignore_index=ignore_index, label_smoothing=smoothing, reduction=reduction)
    if z:
        used = target != ignore_index
        extra = torch.where(used, z * torch.logsumexp(logits, 1).square(), 0.0).sum()
        loss = loss + (extra / used.sum() if reduction == "mean" else extra)
    return loss


def chunked(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *, ignore_index: int = -100, smoothing: float = 0.0,
    z: float = 0.0, cap: float = 0.0, reduction: str = "mean", chunk: int = 4,
) -> Tensor:  # fmt: skip
    return OP(x, weight, bias, target, ignore_index, smoothing, z, cap, reduction, chunk)[0]


def gradients(function: Callable[..., Tensor], tensors: Any, **options: Any) -> list[Tensor]:
    """The loss and all gradients of 3 times it."""
    x, weight, bias, target = tensors
    loss = function(x, weight, bias, target, **options)
    leaves = [t for t in (x, weight, bias) if t is not None]
    return [loss.detach(), *torch.autograd.grad(3.0 * loss, leaves)]


def fused(tensors: Any, *, chunk: int = 4, **options: Any) -> list[Tensor]:
    full = {"ignore_index": -100, "smoothing": 0.0, "z": 0.0, "cap": 0.0, "reduction": "mean", **options}
    x, weight, bias, target = (None if t is None else t.detach() for t in tensors)
    found = torch.ops.ws.linear_cross_entropy_and_gradients(
        torch.tensor(3.0), x, weight, bias, target, *full.values(), chunk, [True] * 3
    )
    return list(found if bias is not None else found[:3])


OPTIONS = [
    {}, {"reduction": "sum"}, {"smoothing": 0.1}, {"smoothing": 0.2, "reduction": "sum"}, {"z": 0.05}, {"cap": 1.5},
    {"ignore_index": 5}, {"smoothing": 0.1, "z": 0.02, "cap": 2.0, "ignore_index": 0},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 13, 128])
def test_loss_and_gradients_in_float64(options: dict[str, Any], bias: bool, chunk: int) -> None:
    tensors = made(torch.float64, bias=bias)
    if options.get("ignore_index", -100) != -100:
        tensors[3].clamp_(min=0)
    want = gradients(plain, tensors, **options)
    got = gradients(chunked, tensors, chunk=chunk, **options)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    x, weight, bias, target = made(torch.float64)
    assert torch.autograd.gradcheck(
        lambda a, b, c: chunked(a, b, c, target, smoothing=0.1, z=0.02, cap=2.0, chunk=5), (x, weight, bias)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS[:6], ids=str)
def test_as_close_to_float64_as_eager_is(dtype: torch.dtype, options: dict[str, Any]) -> None:
    tensors = made(dtype)
    exact = gradients(plain, [t if t.dtype == torch.int64 else t.detach().double().requires_grad_() for t in tensors],
                      **options)  # fmt: skip
    eager, ours = gradients(plain, tensors, **options), gradients(chunked, tensors, **options)
    eps = torch.finfo(dtype).eps
    for mine, theirs, truth in zip(ours, eager, exact, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        allowed = 2 * (theirs.double() - truth).norm() + 4 * eps * truth.norm()
        assert (mine.double() - truth).norm() <= allowed


def test_bf16_weight_gradient_is_added_up_in_float32() -> None:
    """1024 chunks of one row: rounding every sum to bf16 would lose most of the small ones."""
    x, weight = torch.ones(1024, 8, dtype=torch.bfloat16), torch.zeros(4, 8, dtype=torch.bfloat16, requires_grad=True)
    loss = chunked(x, weight, None, torch.zeros(1024, dtype=torch.int64), reduction="sum", chunk=1)
    (grad,) = torch.autograd.grad(loss, weight)
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad[0].float(), torch.full((8,), -768.0), rtol=1e-2, atol=0)
    torch.testing.assert_close(grad[1].float(), torch.full((8,), 256.0), rtol=1e-2, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_targets_ignored(reduction: str, smoothing: float) -> None:
    x, weight, bias, target = made(torch.float32)
    tensors = (x, weight, bias, torch.full_like(target, -100))
    want = gradients(plain, tensors, reduction=reduction, smoothing=smoothing)
    got = gradients(chunked, tensors, reduction=reduction, smoothing=smoothing)
    assert got[0].isnan() == want[0].isnan() == (reduction == "mean")
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_rows(reduction: str) -> None:
    tensors = made(torch.float32, rows=0)
    for ours, theirs in zip(
        gradients(chunked, tensors, reduction=reduction), gradients(plain, tensors, reduction=reduction), strict=True
    ):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [4, 64])
def test_the_fused_operator_has_the_bits_of_the_two(dtype: torch.dtype, bias: bool, chunk: int) -> None:
    tensors, options = made(dtype, bias=bias), {"smoothing": 0.1, "z": 0.01, "cap": 3.0}
    for one, two in zip(
        fused(tensors, chunk=chunk, **options), gradients(chunked, tensors, chunk=chunk, **options), strict=True
    ):
        assert torch.equal(one, two)


def test_only_wanted_gradients_are_made() -> None:
    x, weight, bias, target = made(torch.float32)
    weight.requires_grad_(False)
    (dx,) = torch.autograd.grad(chunked(x, weight, bias, target), x)
    (want,) = torch.autograd.grad(plain(x, weight, bias, target), x)
    torch.testing.assert_close(dx, want)
    lse = torch.zeros(ROWS)
    found = torch.ops.ws.linear_cross_entropy_backward(
        torch.ones(()), x, weight, bias, target, lse, -100, 0.0, 0.0, 0.0, "mean", 4, [True, False, False]
    )
    assert [tuple(t.shape) for t in found] == [(ROWS, WIDTH), (0,), (0,)]


def test_three_optimizer_steps_follow_eager() -> None:
    runs = []
    for function in (plain, chunked):
        x, weight, bias, target = made(torch.float32)
        optimizer = torch.optim.AdamW([x, weight, bias], lr=0.1)  # type: ignore[list-item]
        for _ in range(3):
            optimizer.zero_grad()
            function(x, weight, bias, target).backward()
            optimizer.step()
        runs.append([t.detach() for t in (x, weight, bias)])  # type: ignore[union-attr]
    for ours, theirs in zip(runs[1], runs[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_strided_inputs() -> None:
    x, weight, bias, target = made(torch.float64)
    wide = torch.stack([x.detach()] * 2, -1).flatten(1)[:, ::2].requires_grad_()
    turned = weight.detach().t().contiguous().t().requires_grad_()
    for ours, theirs in zip(
        gradients(chunked, (wide, turned, bias, target)), gradients(plain, (x, weight, bias, target)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_opcheck() -> None:
    x, weight, bias, target = made(torch.float32)
    rule = (-100, 0.1, 0.01, 2.0, "mean", 4)
    torch.library.opcheck(OP.default, (x, weight, bias, target, *rule))
    plain_x, plain_weight = x.detach(), weight.detach()
    lse = torch.zeros(ROWS)
    for wanted in ([True] * 3, [False, True, False]):
        given = (plain_x, plain_weight, None, target)
        torch.library.opcheck(
            torch.ops.ws.linear_cross_entropy_backward.default, (torch.ones(()), *given, lse, *rule, wanted)
        )
        torch.library.opcheck(
            torch.ops.ws.linear_cross_entropy_and_gradients.default, (torch.ones(()), *given, *rule, wanted)
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 4, 5)}, "takes x"),
        ({"x": torch.zeros(ROWS, WIDTH + 1)}, "must agree"),
        ({"bias": torch.zeros(3)}, "bias has shape"),
        ({"x": torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16)}, "one dtype"),
        ({"target": torch.zeros(ROWS)}, "not class numbers"),
        ({"reduction": "none"}, "use one of mean, sum"),
        ({"chunk": 0}, "1 row or more"),
    ],
)
def test_what_has_no_meaning_is_refused(change: dict[str, Any], message: str) -> None:
    x, weight, bias, target = made(torch.float32)
    options: dict[str, Any] = {"x": x, "weight": weight, "bias": bias, "target": target, **change}
    with pytest.raises(ValueError, match=message):
        chunked(**options)


def test_a_target_that_is_no_class_raises_on_the_cpu() -> None:
    x, weight, bias, target = made(torch.float32)
    target[3] = CLASSES
    with pytest.raises((RuntimeError, IndexError)):
        chunked(x, weight, bias, target)


def test_second_derivative_says_what_to_do() -> None:
    x, weight, bias, target = made(torch.float64)
    (grad,) = torch.autograd.grad(chunked(x, weight, bias, target), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="chunked_loss=False"):
        grad.sum().backward()


@pytest.mark.parametrize("rows", [0, 1, 127, 128, 1000, 16384, 100_000])
@pytest.mark.parametrize("vocabulary", [1, 1000, 50257, 128256, 10_000_000])
def test_chunks_are_small_and_equal(rows: int, vocabulary: int) -> None:
    chunk = chunk_rows(rows, vocabulary)
    assert chunk % 128 == 0 and chunk >= 128
    assert chunk == 128 or chunk * vocabulary * 4 <= CHUNK_BYTES
    chunks = -(-rows // chunk)
    assert chunks <= 1 or rows > (chunks - 1) * chunk >= rows - chunk
    assert rows < 128 * chunks + 1 or chunks == 1 or chunk - 128 < rows / chunks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [3, 100])
def test_classes_that_do_not_exist_change_nothing(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are filled up on a GPU; here they are made to be."""
    tensors = made(dtype)
    plain = gradients(chunked, tensors, chunk=chunk)
    monkeypatch.setattr(linear_cross_entropy, "wants_whole_rows", lambda weight: True)
    filled = gradients(chunked, tensors, chunk=chunk)
    assert CLASSES % (128 // tensors[0].element_size())
    for ours, theirs in zip(filled, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_slices_of_a_product_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_gradient, "SLICE_BYTES", 3 * 4 * WIDTH)
    left, right = torch.randn(5, CLASSES).bfloat16(), torch.randn(5, WIDTH).bfloat16()
    total = torch.ones(CLASSES, WIDTH)
    weight_gradient.FORMS["rounded"](total, left, right)
    torch.testing.assert_close(total, 1.0 + (left.t() @ right).float())


INTERPRETED = """
import torch
from wholestep.ops.linear_cross_entropy_rows import Rule, reference
from wholestep.ops import linear_cross_entropy_triton as kernel

kernel.BLOCK = 16
for vocabulary in (16, 37, 64):
    for dtype in (torch.float32, torch.bfloat16):
        for rule in (Rule(-100, 0.0, 0.0, 0.0), Rule(-100, 0.1, 0.02, 2.0), Rule(3, 0.1, 0.0, 0.0)):
            torch.manual_seed(vocabulary)
            logits = (3 * torch.randn(5, vocabulary)).to(dtype)
            logits[4, :16] = -float("inf") if not rule.label_smoothing and vocabulary > 16 else 0.0
            target = torch.tensor([0, vocabulary - 1, rule.ignore_index, 3, 15])
            if vocabulary > 16: target[4] = 20 % vocabulary
            scale = torch.tensor(0.7)
            for parts in ("forward", "both", "backward"):
                results = []
                for run in (reference, kernel.launch):
                    given = logits.clone()
                    lse, losses = (torch.full((5,), 9.0) for _ in range(2))
                    if parts == "backward":
                        lse = want_lse.clone()
                    made = run(given, target, rule, lse=lse, losses=None if parts == "backward" else losses,
                               scale=None if parts == "forward" else scale)
                    results.append((lse, losses, given if made is None else made))
                want_lse = results[0][0]
                for want, got in zip(*results):
                    eps = 1e-5 if want.dtype == torch.float32 else 1e-2
                    torch.testing.assert_close(got, want, rtol=eps, atol=eps)
lse, losses = torch.zeros(1), torch.zeros(1)
wrong = torch.randn(1, 16)
kernel.launch(wrong, torch.tensor([16]), Rule(-100, 0.0, 0.0, 0.0), lse=lse, losses=losses, scale=torch.tensor(1.0))
assert losses.isnan().all() and wrong.isnan().all()
kernel.launch(torch.empty(0, 16), torch.empty(0, dtype=torch.int64), Rule(-100, 0.0, 0.0, 0.0), lse=lse, losses=losses,
              scale=None)
print("equal")
"""


def test_triton_body_under_its_interpreter() -> None:
    assert_equal_when_interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"smoothing": 0.1, "z": 1e-4, "cap": 30.0, "reduction": "sum"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("classes", [128256, 50257])
def test_cuda_at_a_large_vocabulary(classes: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Losses and gradients against float64, an odd vocabulary too; the peak stays below one float32 logits tensor."""
    torch.manual_seed(0)
    rows, width, chunk = 1000, 256, 256
    x = torch.randn(rows, width, device="cuda", dtype=dtype, requires_grad=True)
    weight = (0.1 * torch.randn(classes, width, device="cuda")).to(dtype).requires_grad_()
    target = torch.randint(0, classes, (rows,), device="cuda")
    target[5], target[6], target[7] = -100, 0, classes - 1
    gradients(chunked, (x, weight, None, target), chunk=chunk, **options)  # cuBLAS takes its workspace
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ours = gradients(chunked, (x, weight, None, target), chunk=chunk, **options)
    used = torch.cuda.max_memory_allocated() - before
    exact = gradients(
        plain,
        (x.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), None, target),
        **options,
    )
    eager = gradients(plain, (x, weight, None, target), **options)
    assert used < 4 * rows * classes, f"{used / 2**20:.0f} MiB"
    for mine, theirs, truth in zip(ours, eager, exact, strict=True):
        assert mine.dtype == theirs.dtype
        allowed = 2 * (theirs.double() - truth).norm() + 4 * torch.finfo(dtype).eps * truth.norm()
        assert (mine.double() - truth).norm() <= allowed


@pytest.mark.gpu
def test_cuda_fused_has_the_bits_of_the_two_and_runs_in_a_graph() -> None:
    torch.manual_seed(0)
    x = torch.randn(700, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(5003, 64, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, 5003, (700,), device="cuda")
    grad, rule = torch.tensor(0.5, device="cuda"), (-100, 0.1, 1e-4, 30.0, "mean", 256)
    loss, lse = OP(x, weight, None, target, *rule)
    two = torch.ops.ws.linear_cross_entropy_backward(grad, x, weight, None, target, lse, *rule, [True] * 3)
    one = torch.ops.ws.linear_cross_entropy_and_gradients(grad, x, weight, None, target, *rule, [True] * 3)
    for a, b in zip(one, (loss, *two), strict=True):
        assert torch.equal(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = torch.ops.ws.linear_cross_entropy_and_gradients(grad, x, weight, None, target, *rule, [True] * 3)
    graph.replay()
    for a, b in zip(again, one, strict=True):
        assert torch.equal(a, b)
