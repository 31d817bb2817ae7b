"""An origin is used only where it still tells how to compute the tensor it travels on."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep
from wholestep.errors import WholestepError
from wholestep.nn import origin
from wholestep.nn.activations import gated
from wholestep.nn.norms import rms_norm_in_float
from wholestep.nn.origin import origin_of
from wholestep.nn.replay import replayed


def normalised(x: Tensor) -> Tensor:
    return wholestep.nn.layer_norm(x, x.shape[-1:])


def gradient_of_weight(change: object) -> tuple[Tensor, Tensor]:
    """(lean, plain) gradients of a Linear after a norm whose output went through `change`."""
    found = []
    for norm, linear in ((normalised, wholestep.nn.linear), (lambda x: F.layer_norm(x, x.shape[-1:]), F.linear)):
        weight = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
        linear(change(norm(x)), weight).square().sum().backward()  # type: ignore[operator]
        found.append(weight.grad)
    return found[0], found[1]


CHANGES = {
    "nothing": lambda y: y,
    "written to in place": lambda y: y.mul_(2.0),
    "a view written to": lambda y: (y[:2].zero_(), y)[1],
    "a view": lambda y: y[1:],
    "a sum": lambda y: y + 1,
    "another dtype": lambda y: y.double().float(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_gradient_is_right_whatever_happens_between_norm_and_linear(name: str) -> None:
    lean, plain = gradient_of_weight(CHANGES[name])
    assert torch.equal(lean, plain)


def test_where_an_origin_holds() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    assert origin_of(normalised(x)) is not None
    assert origin_of(normalised(x.detach())) is None, "nothing is kept for a tensor that takes no gradient"
    assert origin_of(normalised(x)[:1]) is None
    assert origin_of(normalised(x).mul_(1.0)) is None
    with torch.no_grad():
        assert origin_of(normalised(x)) is None
    y = normalised(x)
    with torch.autograd.graph.save_on_cpu():
        assert origin_of(y) is None and origin_of(normalised(x)) is not None


def test_nothing_is_kept_alive_after_the_backward() -> None:
    x = torch.randn(3, 4, requires_grad=True) * 1.0
    weight = nn.Parameter(torch.randn(2, 4))
    out = wholestep.nn.linear(normalised(x), weight)
    gone = weakref.ref(x)
    del x
    out.sum().backward()
    gc.collect()
    assert gone() is None, "the input of the norm outlives the backward"


def test_an_input_overwritten_before_the_backward_is_an_error_as_in_torch() -> None:
    x = torch.randn(3, 4, requires_grad=True) * 1.0
    out = wholestep.nn.linear(normalised(x), nn.Parameter(torch.randn(2, 4)))
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_second_backward_and_a_retained_graph() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), nn.Parameter(torch.randn(2, 4))
    out = wholestep.nn.linear(wholestep.nn.gelu(x), weight).sum()
    out.backward(retain_graph=True)
    first = weight.grad.clone()
    out.backward()
    assert torch.equal(weight.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_a_copied_weight_refuses_a_second_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "_distributed", lambda: True)
    scale, weight = nn.Parameter(torch.rand(4)), nn.Parameter(torch.randn(2, 4))
    x = torch.randn(3, 4, requires_grad=True)
    out = wholestep.nn.linear(wholestep.nn.layer_norm(x, (4,), scale), weight)
    with pytest.raises(WholestepError, match=r"second derivative .*restore\(model\)"):
        torch.autograd.grad(out.square().sum(), weight, create_graph=True)
    (grad,) = torch.autograd.grad(wholestep.nn.linear(wholestep.nn.layer_norm(x, (4,), scale), weight).sum(), weight)
    torch.testing.assert_close(grad, F.layer_norm(x, (4,), scale).detach().sum(0).expand(2, 4))


def test_a_function_runs_again_under_the_autocast_it_ran_under() -> None:
    def mixed(x: Tensor, inner: Tensor) -> Tensor:
        return torch.tanh(x @ inner)

    found = []
    for lean in (True, False):
        torch.manual_seed(0)
        x, inner, weight = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))
        with torch.autocast("cpu", torch.bfloat16):
            y = replayed(mixed, x, inner) if lean else mixed(x, inner)
            out = (wholestep.nn.linear if lean else F.linear)(y, weight)
        out.float().square().sum().backward()
        found.append([out.detach(), x.grad, inner.grad, weight.grad])
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*found, strict=True))


def test_an_input_overwritten_before_the_linear_makes_no_wrong_gradient() -> None:
    x = torch.randn(3, 4)  # takes no gradient, and a norm whose bias alone is trained does not need it either
    bias, weight = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.randn(2, 4))
    y = wholestep.nn.layer_norm(x, (4,), None, bias)
    expected = y.detach().sum(0).expand(2, 4)
    x.mul_(torch.arange(4.0))
    out = wholestep.nn.linear(y, weight)
    (grad,) = torch.autograd.grad(out.sum(), weight)
    torch.testing.assert_close(grad, expected)


def test_meta_tensors_and_subclasses_take_the_plain_way() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    wholestep.nn.convert(model)
    model.to("meta")(torch.randn(3, 4, device="meta")).sum().backward()
    assert model[1].weight.grad.shape == (4, 4)

    class Marked(Tensor):
        """A subclass with rules of its own."""

    y = torch.randn(3, 4).as_subclass(Marked).requires_grad_()
    assert origin_of(normalised(y)) is None


def test_a_trace_holds_no_python_function() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 2))
    wholestep.nn.convert(model)
    traced = torch.jit.trace(model, torch.randn(3, 4))
    assert "PythonOp" not in str(traced.inlined_graph)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(8,), (3, 5), (2, 5, 33)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_derivatives_by_hand_have_the_bits_of_autograd(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    x, up, grad = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
    weight = torch.randn(shape[-1:], device=device).to(dtype).requires_grad_()
    found = []
    for by_hand in (True, False):
        out = rms_norm_in_float(x, weight, 1e-6, by_hand=by_hand)
        activation = F.silu if by_hand else lambda t: F.silu(t)
        gate = gated(x, up, activation)
        found.append([*torch.autograd.grad(out, (x, weight), grad), *torch.autograd.grad(gate, (x, up), grad)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_layers_with_one_input_compute_it_again_once() -> None:
    calls: list[int] = []

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return torch.tanh(x) * 2

    x = torch.randn(3, 4, requires_grad=True)
    weights = [nn.Parameter(torch.randn(2, 4)) for _ in range(3)]
    y = replayed(counted, x)
    loss = sum(wholestep.nn.linear(y, w).square().sum() for w in weights)
    calls.clear()
    loss.backward(retain_graph=True)
    assert len(calls) == 2  # once for the three weights, once under autograd for x
    first = [w.grad.clone() for w in weights]
    torch.autograd.grad(loss, weights[1], retain_graph=True)  # one reader alone, then all again
    loss.backward()
    assert all(torch.equal(w.grad, 2 * g) for w, g in zip(weights, first, strict=True))
    plain = [torch.autograd.grad(F.linear(counted(x), w).square().sum(), w)[0] for w in weights]
    assert all(torch.equal(a, b) for a, b in zip(first, plain, strict=True))
