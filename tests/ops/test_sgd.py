"""ws::sgd is torch.optim's SGD, bit for bit on CPU, functional and in place."""

import pytest
import torch
from torch import Tensor

from wholestep.ops import IN_PLACE

SHAPES = [(5, 7), (33,), ()]
OP = torch.ops.ws.sgd.default


def random_tensors(dtype: torch.dtype, seed: int, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(device, dtype) for s in SHAPES]


def hyper_of(lr: float, momentum: float, dampening: float, weight_decay: float, device: str = "cpu") -> Tensor:
    return torch.tensor([lr, momentum, dampening, weight_decay], dtype=torch.float64, device=device)


@pytest.mark.parametrize("implementation", ["single", "foreach", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov", "weight_decay", "maximize"),
    [
        (0.0, 0.0, False, 0.1, False),
        (0.9, 0.5, False, 0.0, True),
        (0.9, 0.0, True, 0.0, False),
        (0.9, 0.0, True, 0.1, False),
    ],
)
def test_five_steps_are_bitwise_torch(
    implementation: str,
    dtype: torch.dtype,
    clipped: bool,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    maximize: bool,
) -> None:
    parameters = [torch.nn.Parameter(p) for p in random_tensors(dtype, 0)]
    # torch's own fused CPU kernel is wrong for bf16: there we follow its single-tensor code.
    torch_fused = implementation == "fused" and dtype != torch.bfloat16
    optimizer = torch.optim.SGD(
        parameters,
        lr=0.1,
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        weight_decay=weight_decay,
        maximize=maximize,
        foreach=implementation == "foreach",
        fused=torch_fused,
    )
    params = random_tensors(dtype, 0)
    buffers = [torch.zeros_like(p) for p in params] if momentum else []
    held = [t.clone() for t in params], [t.clone() for t in buffers]
    for step in range(1, 6):
        grads = random_tensors(dtype, step)
        kept = [g.clone() for g in grads]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        scale = None
        if clipped:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            scale = torch.ops.ws.clip(grads, torch.tensor(1.0, dtype=torch.float64))[1]
        optimizer.step()
        hyper = hyper_of(0.1, momentum, 0.0 if step == 1 else dampening, weight_decay)
        result = OP(params, grads, buffers, hyper, scale, nesterov, maximize, implementation)
        params, buffers = result[: len(SHAPES)], result[len(SHAPES) :]
        IN_PLACE[OP](held[0], grads, held[1], hyper, scale, nesterov, maximize, implementation)
        assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True)), "gradients must not be changed"
    want = [optimizer.state[p]["momentum_buffer"] for p in parameters] if momentum else []
    for got_params, got_buffers in ((params, buffers), held):
        assert all(torch.equal(a, b) for a, b in zip(got_params, parameters, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(got_buffers, want, strict=True))


def test_fake_agrees() -> None:
    params = random_tensors(torch.float32, 0)
    for buffers in ([], [torch.zeros_like(p) for p in params]):
        arguments = (params, params, buffers, hyper_of(0.1, 0.9, 0.0, 0.0), None, False, False, "single")
        torch.library.opcheck(OP, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_triton_matches_torch(dtype: torch.dtype, momentum: float) -> None:
    params, grads = random_tensors(dtype, 0, "cuda"), random_tensors(dtype, 1, "cuda")
    buffers = random_tensors(dtype, 2, "cuda") if momentum else []
    hyper, scale = hyper_of(0.1, momentum, 0.1, 0.1, "cuda"), torch.tensor(0.5, device="cuda")
    want = [[t.double().cpu() for t in group] for group in (params, grads, buffers)]
    IN_PLACE[OP](want[0], want[1], want[2], hyper.cpu(), scale.cpu(), False, False, "single")
    got = OP(params, grads, buffers, hyper, scale, False, False, "single")
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for ours, theirs in zip(got, [*want[0], *want[2]], strict=True):
        assert torch.allclose(ours.double().cpu(), theirs, rtol=tolerance, atol=tolerance)
