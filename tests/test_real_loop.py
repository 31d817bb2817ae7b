"""A training script as people write it: ragged loader, scheduler, validation, generation, checkpoints, another process.

The compiled step must be invisible in it: same losses as the same script in eager PyTorch, the same files, no leaks.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.forked import TRANSFORMERS, run_in_fork
from torch import nn

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[1]
VOCAB, TOKENS, STEPS_ELSEWHERE = 67, 10, 3
TOTAL_STEPS = 18

Batch = dict[str, torch.Tensor]
Trainer = Callable[[Batch], torch.Tensor]


def make_run() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=VOCAB - 1, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=TOTAL_STEPS, cycle_momentum=True)
    return model, optimizer, scheduler


def loader(seed: int) -> torch.utils.data.DataLoader:
    """22 sequences in batches of 4: the last one holds 2."""
    ids = torch.randint(1, VOCAB - 1, (22, TOKENS), generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(
        [{"input_ids": row, "labels": row} for row in ids],
        batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


def eager_trainer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainer:
    def train(batch: Batch) -> torch.Tensor:
        loss = loss_fn(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return train


def validate(model: nn.Module) -> tuple[float, list[int]]:
    """Validation loss and a few greedy tokens; leaves the model in training mode."""
    model.eval()
    with torch.no_grad():
        loss = sum(float(loss_fn(model, batch)) for batch in loader(99))
    prompt = torch.tensor([[1, 2, 3]])
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
    model.train()
    return loss, tokens[0].tolist()


def epoch(train: Trainer, scheduler: Any, seed: int, most: int | None = None) -> list[float]:
    losses = []
    for batch in list(loader(seed))[:most]:
        losses.append(float(train(batch)))
        scheduler.step()
    return losses


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(parts, path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    parts = torch.load(path, weights_only=True)
    model.load_state_dict(parts["model"])
    optimizer.load_state_dict(parts["optimizer"])
    scheduler.load_state_dict(parts["scheduler"])


def continue_elsewhere(path: str) -> None:
    """What the other process does: resume in plain PyTorch, take three steps, save, print the losses."""
    model, optimizer, scheduler = make_run()
    load(Path(path), model, optimizer, scheduler)
    losses = epoch(eager_trainer(model, optimizer), scheduler, seed=2, most=STEPS_ELSEWHERE)
    save(Path(path), model, optimizer, scheduler)
    assert "wholestep" not in sys.modules
    print(json.dumps(losses))


def in_another_process(path: Path) -> list[float]:
    program = f"from tests.test_real_loop import continue_elsewhere as go; go({str(path)!r})"
    said = run_in_fork(program, imports=TRANSFORMERS, folder=ROOT)
    return json.loads(said.splitlines()[-1])


def script(
    make_trainer: Callable[[nn.Module, torch.optim.Optimizer], Trainer], path: Path
) -> tuple[list[float], list[Any], nn.Module, Trainer]:
    """The whole story: two epochs with validation, three steps elsewhere, three more here."""
    model, optimizer, scheduler = make_run()
    train = make_trainer(model, optimizer)
    losses, validations = [], []
    for seed in (0, 1):
        losses += epoch(train, scheduler, seed)
        validations.append(validate(model))
    save(path, model, optimizer, scheduler)
    losses += in_another_process(path)
    load(path, model, optimizer, scheduler)
    losses += epoch(train, scheduler, 3, most=TOTAL_STEPS - len(losses))
    validations.append(validate(model))
    return losses, validations, model, train


def fake_tensors_on(root: nn.Module) -> list[str]:
    from torch._subclasses.fake_tensor import FakeTensor

    def holds(value: Any) -> bool:
        if isinstance(value, dict):
            return any(map(holds, value.values()))
        if isinstance(value, list | tuple | set):
            return any(map(holds, value))
        return isinstance(value, FakeTensor)

    return [f"{path}.{name}" for path, m in root.named_modules() for name, value in vars(m).items() if holds(value)]


@pytest.mark.parametrize("backend", ["interpret", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_whole_script_equals_eager(backend: str, tmp_path: Path) -> None:
    import wholestep

    def compiled_trainer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainer:
        return wholestep.compile(model, loss_fn, optimizer, next(iter(loader(0))), clip_norm=1.0, backend=backend)

    losses, validations, model, step = script(compiled_trainer, tmp_path / "ours.pt")
    expected, expected_validations, _, _ = script(eager_trainer, tmp_path / "theirs.pt")
    assert len(expected) == TOTAL_STEPS
    assert losses == pytest.approx(expected, rel=1e-5)
    for (loss, tokens), (expected_loss, expected_tokens) in zip(validations, expected_validations):
        assert loss == pytest.approx(expected_loss, rel=1e-5) and tokens == expected_tokens
    assert step.captures <= 2 and step.rung == "whole step", step.explain()
    assert fake_tensors_on(model) == []


def live_tensors() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))


@pytest.mark.slow
def test_memory_is_flat_over_200_steps() -> None:
    import wholestep

    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    step = wholestep.compile(model, loss_of, optimizer, (x, y), clip_norm=1.0, backend="interpret")
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)

    def run(count: int) -> None:
        for _ in range(count):
            step((x, y))
            scheduler.step()

    run(20)
    tensors, process = live_tensors(), psutil.Process()
    tracemalloc.start()
    run(20)  # what tracemalloc itself and lazily made objects take
    gc.collect()
    traced, resident = tracemalloc.get_traced_memory()[0], process.memory_info().rss
    run(160)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - traced
    tracemalloc.stop()
    assert live_tensors() <= tensors
    assert grown < 64 * 1024, f"{grown} bytes of Python objects more after 160 steps"
    assert process.memory_info().rss - resident < 8 * 2**20
    assert step.captures == 1


@pytest.mark.slow
def test_random_lengths_compile_a_few_times_only() -> None:
    """200 batches of random length: the third size makes the length symbolic; no later step compiles or takes 2 s."""
    import wholestep

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )  # fmt: skip
    source = torch.Generator().manual_seed(0)
    batches = [masked_batch(int(torch.randint(5, 41, (), generator=source)), source) for _ in range(200)]
    ours, theirs = transformers.BertForMaskedLM(config).train(), transformers.BertForMaskedLM(config).train()
    theirs.load_state_dict(ours.state_dict())
    step = wholestep.compile(ours, loss_fn, torch.optim.AdamW(ours.parameters(), lr=1e-3), batches[0], clip_norm=1.0)
    train = eager_trainer(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-3))
    lengths: set[int] = set()
    later: list[tuple[float, int, int]] = []  # (seconds, step, compilations made by it), after the third length
    for index, batch in enumerate(batches):
        settled = len(lengths) >= 3
        lengths.add(batch["input_ids"].shape[1])
        compiled, began = step.compilations, time.perf_counter()
        loss = float(step(batch))
        if settled:
            later.append((time.perf_counter() - began, index, step.compilations - compiled))
        assert loss == loss and abs(loss) != float("inf")
        if index < 10:
            assert loss == pytest.approx(float(train(batch)), rel=1e-5), f"step {index}"
    print(f"{step.compilations} compilations, {step.captures} captures, slowest later steps {sorted(later)[-3:]}")
    assert step.compilations <= 3, step.explain()
    assert len(later) > 190 and max(later)[0] <= 2.0, sorted(later)[-3:]
    assert sum(made for _, _, made in later) == 0, step.explain()


def masked_batch(tokens: int, source: torch.Generator) -> Batch:
    ids, labels = torch.randint(1, VOCAB, (2, 4, tokens), generator=source)
    lengths = torch.randint(3, tokens + 1, (4, 1), generator=source)
    mask = (torch.arange(tokens)[None] < lengths).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}
