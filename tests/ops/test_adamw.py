"""ws::adamw is torch.optim's AdamW and Adam, bit for bit on CPU, functional and in place; the Triton body agrees."""

import pytest
import torch
from torch import Tensor

from wholestep.ops import IN_PLACE

SHAPES = [(5, 7), (33,), (), (4, 3, 2)]
OP = torch.ops.ws.adamw.default


def random_tensors(dtype: torch.dtype, seed: int, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(device, dtype) for s in SHAPES]


def hyper_of(step: int, lr: float, weight_decay: float, device: str = "cpu") -> Tensor:
    return torch.tensor([step, lr, 0.9, 0.99, 1e-8, weight_decay], dtype=torch.float64, device=device)


@pytest.mark.parametrize("implementation", ["single", "foreach", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("decoupled", "amsgrad", "maximize", "weight_decay"),
    [(True, False, False, 0.1), (True, True, False, 0.0), (False, False, True, 0.1), (False, True, False, 0.1)],
)
def test_five_steps_are_bitwise_torch(
    implementation: str, dtype: torch.dtype, decoupled: bool, amsgrad: bool, maximize: bool, weight_decay: float
) -> None:
    parameters = [torch.nn.Parameter(p) for p in random_tensors(dtype, 0)]
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)(
        parameters,
        lr=1e-2,
        betas=(0.9, 0.99),
        weight_decay=weight_decay,
        amsgrad=amsgrad,
        maximize=maximize,
        foreach=implementation == "foreach",
        fused=implementation == "fused",
    )
    functional = [
        random_tensors(dtype, 0),
        *([torch.zeros_like(p) for p in parameters] for _ in range(3 if amsgrad else 2)),
    ]
    in_place = [[t.detach().clone() for t in group] for group in functional]
    flags = (amsgrad, maximize, decoupled, implementation)
    for step in range(1, 6):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / step
        grads = random_tensors(dtype, step)
        kept = [g.clone() for g in grads]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        clipped_norm, scale = torch.ops.ws.clip(grads, torch.tensor(1.0, dtype=torch.float64))
        assert torch.equal(clipped_norm, norm.float())
        hyper = hyper_of(step, 1e-2 / step, weight_decay)
        for state, call in ((functional, OP), (in_place, IN_PLACE[OP])):
            lists = [state[0], grads, *state[1:], *([] if amsgrad else [[]])]
            result = call(*lists, hyper, scale, *flags)
            if call is OP:
                functional = [result[i : i + len(SHAPES)] for i in range(0, len(result), len(SHAPES))]
        assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True)), "gradients must not be changed"
    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])]
    want = [parameters, *([optimizer.state[p][n] for p in parameters] for n in names)]
    for state in (functional, in_place):
        for ours, theirs in zip(state, want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_fake_agrees_and_checks_lengths() -> None:
    params = random_tensors(torch.float32, 0)
    states = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    arguments = [params, params, *states, [], hyper_of(1, 0.1, 0.0), None, False, False, True, "single"]
    torch.library.opcheck(OP, tuple(arguments), test_utils=("test_schema", "test_faketensor"))
    arguments[2] = states[0][:1]
    with (
        torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(ValueError, match="exp_avgs has 1"),
    ):
        OP(*arguments)


def test_unknown_implementation_and_empty_group() -> None:
    hyper = hyper_of(1, 0.1, 0.0)
    assert OP([], [], [], [], [], hyper, None, False, False, True, "single") == []
    one = [torch.zeros(1)]
    with pytest.raises(ValueError, match="'apex'"):
        OP(one, one, one, one, [], hyper, None, False, False, True, "apex")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_triton_matches_torch_in_eager_and_in_a_graph(dtype: torch.dtype, amsgrad: bool) -> None:
    groups = [random_tensors(dtype, 0, "cuda")] + [
        [t.abs() for t in random_tensors(dtype, 7 + i, "cuda")] for i in range(3)
    ]
    groups[0][0] = torch.randn(7, 5, device="cuda", dtype=dtype).t()  # dense, not contiguous
    if not amsgrad:
        groups[3] = []
    grads = random_tensors(dtype, 1, "cuda")
    hyper, scale = hyper_of(3, 1e-2, 0.1, "cuda"), torch.tensor(0.5, device="cuda")

    want = [[t.double().cpu() for t in group] for group in groups]
    on_host = [g.double().cpu() for g in grads]
    IN_PLACE[OP](want[0], on_host, *want[1:], hyper.cpu(), scale.cpu(), amsgrad, False, True, "single")
    eager, captured = ([[t.clone() for t in g] for g in groups] for _ in range(2))
    flags = (hyper, scale, amsgrad, False, True, "single")
    IN_PLACE[OP](eager[0], grads, *eager[1:], *flags)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        IN_PLACE[OP](captured[0], [g * 1 for g in grads], *captured[1:], *flags)
    graph.replay()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for got in (eager, captured):
        for ours, theirs in zip(got, want, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert torch.allclose(a.double().cpu(), b, rtol=tolerance, atol=tolerance)
