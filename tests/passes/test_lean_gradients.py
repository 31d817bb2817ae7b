"""Under bf16 autocast the update, clipping and accumulation read bf16 gradients; every bit is that of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.passes.stacks import Stack, early, id_batches, next_token, targets, updates
from tests.runtime.twins import Side, interpreted
from torch import nn

import wholestep
from wholestep.graph.liveness import peak_bytes
from wholestep.graph.training_graph import TrainingGraph
from wholestep.passes.lean_gradients import lean_gradients
from wholestep.passes.pipeline import Pipeline

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "nesterov, foreach": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd, fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "adam, amsgrad, maximize": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True, maximize=True),
    "adamw, fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
}


def gradient_dtypes(graph: TrainingGraph) -> list[torch.dtype]:
    return [gradient.meta["val"].dtype for node in updates(graph) for gradient in node.args[1]]


def trained(passes: Pipeline, optimizer: Any, *, loss_fn: Any = next_token, **options: Any) -> tuple[Any, list[Any]]:
    """The step, and its losses, parameters and optimizer state after five batches."""
    torch.manual_seed(0)
    model = Stack(layers=2, tied=options.pop("tied", False))
    side = Side(model, optimizer(model), loss_fn)
    batches = id_batches(rows=4)
    step = interpreted(side, batches[0], passes=passes, precision="bf16", check="off", **options)
    losses = [step(batch) for batch in batches]
    state = [t for s in side.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    norm = [] if step.grad_norm is None else [step.grad_norm]
    return step, [*(r[0] if isinstance(r, tuple) else r for r in losses), *norm, *model.state_dict().values(), *state]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in OPTIMIZERS),
    *((name, {"clip_norm": 0.05}) for name in ("nesterov, foreach", "adamw", "adamw, fused")),
    ("adam, amsgrad, maximize", {"nonfinite": "skip"}),
    ("adamw", {"tied": True}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_five_steps_are_the_same_bits(name: str, options: dict[str, Any]) -> None:
    plain, expected = trained(Pipeline([]), OPTIMIZERS[name], **options)
    lean, found = trained(early(lean_gradients), OPTIMIZERS[name], **options)
    assert set(gradient_dtypes(plain.graph)) == {torch.float32}
    linear = 2 * 4 + (0 if options.get("tied") else 1)  # weights and biases of the linear layers; norms are float32
    assert gradient_dtypes(lean.graph).count(torch.bfloat16) == linear
    assert same(expected, found)


def eager_losses(optimizer: Any, clip_norm: float) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Stack(layers=2)
    update, losses = optimizer(model), []
    for batch in id_batches(rows=4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_token(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        update.step()
        update.zero_grad()
        losses.append(loss.detach())
    return losses


def test_clipped_steps_are_those_of_plain_torch() -> None:
    _, found = trained(Pipeline([lean_gradients]), OPTIMIZERS["adamw"], clip_norm=0.05)
    assert same(found[:5], eager_losses(OPTIMIZERS["adamw"], 0.05))


def weighted(model: Any, ids: torch.Tensor) -> Any:
    return next_token(model, ids), {"weight": torch.tensor(float(ids.numel()))}


@pytest.mark.parametrize("loss_fn", [next_token, weighted])
def test_accumulation_adds_narrow_gradients_to_wide_sums(loss_fn: Any) -> None:
    plain, expected = trained(Pipeline([]), OPTIMIZERS["adamw"], loss_fn=loss_fn, accumulate=2)
    lean, found = trained(early(lean_gradients), OPTIMIZERS["adamw"], loss_fn=loss_fn, accumulate=2)
    assert targets(lean.graph).count("aten._to_copy.default") < targets(plain.graph).count("aten._to_copy.default")
    assert same(expected, found)


def test_gradients_are_named_and_verified() -> None:
    model = Stack(layers=2)
    optimizer = OPTIMIZERS["adamw"](model)
    passes = Pipeline([lean_gradients])
    report = wholestep.verify(
        model, next_token, optimizer, id_batches()[:2], precision="bf16", backend="interpret", passes=passes
    )
    assert report.ok, str(report)


def test_the_held_gradients_take_half() -> None:
    side = Side(Stack(width=64), None, next_token)
    side.optimizer = torch.optim.SGD(side.model.parameters(), lr=0.1)
    peaks = []
    for passes in (Pipeline([]), Pipeline([lean_gradients])):
        step = interpreted(side, id_batches()[0], passes=passes, precision="bf16", clip_norm=1.0, check="off")
        peaks.append(peak_bytes(step.graph))
    matrices = sum(p.numel() for p in side.model.blocks.parameters() if p.dim() > 1)
    assert peaks[0] - peaks[1] >= matrices, "of 4 bytes each, 2 are saved, less what is alive elsewhere"


def test_what_others_read_stays_wide() -> None:
    """A gradient handed to the caller, float32 training, and clipping over gradients of two dtypes."""
    batch = id_batches()[0]
    handed = interpreted(Side(Stack(), None, next_token), batch, passes=Pipeline([lean_gradients]), precision="bf16")
    handed(batch)
    side = Side(Stack(), None, next_token)
    side.optimizer = OPTIMIZERS["adamw"](side.model)
    wide = interpreted(side, batch, passes=Pipeline([lean_gradients]))
    assert set(gradient_dtypes(wide.graph)) == {torch.float32}

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).bfloat16())

    model, x = Mixed(), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mixed = Side(model, optimizer, lambda m, b: F.mse_loss(m(b).float(), torch.zeros(3, 2)))
    step = interpreted(mixed, x, passes=Pipeline([lean_gradients]), precision="bf16", clip_norm=1.0)
    kept = [node for node in step.graph.operations() if node.target is torch.ops.ws.clip.default]
    assert {g.meta["val"].dtype for g in kept[0].args[0]} == {torch.float32, torch.bfloat16} and len(kept[0].args) == 2


def test_one_gradient_of_two_parameters() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.one, self.two = (
                nn.Linear(4, 4),
                nn.Parameter(torch.zeros(4, 4)),
                nn.Parameter(torch.zeros(4, 4)),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.one + self.two) + self.layer(x)

    results = []
    for passes in (Pipeline([]), Pipeline([lean_gradients])):
        torch.manual_seed(0)
        model, x = Shared(), torch.randn(3, 4)
        side = Side(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).float().square().mean())
        step = interpreted(side, x, passes=passes, precision="bf16")
        assert step.graph.gradients["one"] == step.graph.gradients["two"]
        results.append([step(x), step(x), *model.parameters()])
    assert same(*results) and torch.bfloat16 in gradient_dtypes(step.graph)


def hugging_face(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": 31, "bos_token_id": 0, "eos_token_id": 1}
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, **sizes)
        return transformers.GPT2LMHeadModel(config).train()
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32,
        max_position_embeddings=16, **sizes,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


@pytest.mark.parametrize(("name", "clip_norm"), [pytest.param("gpt2", None, marks=pytest.mark.slow), ("llama", 0.5)])
def test_hugging_face_models_in_bf16(name: str, clip_norm: float | None) -> None:
    """All passes together; dropout is on in GPT-2."""
    from wholestep.passes.order_for_peak import order_for_peak

    results = []
    ids = torch.randint(0, 31, (2, 8), generator=torch.Generator().manual_seed(1))
    for passes in (Pipeline([]), early(lean_gradients, after=[order_for_peak])):
        torch.manual_seed(0)
        model = hugging_face(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batch = {"input_ids": ids, "labels": ids}
        step = wholestep.compile(
            model, None, optimizer, batch, backend="interpret", precision="bf16", cache=False, passes=passes, seed=5,
            clip_norm=clip_norm, check="off",
        )  # fmt: skip
        losses = [step(batch) for _ in range(4)]
        results.append([*losses, *model.state_dict().values()])
        if passes.passes:
            assert torch.bfloat16 in gradient_dtypes(step.graph)
            assert (len(updates(step.graph)) > 2) == (clip_norm is None)
    assert same(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("backend", ["interpret", "inductor"])
def test_the_same_bits_on_a_gpu(clip_norm: float | None, backend: str) -> None:
    results = []
    for passes in (Pipeline([]), early(lean_gradients)):
        torch.manual_seed(0)
        model = Stack(width=64).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches = [batch.cuda() for batch in id_batches(8)]
        step = wholestep.compile(
            model, next_token, optimizer, batches[0], passes=passes, backend=backend, cache=False, precision="bf16",
            clip_norm=clip_norm,
        )  # fmt: skip
        losses = [float(step(batch)) for batch in batches]
        results.append([torch.tensor(losses), *(t.cpu() for t in model.state_dict().values())])
    if backend == "interpret":
        assert same(*results)
    else:  # bits differ on a GPU, perhaps because Inductor leaves out a rounding to bf16 where a cast back follows
        assert torch.allclose(results[0][0], results[1][0], rtol=2e-2)
