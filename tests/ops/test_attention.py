"""ws::attention against torch's scaled_dot_product_attention: values, gradients, layouts, dropout, tracing, errors."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from wholestep.ops import DECOMPOSITIONS
from wholestep.ops.attention import reference, scaled_dot_product_attention
from wholestep.ops.random_bits import keep_mask

KEY = torch.tensor(0x0123_4567_89AB_CDEF, dtype=torch.int64)
# Largest difference allowed, from the rounding of the dtype on sums of a few dozen terms of size 1.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2}


def inputs(
    dtype: torch.dtype,
    heads: int = 4,
    groups: int = 4,
    queries: int = 7,
    keys: int = 7,
    width: int = 8,
    transposed: bool = False,
) -> list[Tensor]:
    torch.manual_seed(0)
    result = []
    for h, length in ((heads, queries), (groups, keys), (groups, keys)):
        shape = (2, length, h, width) if transposed else (2, h, length, width)
        t = torch.randn(shape, dtype=dtype)
        result.append((t.transpose(1, 2) if transposed else t).requires_grad_())
    return result


def gradients(out: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return torch.autograd.grad(out, tensors, torch.randn(out.shape, dtype=torch.float32).to(out.dtype))


def assert_same(ours: Tensor, theirs: Tensor, tensors: list[Tensor], tolerance: float) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= tolerance
    for got, want in zip(gradients(ours, tensors), gradients(theirs, tensors), strict=True):
        assert (got - want).abs().max() <= tolerance * 4


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (33, 33), (7, 12), (12, 7)])
def test_equals_torch(dtype: torch.dtype, causal: bool, queries: int, keys: int) -> None:
    tensors = inputs(dtype, queries=queries, keys=keys)
    ours = scaled_dot_product_attention(*tensors, is_causal=causal)
    assert_same(ours, F.scaled_dot_product_attention(*tensors, is_causal=causal), tensors, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_heads_and_transposed_layout(dtype: torch.dtype, groups: int) -> None:
    tensors = inputs(dtype, groups=groups, transposed=True)
    ours = scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    theirs = F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    assert ours.stride() == tensors[0].stride()
    assert_same(ours, theirs, tensors, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(7, 12), (2, 1, 7, 12), (2, 4, 7, 12), (1, 4, 1, 12), (2, 1, 1, 12), (4, 7, 12)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks(dtype: torch.dtype, shape: tuple[int, ...], kind: str) -> None:
    tensors = inputs(dtype, queries=7, keys=12)
    torch.manual_seed(2)
    mask = torch.rand(shape) > 0.3
    mask[..., 0] = True
    if kind == "float":
        mask = torch.randn(shape).masked_fill(~mask, float("-inf")).to(dtype)
    ours = scaled_dot_product_attention(*tensors, mask)
    assert_same(ours, F.scaled_dot_product_attention(*tensors, mask), tensors, TOLERANCE[dtype])


def test_large_scores_lose_no_more_than_softmax_does() -> None:
    """A logsumexp of 1000 is rounded by 6e-5 in float32; the probabilities must not be. All scores are of whole numbers, so
    that only what follows them rounds."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randint(-3, 4, (2, 2, 9, 8)).float() for _ in range(4))
    mask = torch.randint(990, 1010, (9, 9)).float()

    def steps(dtype: torch.dtype) -> tuple[Tensor, ...]:
        given = [t.to(dtype) for t in (q, k, v, mask)]
        out, logsumexp = reference.forward(*given, False, 0.25, 0.0, None)
        return out, *reference.backward(grad.to(dtype), *given, out, logsumexp, False, 0.25, 0.0, None)

    for got, want in zip(steps(torch.float32), steps(torch.float64), strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])  # the CPU flash kernel, and math
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_see_nothing_give_zeros(dropout_p: float, kind: str, causal: bool) -> None:
    tensors = inputs(torch.float32)
    mask = torch.ones(7, 7, dtype=torch.bool)
    mask[3] = False
    mask[0, 0] = False  # with causality row 0 sees nothing either
    if kind == "float":
        mask = torch.zeros(7, 7).masked_fill(~mask, float("-inf"))
    out = scaled_dot_product_attention(*tensors, mask, dropout_p, causal, key=KEY)
    grads = gradients(out, tensors)
    assert all(t.isfinite().all() for t in (out, *grads))
    for row in (3, *([0] if causal else [])):
        assert not out[:, :, row].any()
        assert not grads[0][:, :, row].any()
    assert out[:, :, 1].any()
    want, _ = reference.forward(*tensors, mask, causal, 8**-0.5, dropout_p, KEY)
    assert torch.allclose(out, want, atol=1e-5)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, p: float) -> Tensor:
    """Dropout attention from autograd's own operators."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    probabilities = torch.softmax(s, -1)
    return (probabilities * keep_mask(s.shape, p, KEY) / (1 - p)) @ v


@pytest.mark.parametrize(("causal", "groups"), list(itertools.product([False, True], [1, 2, 4])))
def test_dropout_backward_equals_autograd_through_the_same_mask(causal: bool, groups: int) -> None:
    tensors = inputs(torch.float64, groups=groups, queries=9, keys=9)
    ours = scaled_dot_product_attention(*tensors, dropout_p=0.3, is_causal=causal, enable_gqa=True, key=KEY)
    assert_same(ours, plain_attention(*tensors, causal, 0.3), tensors, 1e-12)


def test_dropout_keeps_the_mean() -> None:
    q, k = torch.zeros(2, 1, 1, 8, 8)
    v = torch.ones(1, 1, 8, 8)
    outs = torch.stack(
        [scaled_dot_product_attention(q, k, v, dropout_p=0.25, key=torch.tensor(i * 2**33 + i)) for i in range(400)]
    )
    # 400 x 8 independent rows of variance p / (1 - p) / 8.
    assert abs(outs.mean().item() - 1) < 6 * (0.25 / 0.75 / 8 / 3200) ** 0.5
    assert not torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("shape", [(7, 8), (3, 7, 8), (2, 3, 4, 7, 8)])
def test_other_ranks(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    mask = torch.rand(*shape[:-2], 7, 7) > 0.2
    mask[..., 0] = True
    assert_same(
        scaled_dot_product_attention(*tensors, mask), F.scaled_dot_product_attention(*tensors, mask), tensors, 2e-5
    )


def test_leading_dimensions_broadcast() -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 7, 8, requires_grad=True)
    k = torch.randn(1, 4, 9, 8, requires_grad=True)
    v = torch.randn(2, 1, 9, 8, requires_grad=True)
    theirs = F.scaled_dot_product_attention(q, k.expand(2, -1, -1, -1), v.expand(-1, 4, -1, -1))
    assert_same(scaled_dot_product_attention(q, k, v), theirs, [q, k, v], 2e-5)


def test_other_value_width_and_scale() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, 7, d, requires_grad=True) for d in (8, 8, 12)]
    assert_same(
        scaled_dot_product_attention(*tensors, scale=0.7),
        F.scaled_dot_product_attention(*tensors, scale=0.7),
        tensors,
        2e-5,
    )


def test_a_mask_that_requires_grad_gets_its_gradient() -> None:
    tensors = inputs(torch.float64, groups=2)
    bias = torch.randn(1, 4, 7, 7, dtype=torch.float64, requires_grad=True)
    ours = scaled_dot_product_attention(*tensors, bias, enable_gqa=True)
    theirs = F.scaled_dot_product_attention(*tensors, bias, enable_gqa=True)
    assert_same(ours, theirs, [*tensors, bias], 1e-12)
    with pytest.raises(NotImplementedError, match="no gradient to its mask"):
        torch.ops.ws.attention(*inputs(torch.float64), bias, False, 1.0, 0.0, None)


def test_autocast_casts_as_torch_does() -> None:
    tensors = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = scaled_dot_product_attention(*tensors), F.scaled_dot_product_attention(*tensors)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert (ours - theirs).abs().max() <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [2, 4])
def test_fakes_announce_the_real_strides(dropout_p: float, transposed: bool, groups: int) -> None:
    tensors = [t.detach() for t in inputs(torch.float32, groups=groups, transposed=transposed, queries=5)]
    arguments = (*tensors, None, True, 0.5, dropout_p, KEY)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.ws.attention.default, arguments, test_utils=checks)
    out, logsumexp, seed, offset = torch.ops.ws.attention(*arguments)
    assert logsumexp.is_contiguous() and logsumexp.dtype == torch.float32
    backward = (torch.randn_like(out), *tensors, None, out, logsumexp, seed, offset, True, 0.5, dropout_p, KEY)
    torch.library.opcheck(torch.ops.ws.attention_backward.default, backward, test_utils=checks)


def test_views_of_a_fused_projection() -> None:
    qkv = torch.randn(2, 7, 3, 4, 8, requires_grad=True)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    ours, theirs = scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v)
    assert_same(ours, theirs, [qkv], 2e-5)
    detached = tuple(t.detach() for t in (q, k, v))
    torch.library.opcheck(
        torch.ops.ws.attention.default, (*detached, None, False, 0.3, 0.0, None), test_utils=("test_faketensor",)
    )


def test_traces_twice_with_the_backward_inside() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        tensors = [t.detach().requires_grad_() for t in (q, k, v)]
        out = scaled_dot_product_attention(*tensors, dropout_p=0.1, is_causal=True, key=key)
        return torch.autograd.grad(out.pow(2).sum(), tensors)

    real = (*[t.detach() for t in inputs(torch.float32, transposed=True)], KEY)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(t) for t in real]
    with mode:
        graph = make_fx(torch.func.functionalize(make_fx(step)(*fakes), remove="mutations"))(*fakes)
    targets = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert targets.count(torch.ops.ws.attention.default) == targets.count(torch.ops.ws.attention_backward.default) == 1
    for got, want in zip(graph(*real), step(*real), strict=True):
        assert torch.equal(got, want)


def test_second_derivatives_are_refused_by_name() -> None:
    tensors = inputs(torch.float32)
    (grad,) = torch.autograd.grad(scaled_dot_product_attention(*tensors).sum(), tensors[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative of ws::attention"):
        grad.sum().backward()


def test_bad_arguments_are_named() -> None:
    q, k, v = (t.detach() for t in inputs(torch.float32, heads=3, groups=2))
    with pytest.raises(ValueError, match="multiple of key heads"):
        torch.ops.ws.attention(q, k, v, None, False, 1.0, 0.0, None)
    with pytest.raises(ValueError, match="needs a key"):
        torch.ops.ws.attention(q[:, :2], k, v, None, False, 1.0, 0.5, None)
    with pytest.raises(ValueError, match="needs key"):
        scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    with pytest.raises(ValueError, match="must agree"):
        torch.ops.ws.attention(q, k[..., :4], v, None, False, 1.0, 0.0, None)


@pytest.mark.parametrize("dropped", [0.0, 0.25])
def test_on_a_cpu_inductor_sees_its_arithmetic_where_it_drops_out(dropped: float) -> None:
    q, k, v = (t.detach() for t in inputs(torch.float32, transposed=True))
    arguments = (q, k, v, None, True, 0.3, dropped, KEY if dropped else None)
    kept = torch.ops.ws.attention(*arguments)
    call = (torch.randn(kept[0].shape), *arguments[:4], *kept, *arguments[4:])
    for operator, given in ((torch.ops.ws.attention, arguments), (torch.ops.ws.attention_backward, call)):
        tensors = [t for t in given if isinstance(t, Tensor)]

        def again(*new: Tensor, operator: object = operator, given: tuple = given) -> tuple[Tensor, ...]:
            left = iter(new)
            return operator(*(next(left) if isinstance(t, Tensor) else t for t in given))

        traced = make_fx(again, decomposition_table=DECOMPOSITIONS)(*tensors)
        whole = any("ws.attention" in str(node.target) for node in traced.graph.nodes)
        assert whole == (dropped == 0.0)
        for ours, theirs in zip(traced(*tensors), operator(*given), strict=True):
            assert ours.shape == theirs.shape and ours.stride() == theirs.stride()
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
