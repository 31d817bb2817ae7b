"""Dropout and attention without a stored mask: reproducible, inactive outside training, with the gradient of their mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.nn.lean_models import saved_bytes
from tests.ops.interpreter import assert_equal_when_interpreted
from torch import nn

import wholestep
from wholestep.errors import BadOption
from wholestep.nn.keyed_dropout import draw_key, drop
from wholestep.ops.random_bits import keep_mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_what_is_kept_is_scaled_and_its_gradient_with_it(dtype: torch.dtype, p: float) -> None:
    x = torch.ones(50, 41, dtype=dtype, requires_grad=True)
    out = wholestep.nn.dropout(x, p)
    out.backward(torch.full_like(out, 2.0))
    assert torch.equal(x.grad, 2 * out.detach())
    assert abs((out != 0).float().mean().item() - (1 - p)) < 0.05
    assert out.dtype == dtype and (p == 1.0 or out.max().item() == torch.tensor(1 / (1 - p), dtype=dtype).item())


def test_a_seed_repeats_a_run_and_calls_differ() -> None:
    x = torch.ones(40, 40)
    torch.manual_seed(1)
    first, second = wholestep.nn.dropout(x, 0.5), wholestep.nn.dropout(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(first, wholestep.nn.dropout(x, 0.5))
    assert not torch.equal(first, second)


def test_eight_bytes_are_kept_instead_of_a_mask() -> None:
    x = torch.randn(30, 30, requires_grad=True)
    assert saved_bytes(wholestep.nn.Dropout(0.5), x) == 8
    assert saved_bytes(nn.Dropout(0.5), x) >= x.numel()


def test_gelu_dropout_linear_keeps_the_input_of_the_gelu() -> None:
    model = nn.Sequential(nn.GELU(), nn.Dropout(0.5), nn.Linear(30, 4))
    x = torch.randn(20, 30, requires_grad=True)
    wholestep.nn.convert(model)
    assert saved_bytes(model, x) == x.numel() * 4 + 8
    torch.manual_seed(2)
    model(x).sum().backward()
    torch.manual_seed(2)
    keep = keep_mask(x.shape, 0.5, draw_key(x.device))
    dropped = torch.where(keep, F.gelu(x.detach()) * 2.0, torch.zeros(()))
    torch.testing.assert_close(model[2].weight.grad, dropped.sum(0).expand(4, 30))


def test_the_random_state_is_the_users() -> None:
    state = torch.get_rng_state()
    wholestep.nn.dropout(torch.ones(3), 0.5, training=False)
    wholestep.nn.dropout(torch.ones(3), 0.0)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_attention_is_torchs(causal: bool, heads: int) -> None:
    found = []
    for function in (wholestep.nn.scaled_dot_product_attention, F.scaled_dot_product_attention):
        torch.manual_seed(0)
        q = torch.randn(2, 3, 7, 8, requires_grad=True)
        k, v = (torch.randn(2, heads, 7, 8, requires_grad=True) for _ in range(2))
        out = function(q, k, v, is_causal=causal, enable_gqa=heads == 1)
        out.square().sum().backward()
        found.append((out.detach(), q.grad, k.grad, v.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_attention_with_dropout_keeps_no_probabilities() -> None:
    q = torch.randn(1, 2, 64, 8, requires_grad=True)

    class Attention(nn.Module):
        def __init__(self, function: object) -> None:
            super().__init__()
            self.function = function

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return self.function(q, q, q, dropout_p=0.2)  # type: ignore[operator]

    small = saved_bytes(Attention(wholestep.nn.scaled_dot_product_attention), q)
    assert small < 3 * q.numel() * 4
    assert saved_bytes(Attention(F.scaled_dot_product_attention), q) > small + 2 * 64 * 64 * 4
    torch.manual_seed(0)
    first = wholestep.nn.scaled_dot_product_attention(q, q, q, dropout_p=0.2)
    torch.manual_seed(0)
    assert torch.equal(first, wholestep.nn.scaled_dot_product_attention(q, q, q, dropout_p=0.2))
    assert not torch.allclose(first, F.scaled_dot_product_attention(q, q, q))


INTERPRETED = """
import torch, wholestep.ops
from wholestep.nn.dropout_triton import launch
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for size, p, key in ((1, 0.5, 1), (1500, 0.1, -3), (2048, 0.9, 2**40 + 7), (0, 0.5, 5)):
        x = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
        x[:1] = float("inf")
        key = torch.tensor(key)
        p = p if dtype != torch.bfloat16 else 0.75  # the interpreter truncates to bf16; a factor of 4 needs no rounding
        assert torch.equal(launch(x, p, key), torch.ops.ws.dropout(x, p, key)), (dtype, size, p)
print("equal")
"""


def test_the_triton_kernel_has_the_bits_of_the_operator() -> None:
    assert_equal_when_interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_cuda_the_kernel_has_the_bits_of_the_cpu_and_its_gradient_the_same_mask(dtype: torch.dtype) -> None:
    key, x = draw_key(torch.device("cpu")), torch.randn(333, 70).to(dtype)
    moved = x.cuda().t().requires_grad_()  # not contiguous
    out = drop(moved, 0.3, key.cuda())
    assert torch.equal(out.cpu(), torch.ops.ws.dropout(x.t().contiguous(), 0.3, key))
    out.backward(moved.detach())
    assert torch.equal(moved.grad, out.detach())


def test_a_probability_outside_0_and_1_is_refused() -> None:
    with pytest.raises(BadOption, match=r"between 0 and 1, got 1\.5"):
        wholestep.nn.dropout(torch.ones(3), 1.5)
