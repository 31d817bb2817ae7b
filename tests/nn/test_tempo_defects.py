"""The defects of a published package of in-place layers, each held against ours.

Its GELU gradient had a wrong sign between 1.12 and 3.0; its dropout was active in eval mode; its automatic swap gave the
model fresh layers, without their trained weights, eps, dtype or device; its LayerNorm divided by gamma.
"""

from __future__ import annotations

import pytest
import torch
from tests.nn.lean_models import Block, differing, outcome, twins
from torch import nn

import wholestep


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_gelu_gradient_is_right_everywhere(approximate: str) -> None:
    # -0.7518 is the minimum, where an inverse has no slope; (1.124, 3.004) is where the published sign was wrong
    x = torch.cat([torch.linspace(-8, 8, 4001), torch.tensor([-0.751791631, 1.124, 2.0, 3.004, 0.0])]).double()
    x.requires_grad_()
    weight = torch.eye(1, dtype=torch.float64).requires_grad_()
    wholestep.nn.gelu_linear(x[:, None], weight, approximate=approximate).sum().backward()
    z = x.detach()
    if approximate == "none":
        exact = 0.5 * (1 + torch.erf(z / 2**0.5)) + z * torch.exp(-z * z / 2) / (2 * torch.pi) ** 0.5
    else:
        inner = (2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)
        slope = (2 / torch.pi) ** 0.5 * (1 + 3 * 0.044715 * z**2)
        exact = 0.5 * (1 + torch.tanh(inner)) + 0.5 * z * (1 - torch.tanh(inner) ** 2) * slope
    torch.testing.assert_close(x.grad, exact, rtol=0, atol=1e-12)


def test_nothing_is_dropped_in_eval_mode() -> None:
    plain, lean = twins(lambda: Block(p=0.5))
    x = torch.randn(2, 5, 24)
    state = torch.get_rng_state()
    assert differing(outcome(plain.eval(), x), outcome(lean.eval(), x)) == []
    assert torch.equal(state, torch.get_rng_state()), "eval mode drew a random number"
    q = torch.randn(1, 2, 5, 8)
    dropped = wholestep.nn.scaled_dot_product_attention(q, q, q, dropout_p=0.9, training=False)
    torch.testing.assert_close(dropped, torch.nn.functional.scaled_dot_product_attention(q, q, q))


def test_dropout_is_active_in_training() -> None:
    lean = twins(lambda: Block(p=0.5))[1].train()
    x = torch.randn(2, 5, 24)
    assert not torch.equal(lean(x), lean(x))


def test_a_swap_keeps_trained_weights_and_all_settings() -> None:
    norm = nn.LayerNorm(6, eps=0.3, dtype=torch.float64)
    norm.weight.data.copy_(torch.arange(6))
    norm.bias.requires_grad_(False)
    model = nn.Sequential(norm, nn.Linear(6, 4, dtype=torch.float64)).eval()
    before = {name: (p, p.requires_grad, p.dtype, p.data_ptr()) for name, p in model.named_parameters()}
    wholestep.nn.convert(model)
    after = {name: (p, p.requires_grad, p.dtype, p.data_ptr()) for name, p in model.named_parameters()}
    assert list(before) == list(after) and all(before[n][0] is after[n][0] for n in before)
    assert all(before[n][1:] == after[n][1:] for n in before)
    assert model[0].eps == 0.3 and not model[0].training and model[0] is norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_with_zero_gamma_has_finite_and_right_gradients(dtype: torch.dtype) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4), nn.RMSNorm(4), nn.Linear(4, 3))
        with torch.no_grad():
            model[0].weight.zero_()
            model[2].weight[:2] = 0.0
        return model

    plain, lean = twins(make, dtype)
    x = torch.randn(3, 6, dtype=dtype)
    ours = outcome(lean, x)
    assert all(torch.isfinite(value).all() for value in ours.values())
    assert ours["0.weight"].abs().max() > 0, "gamma learns nothing"
    for name, value in outcome(plain, x).items():
        torch.testing.assert_close(ours[name], value, msg=name)
