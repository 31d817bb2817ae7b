"""Which implementation of ws::attention is eligible, how choices are kept, and on a GPU that each one is right."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from wholestep.errors import BadOption
from wholestep.ops import tuner as tuner_module
from wholestep.ops.attention import choice as choice_module
from wholestep.ops.attention import reference, trial
from wholestep.ops.attention.choice import choose, question, signature_of
from wholestep.ops.attention.cuda import _bias
from wholestep.ops.attention.implementations import CPU_FLASH, IMPLEMENTATIONS, MATH
from wholestep.ops.attention.interface import Asked, Implementation, Kept, Signature
from wholestep.ops.attention.trial import disagreement, random_like, random_mask, stand_in
from wholestep.ops.tuner import TUNER, Candidate, Tuner

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


def eligible(signature: Signature) -> tuple[list[Candidate], dict[str, str]]:
    nothing = torch.empty(0)
    return question(signature, Asked(nothing, nothing, nothing)).supporting()


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
    assert skipped.pop("cpu_flash") == "it runs on cpu, the call is on cuda"
    assert set(skipped) == set(missing)
    assert all(text in skipped[name] for name, text in missing.items())
    assert usable[-1].name == MATH.name
    assert {i.name for i in usable} | set(skipped) == {"flash", "efficient", "cudnn", "math"}


def test_the_rule_on_cpu() -> None:
    q = torch.randn(1, 2, 3, 8)
    assert choose(Asked(q, q, q)) is CPU_FLASH
    assert choose(Asked(q, q, q, dropout_p=0.1)) is MATH
    assert choose(Asked(q, q, q[..., :4])) is MATH
    names = {choice.name for (what, _), choice in TUNER.choices.items() if what == "attention"}
    assert {"cpu_flash", "math"} <= names


def test_a_wrong_implementation_is_recognised() -> None:
    q = torch.randn(2, 4, 9, 8)
    k = torch.randn(2, 2, 9, 8)
    assert disagreement(CPU_FLASH, Asked(q, k, k, causal=True)) is None

    def wrong(*arguments: object) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = CPU_FLASH.backward(*arguments)
        return dq, dk * 1.2, dv

    assert "dk differs" in disagreement(dataclasses.replace(CPU_FLASH, backward=wrong), Asked(q, k, k, causal=True))


def test_a_named_implementation_is_taken_or_refused() -> None:
    q = torch.randn(1, 2, 3, 8)
    assert choose(Asked(q, q, q), "math") is MATH
    with pytest.raises(BadOption, match=r"'flash'.*it runs on cuda, the call is on cpu.*use one of cpu_flash, math"):
        choose(Asked(q, q, q), "flash")
    with pytest.raises(BadOption, match="no dropout"):
        choose(Asked(q, q, q, dropout_p=0.1), "cpu_flash")
    with pytest.raises(BadOption, match=r"did you mean cpu_flash\?"):
        choose(Asked(q, q, q), "cpu_flsh")
    out = torch.ops.ws.attention(q, q, q, None, False, 0.3, 0.0, None, implementation="math")[0]
    assert torch.equal(out, reference.forward(q, q, q, None, False, 0.3, 0.0, None)[0])


def test_stand_ins_lie_in_memory_as_the_arguments_do() -> None:
    q, k, v = torch.randn(4, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)  # parts of one projection
    k = k[:, :1].expand(4, 2, 6, 8)
    made = stand_in(Asked(q, k, v, torch.ones(4, 1, 6, 6, dtype=torch.bool)), 2)
    assert made is not None and made.mask is not None
    for ours, theirs in zip((made.q, made.k, made.v), (q, k, v), strict=True):
        assert ours.shape == (2, *theirs.shape[1:]) and ours.stride() == theirs.stride() and ours.std() > 0.5
    assert made.mask.shape == (2, 1, 6, 6) and made.mask[..., 0].all() and not made.mask.all()
    assert stand_in(Asked(q, k, v), 8) is None
    assert torch.equal(random_like(q), random_like(q))
    wide = random_mask(torch.zeros(1, 1, 6, 6, dtype=torch.bfloat16).expand(4, 2, 6, 6), 4)
    assert wide.dtype == torch.bfloat16 and wide.shape == (4, 2, 6, 6) and wide.stride()[:2] == (0, 0)
    assert set(wide.unique().tolist()) == {0.0, float("-inf")}


class Clock:
    now = 0.0

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    def mark(self) -> float:
        return self.now

    def seconds(self, first: float, last: float) -> float:
        return last - first


@pytest.mark.parametrize(
    ("fits", "lacking", "rows", "kept"),
    [(8, "math", [8], True), (8, "flash", [8], False), (2, "flash", [8, 4, 2], False)],
)
def test_choices_made_in_little_memory_are_for_this_process(
    fits: int, lacking: str, rows: list[int], kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none can be tried on all rows, fewer are taken; what lacked memory may win in another process."""
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        trial,
        "forward_and_backward",
        lambda implementation, given: lambda: clock.pass_by({"efficient": 1.0}.get(implementation.name, 2.0)),
    )
    clock = Clock()
    tried: list[int] = []

    def disagree(implementation: Implementation, given: Asked) -> None:
        rows = given.q.shape[0]
        tried.append(rows)
        assert rows == given.k.shape[0] == given.v.shape[0]
        if rows > fits or implementation.name == lacking:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trial, "disagreement", disagree)
    q = torch.zeros(8, 4, 64, 64, dtype=torch.bfloat16)
    signature = dataclasses.replace(SIGNATURE, q_shape=tuple(q.shape))
    asked = dataclasses.replace(question(signature, Asked(q, q, q, causal=True)), measures=True)
    choice = Tuner(lambda device: clock).choose(asked)
    assert choice.name == "efficient" and "out of memory" in choice.ruled_out[lacking]
    assert sorted(set(tried), reverse=True) == rows
    assert bool(list(tmp_path.rglob("*.json"))) is kept


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
    asked = Asked(q, k, v, mask, causal, 0.125)
    reason = choice_module.why_not(implementation, signature_of(asked))
    if reason is not None:
        pytest.skip(reason)
    grad = torch.randn_like(q)
    zero = torch.zeros((), dtype=torch.int64, device="cuda")
    out, logsumexp, _, _ = implementation.forward(asked)
    grads = implementation.backward(grad, asked, Kept(out, logsumexp, zero, zero))
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
        asked = Asked(q, k, v, scale=0.125, dropout_p=0.5)
        out, logsumexp, seed, offset = implementation.forward(asked)
        assert seed.shape == offset.shape == () and seed.device == q.device
        dv = implementation.backward(grad, asked, Kept(out, logsumexp, seed, offset))[2]
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
    monkeypatch.setattr(choice_module, "TUNER", Tuner())
    q, k, v = (torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    before = torch.cuda.get_rng_state()
    out = torch.ops.ws.attention(q, k, v, None, True, 0.125, 0.0, None)[0]
    assert torch.equal(before, torch.cuda.get_rng_state())
    (row,) = (json.loads(file.read_text()) for file in (tmp_path / "choices").iterdir())
    assert row["name"] in row["seconds"] and len(row["seconds"]) + len(row["ruled_out"]) == 5
    known = json.loads(row["key"])
    assert known["card"] == torch.cuda.get_device_name() and known["driver"] and known["source"]
    torch.autograd.grad(out.sum(), (q, k, v))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        captured = torch.ops.ws.attention(q, k, v, None, True, 0.125, 0.0, None)[0]
    graph.replay()
    assert torch.equal(captured, out)
    (found,) = choice_module.TUNER.choices.values()
    assert found.source == tuner_module.MEASURED and choice_module.TUNER.measurements == 1
