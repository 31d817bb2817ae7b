"""Which implementation of ws::attention is eligible, how choices are kept, and on a GPU that each one is right."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from wholestep.ops.attention import choice as choice_module
from wholestep.ops.attention import measured_choices, reference
from wholestep.ops.attention.choice import Choice, choose, disagreement, eligible
from wholestep.ops.attention.cuda import _bias
from wholestep.ops.attention.implementations import CPU_FLASH, IMPLEMENTATIONS, MATH
from wholestep.ops.attention.interface import Implementation, Signature

SIGNATURE = Signature(
    device="card",
    dtype=torch.bfloat16,
    q_shape=(2, 4, 64, 64),
    k_shape=(2, 4, 64, 64),
    v_shape=(2, 4, 64, 64),
    mask_dtype=None,
    mask_shape=None,
    causal=True,
    dropout=False,
)


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({}, {}),
        ({"mask_dtype": torch.bool, "mask_shape": (64, 64)}, {"flash": "no mask"}),
        ({"dtype": torch.float32}, {"flash": "float32", "cudnn": "float32"}),
        ({"dtype": torch.float64}, {"flash": "float64", "cudnn": "float64", "efficient": "float64"}),
        (
            {"k_shape": (2, 4, 32, 64), "v_shape": (2, 4, 32, 64)},
            {"flash": "bottom right", "cudnn": "equal query and key"},
        ),
        ({"q_shape": (2, 4, 64, 36)}, {"flash": "widths", "cudnn": "36", "efficient": "36"}),
    ],
)
def test_eligibility_on_cuda(change: dict[str, object], missing: dict[str, str]) -> None:
    usable, skipped = eligible(dataclasses.replace(SIGNATURE, **change))
    assert set(skipped) == set(missing)
    assert all(text in skipped[name] for name, text in missing.items())
    assert usable[-1] is MATH
    assert {i.name for i in usable} | set(skipped) == {"flash", "efficient", "cudnn", "math"}


def test_the_rule_on_cpu() -> None:
    q = torch.randn(1, 2, 3, 8)
    assert choose(q, q, q, None, False, 0.0) is CPU_FLASH
    assert choose(q, q, q, None, False, 0.1) is MATH
    assert choose(q, q, q[..., :4], None, False, 0.0) is MATH
    names = [row["name"] for row in measured_choices()]
    assert "cpu_flash" in names and "math" in names


def test_a_wrong_implementation_is_recognised() -> None:
    q = torch.randn(2, 4, 9, 8)
    k = torch.randn(2, 2, 9, 8)
    assert disagreement(CPU_FLASH, q, k, k, None, True) is None

    def wrong(*arguments: object) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = CPU_FLASH.backward(*arguments)
        return dq, dk * 1.2, dv

    assert "dk differs" in disagreement(dataclasses.replace(CPU_FLASH, backward=wrong), q, k, k, None, True)


def test_choices_are_kept_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path / "cache"))
    path = choice_module.choices_file()
    choice = Choice("flash", {"flash": 0.5, "math": 2.0}, {"cudnn": "why"})
    choice_module._write(path, "a", choice)
    choice_module._write(path, "b", choice)
    assert set(json.loads(path.read_text())) == {"a", "b"}
    assert [p.name for p in path.parent.iterdir()] == ["attention.json"]
    choice_module._FILE_READ.clear()
    assert choice_module._read(path)["a"] == choice
    path.write_text("{broken")
    choice_module._FILE_READ.clear()
    assert choice_module._read(path) == {}


@pytest.mark.parametrize(
    ("fits", "lacking", "rows", "kept"),
    [(8, "math", [8], True), (8, "flash", [8], False), (2, "flash", [8, 4, 2], False)],
)
def test_choices_made_in_little_memory_are_for_this_process(
    fits: int, lacking: str, rows: list[int], kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none can be tried on all rows, fewer are taken; what lacked memory may win in another process."""
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(choice_module.torch.cuda, "get_rng_state", lambda device: None)
    monkeypatch.setattr(choice_module.torch.cuda, "set_rng_state", lambda state, device: None)
    monkeypatch.setattr(choice_module.torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        choice_module, "_time", lambda implementation, *rest: {"efficient": 1.0}.get(implementation.name, 2.0)
    )
    tried: list[int] = []

    def disagree(
        implementation: Implementation, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
    ) -> None:
        tried.append(q.shape[0])
        assert q.shape[0] == k.shape[0] == v.shape[0]
        if q.shape[0] > fits or implementation.name == lacking:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(choice_module, "disagreement", disagree)
    q = torch.zeros(8, 4, 64, 64, dtype=torch.bfloat16)
    signature = dataclasses.replace(SIGNATURE, q_shape=tuple(q.shape))
    choice = choice_module._decide(signature, q, q, q, None, True, 0.0)
    assert choice.name == "efficient" and "out of memory" in choice.skipped[lacking]
    assert sorted(set(tried), reverse=True) == rows
    assert choice_module.choices_file().exists() is kept


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(7, 9), (2, 1, 7, 9), (2, 1, 1, 9), (2, 4, 7, 1)])
def test_bias_for_cuda_kernels_is_the_mask_made_finite(kind: str, causal: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 7, 8), torch.randn(2, 4, 9, 8)
    mask: Tensor = torch.rand(shape) > 0.5
    if kind == "float":
        mask = torch.randn(shape).masked_fill(~mask, float("-inf"))
    bias = _bias(mask, causal, q, 9, 8)
    assert bias.values is not None and bias.rows is not None and not bias.causal
    assert bias.values.shape == (2, 4, 7, 9) and bias.values.stride(-1) == 1 and bias.values.isfinite().all()
    assert all(s % 8 == 0 for s in bias.values.stride()[:3])
    want, _ = reference.forward(q, k, k, mask, causal, 0.3, 0.0, None)
    got, _ = reference.forward(q, k, k, bias.values, False, 0.3, 0.0, None)
    assert torch.allclose(got.masked_fill(~bias.rows, 0.0), want, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", ["plain", "causal", "grouped", "bool", "float", "odd"])
def test_cuda_implementations_against_float64(name: str, transposed: bool, case: str) -> None:
    torch.manual_seed(0)
    implementation = IMPLEMENTATIONS[name]
    groups, length = (2 if case == "grouped" else 4), (33 if case == "odd" else 64)
    causal = case in ("causal", "grouped", "odd")
    q, k, v = (torch.randn(2, length, h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, groups, groups))
    q, k, v = (t.transpose(1, 2) if transposed else t.transpose(1, 2).contiguous() for t in (q, k, v))
    mask = None
    if case in ("bool", "float"):
        mask = torch.rand(2, 1, length, length, device="cuda") > 0.3
        mask[:, :, 3] = False
        mask = torch.zeros(mask.shape, device="cuda").masked_fill(~mask, float("-inf")) if case == "float" else mask
    usable, skipped = eligible(choice_module.signature_of(q, k, v, mask, causal, 0.0))
    if implementation not in usable:
        pytest.skip(skipped[name])
    grad = torch.randn_like(q)
    zero = torch.zeros((), dtype=torch.int64, device="cuda")
    out, logsumexp, _, _ = implementation.forward(q, k, v, mask, causal, 0.125, 0.0, None)
    grads = implementation.backward(grad, q, k, v, mask, out, logsumexp, zero, zero, causal, 0.125, 0.0, None)
    wide = [t.double() for t in (q, k, v)]
    want, want_logsumexp = reference.forward(*wide, mask, causal, 0.125, 0.0, None)
    want_grads = reference.backward(grad.double(), *wide, mask, want, want_logsumexp, causal, 0.125, 0.0, None)
    for got, expected in zip((out, *grads), (want, *want_grads), strict=True):
        assert got.shape == expected.shape
        assert ((got.double() - expected).norm() / expected.norm()).item() < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient"])
@pytest.mark.parametrize("captured", [False, True])
def test_cuda_dropout_backward_uses_the_mask_of_the_forward(name: str, captured: bool) -> None:
    """out is linear in v, so <grad, out(v)> == <dv, v> holds exactly when forward and backward drop the same
    entries."""
    torch.manual_seed(0)
    implementation = IMPLEMENTATIONS[name]
    q, k, v, grad = (torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))

    def run() -> tuple[Tensor, Tensor]:
        out, logsumexp, seed, offset = implementation.forward(q, k, v, None, False, 0.125, 0.5, None)
        assert seed.shape == offset.shape == () and seed.device == q.device
        dv = implementation.backward(grad, q, k, v, None, out, logsumexp, seed, offset, False, 0.125, 0.5, None)[2]
        return out, dv

    out, dv = run()
    if captured:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, dv = run()
        graph.replay()
        first = out.clone()
        graph.replay()
        assert not torch.equal(first, out), "each replay draws another mask"
    left, right = (grad.double() * out.double()).sum(), (dv.double() * v.double()).sum()
    assert abs((left - right) / (grad.double() * out.double()).norm()).item() < 0.05


@pytest.mark.gpu
def test_cuda_choice_is_measured_once_and_runs_in_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path))
    q, k, v = (torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    before = torch.cuda.get_rng_state()
    out = torch.ops.ws.attention(q, k, v, None, True, 0.125, 0.0, None)[0]
    assert torch.equal(before, torch.cuda.get_rng_state())
    (row,) = json.loads((tmp_path / "choices" / "attention.json").read_text()).values()
    assert row["name"] in row["milliseconds"] and len(row["milliseconds"]) + len(row["skipped"]) == 4
    torch.autograd.grad(out.sum(), (q, k, v))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        captured = torch.ops.ws.attention(q, k, v, None, True, 0.125, 0.0, None)[0]
    graph.replay()
    assert torch.equal(captured, out)
