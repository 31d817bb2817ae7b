"""ws::clip equals torch.nn.utils.clip_grad_norm_ bit for bit on CPU."""

import pytest
import torch
from torch import Tensor

from wholestep.ops.multi_tensor import scaled_grad


def parameters_with(grads: list[Tensor]) -> list[torch.nn.Parameter]:
    parameters = []
    for grad in grads:
        parameter = torch.nn.Parameter(torch.zeros_like(grad))
        parameter.grad = grad.clone()
        parameters.append(parameter)
    return parameters


@pytest.mark.parametrize(
    "dtypes", [["float32"], ["bfloat16"], ["float64"], ["bfloat16", "float32"], ["float16", "float32"]]
)
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 3.7, 1e3])
def test_bitwise_torch(dtypes: list[str], max_norm: float) -> None:
    torch.manual_seed(0)
    shapes = [(17, 5), (3,), (64, 64), ()]
    grads = [torch.randn(s, dtype=getattr(torch, dtypes[i % len(dtypes)])) for i, s in enumerate(shapes)]
    parameters = parameters_with(grads)
    want = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    norm, scale = torch.ops.ws.clip(grads, torch.tensor(max_norm, dtype=torch.float64))
    assert norm.dtype == scale.dtype == (torch.float64 if dtypes == ["float64"] else torch.float32)
    assert norm.shape == scale.shape == ()
    assert torch.equal(norm, want.to(norm.dtype))
    scaled = [scaled_grad(g, g, scale) for g in grads]
    for grad, parameter in zip(scaled, parameters, strict=True):
        assert grad.dtype == parameter.grad.dtype
        assert torch.equal(grad, parameter.grad)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_norm", [0.1, 3.7, 1e3])
def test_narrow_gradients_that_count_as_float32(narrow: torch.dtype, max_norm: float) -> None:
    """The bits are those of the widened gradients, in the same order, with float32 ones between."""
    torch.manual_seed(0)
    grads = [
        torch.randn(17, 5).to(narrow),
        torch.randn(3),
        torch.randn(64, 65).to(narrow).t(),
        torch.randn(()).to(narrow),
    ]
    limit = torch.tensor(max_norm, dtype=torch.float64)
    want = torch.ops.ws.clip([g.float() for g in grads], limit)
    got = torch.ops.ws.clip(grads, limit, torch.float32)
    assert got[0].dtype == got[1].dtype == torch.float32
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    arguments = (grads, limit, torch.float32)
    torch.library.opcheck(torch.ops.ws.clip.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_infinite_narrow_gradients_have_an_infinite_norm() -> None:
    grads = [torch.tensor([1.0, float("inf")]).bfloat16(), torch.ones(2)]
    norm, _ = torch.ops.ws.clip(grads, torch.tensor(1.0, dtype=torch.float64), torch.float32)
    assert not norm.isfinite()
    large = [torch.full((4,), 3e38).bfloat16()]
    want = torch.nn.utils.get_total_norm([g.float() for g in large])
    assert torch.equal(torch.ops.ws.clip(large, torch.tensor(1.0, dtype=torch.float64), torch.float32)[0], want)


def test_no_gradients() -> None:
    norm, scale = torch.ops.ws.clip([], torch.tensor(1.0, dtype=torch.float64))
    assert norm.item() == 0.0 and scale.item() == 1.0


def test_fake_agrees() -> None:
    grads = [torch.randn(3, dtype=torch.bfloat16), torch.randn(4)]
    arguments = (grads, torch.tensor(1.0, dtype=torch.float64))
    torch.library.opcheck(torch.ops.ws.clip.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
def test_cuda_can_be_captured() -> None:
    grads = [torch.randn(100, device="cuda"), torch.randn(7, 9, device="cuda")]
    max_norm = torch.tensor(1.0, dtype=torch.float64, device="cuda")
    want = torch.ops.ws.clip(grads, max_norm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.ops.ws.clip(grads, max_norm)
    graph.replay()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.gpu
def test_narrow_gradients_on_a_gpu() -> None:
    grads = [torch.randn(100, 3000, device="cuda").bfloat16(), torch.randn(7, 9, device="cuda")]
    grads += [torch.randn(n, device="cuda").bfloat16() for n in (1, 70000, 333)]
    max_norm = torch.tensor(1.0, dtype=torch.float64, device="cuda")
    want = torch.ops.ws.clip([g.float() for g in grads], max_norm)
    got = torch.ops.ws.clip(grads, max_norm, torch.float32)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
