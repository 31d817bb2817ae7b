"""ws::dropout: mask, gradient, tracing, and equal bits when compiled."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from wholestep.ops import DECOMPOSITIONS
from wholestep.ops.dropout import reference
from wholestep.ops.random_bits import keep_mask

KEY = torch.tensor(0x1234_5678_9ABC_DEF, dtype=torch.int64)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype: torch.dtype) -> None:
    x = torch.randn(7, 33, dtype=dtype)
    out = torch.ops.ws.dropout(x, 0.25, KEY)
    kept = keep_mask(x.shape, 0.25, KEY)
    assert torch.equal(out, torch.where(kept, x * (1 / 0.75), 0))
    assert torch.equal(out, reference(x, 0.25, KEY))


def test_the_bounds_of_p() -> None:
    x = torch.randn(5, 6)
    same = torch.ops.ws.dropout(x, 0.0, KEY)
    assert torch.equal(same, x) and same.data_ptr() != x.data_ptr()
    assert not torch.ops.ws.dropout(x, 1.0, KEY).any()
    with pytest.raises(ValueError, match=r"1\.5"):
        torch.ops.ws.dropout(x, 1.5, KEY)


def test_dropped_infinities_become_zero() -> None:
    out = torch.ops.ws.dropout(torch.full((1000,), float("inf")), 0.5, KEY)
    assert not out.isnan().any() and (out == 0).any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 6).t(),
        lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
        lambda: torch.randn(4, 1).expand(4, 5),
        lambda: torch.randn(4, 10)[:, ::2],
        lambda: torch.randn(()),
        lambda: torch.randn(0, 3),
    ],
)
def test_layouts_follow_the_fake_and_logical_order(make: Callable[[], Tensor]) -> None:
    x = make()
    out = torch.ops.ws.dropout(x, 0.5, KEY)
    assert torch.equal(out, torch.ops.ws.dropout(x.contiguous(), 0.5, KEY))
    assert out.stride() == torch.empty_like(x).stride()
    torch.library.opcheck(torch.ops.ws.dropout.default, (x, 0.5, KEY), test_utils=("test_schema", "test_faketensor"))


def test_gradient_uses_the_same_mask_and_can_be_differentiated_again() -> None:
    x = torch.randn(50, dtype=torch.float64, requires_grad=True)
    kept = keep_mask((50,), 0.3, KEY).double() / 0.7
    (grad,) = torch.autograd.grad(torch.ops.ws.dropout(x**3, 0.3, KEY).sum(), x, create_graph=True)
    assert torch.allclose(grad, 3 * x**2 * kept)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert torch.allclose(second, 6 * x * kept)
    assert torch.autograd.gradgradcheck(lambda t: torch.ops.ws.dropout(t, 0.3, KEY), (x,))


def test_traces_twice_to_a_functional_graph_with_the_gradient_inside() -> None:
    def step(x: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        out = torch.ops.ws.dropout(x, 0.5, key)
        (grad,) = torch.autograd.grad(out.pow(2).sum(), x)
        return out.detach(), grad.add_(1)

    mode = FakeTensorMode()
    fakes = (mode.from_tensor(torch.randn(3, 4)), mode.from_tensor(KEY))
    with mode:
        first = make_fx(step)(*fakes)
        second = make_fx(torch.func.functionalize(first, remove="mutations"))(*fakes)
    targets = [n.target for n in second.graph.nodes if n.op == "call_function"]
    assert targets.count(torch.ops.ws.dropout.default) == 2
    assert not any(getattr(t, "_schema", None) is not None and t._schema.is_mutable for t in targets)
    x = torch.randn(3, 4)
    for got, want in zip(second(x, KEY), step(x, KEY), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("make", "p"),
    [
        (lambda: torch.randn(1), 0.5),
        (lambda: torch.randn(7), 0.1),
        (lambda: torch.randn(1023), 0.1),
        (lambda: torch.randn(33, 31).t(), 0.3),
        (lambda: torch.randn(3, 5, 7, dtype=torch.bfloat16).permute(2, 0, 1), 0.3),
    ],
)
def test_inductor_draws_the_same_bits(make: Callable[[], Tensor], p: float) -> None:
    x = make()

    def block(x: Tensor, key: Tensor) -> Tensor:
        return torch.ops.ws.dropout(x, p, key)

    traced = make_fx(block, decomposition_table=DECOMPOSITIONS)(x, KEY)
    assert not any("ws" in str(n.target) for n in traced.graph.nodes)
    compiled = torch.compile(traced)
    for key in (KEY, torch.tensor(-5, dtype=torch.int64)):
        assert torch.equal(compiled(x, key), torch.ops.ws.dropout(x, p, key))


def test_inductor_fuses_it_in_one_kernel() -> None:
    from torch._inductor.utils import run_and_get_code

    def block(x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        return torch.ops.ws.dropout(torch.relu(x), 0.1, key) + y

    arguments = (torch.randn(64, 32), torch.randn(64, 32), KEY)
    traced = make_fx(block, decomposition_table=DECOMPOSITIONS)(*arguments)
    out, (code, *_) = run_and_get_code(torch.compile(traced), *arguments)
    assert torch.allclose(out, block(*arguments))
    assert code.count("async_compile.cpp_pybinding") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_draws_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    x = torch.randn(33, 129, dtype=dtype)
    want = torch.ops.ws.dropout(x, 0.1, KEY)
    assert torch.equal(torch.ops.ws.dropout(x.cuda(), 0.1, KEY.cuda()).cpu(), want)
    traced = make_fx(lambda a, k: torch.ops.ws.dropout(a, 0.1, k), decomposition_table=DECOMPOSITIONS)(
        x.cuda(), KEY.cuda()
    )
    assert torch.equal(torch.compile(traced)(x.cuda(), KEY.cuda()).cpu(), want)
