"""wholestep.hf.Trainer against transformers.Trainer: the same losses in the log, the same weights at the end."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import wholestep  # noqa: E402
from wholestep.train.hf import STATE_FILE, refuse_unsupported  # noqa: E402

VOCABULARY = 32


def gpt2(dropout: float = 0.0) -> Any:
    """A token-weighted loss: GPT-2 takes num_items_in_batch."""
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    """A loss that the Trainer divides by the number of micro-batches: the model is told to take no item count."""
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    model.accepts_loss_kwargs = False
    return model


def sentences(count: int = 16, *, ragged: bool = False) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)
    rows = []
    for i in range(count):
        ids = torch.randint(1, VOCABULARY, (5 + (i * 3) % 7 if ragged else 8,), generator=generator)
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()})
    return rows


def classified(count: int = 16) -> list[dict[str, Any]]:
    return [{**row, "labels": int(row["input_ids"].sum()) % 2} for row in sentences(count)]


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        key: torch.nn.utils.rnn.pad_sequence([r[key] for r in rows], batch_first=True, padding_value=value)
        for key, value in fill.items()
    }


def make(
    kind: Any, folder: Path, model: Any, data: Any, *, trainer: dict[str, Any] | None = None, **arguments: Any
) -> Any:
    given = {
        "per_device_train_batch_size": 2, "max_steps": 6, "learning_rate": 1e-2, "logging_steps": 1, "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", **arguments,
    }  # fmt: skip
    args = transformers.TrainingArguments(output_dir=str(folder), **given)
    extra = {"wholestep": {"backend": "interpret"}} if issubclass(kind, wholestep.hf.Trainer) else {}
    return kind(model=model, args=args, train_dataset=data, **extra, **(trainer or {}))


def logged(trainer: Any, *names: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history for name in names if name in entry]


def assert_same_training(
    folder: Path, model: Any, data: Any, tolerance: float = 2e-5, kind: Any = None, **arguments: Any
) -> Any:
    """Train with both; ours is returned. Losses, norms, rates and evaluations of the log are compared, then weights."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss")
    ours = make(kind or wholestep.hf.Trainer, folder / "ours", model(), data, **arguments)
    stock = make(transformers.Trainer, folder / "stock", model(), data, **arguments)
    before = {n: p.detach().clone() for n, p in ours.model.named_parameters()}
    for trainer in (ours, stock):
        trainer.train()
    assert ours.step.rung == "whole step", ours.step.explain()
    assert not ours.step.falls, ours.step.notes
    assert len(logged(stock, "loss")) == stock.state.global_step > 0
    torch.testing.assert_close(logged(ours, *names), logged(stock, *names), rtol=tolerance, atol=tolerance)
    for (name, a), b in zip(ours.model.named_parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")
    assert any(not torch.equal(p, before[n]) for n, p in ours.model.named_parameters())
    return ours


@pytest.mark.parametrize(
    ("model", "data"),
    [pytest.param(gpt2, sentences(), marks=pytest.mark.slow, id="gpt2"), pytest.param(bert, classified(), id="bert")],
)
def test_trains_as_the_stock_trainer_does(tmp_path: Path, model: Any, data: Any) -> None:
    ours = assert_same_training(tmp_path, model, data)
    assert ours.step.captures == 1 and ours.step.count == 6


@pytest.mark.parametrize(
    ("model", "data"),
    [
        pytest.param(gpt2, sentences(10), id="gpt2"),
        pytest.param(bert, classified(10), marks=pytest.mark.slow, id="bert"),
    ],
)
def test_accumulation_with_a_short_last_window(tmp_path: Path, model: Any, data: Any) -> None:
    """Five batches, four to a window: the second window of each epoch has one, and divides by one."""
    ours = assert_same_training(tmp_path, model, data, gradient_accumulation_steps=4, max_steps=4)
    assert ours.step.captures == 1 and ours.step.count == 10
    names = {entry.name for entry in ours.step.graph.inputs}
    assert ("num_items" in names, "divisor" in names) == ((True, False) if model is gpt2 else (False, True))


@pytest.mark.slow
def test_padding_to_ragged_lengths_with_accumulation(tmp_path: Path) -> None:
    """The number of items differs at every step, and the lengths do: from the third on they are symbolic."""
    ours = assert_same_training(
        tmp_path, gpt2, sentences(24, ragged=True), trainer={"data_collator": pad}, gradient_accumulation_steps=2,
    )  # fmt: skip
    assert ours.step.captures == 3 and any("symbolic" in note for note in ours.step.notes)


def test_clipping_and_a_schedule(tmp_path: Path) -> None:
    ours = assert_same_training(
        tmp_path, gpt2, sentences(), max_grad_norm=0.1, lr_scheduler_type="linear", warmup_steps=2, weight_decay=0.1
    )
    assert min(logged(ours, "grad_norm")) > 0.1  # clipping had something to do
    assert len(set(logged(ours, "learning_rate"))) > 3


@pytest.mark.slow
@pytest.mark.parametrize(("model", "data"), [(gpt2, sentences()), (bert, classified())], ids=["gpt2", "bert"])
def test_label_smoothing(tmp_path: Path, model: Any, data: Any) -> None:
    smoothed = assert_same_training(tmp_path, model, data, label_smoothing_factor=0.2)
    plain = make(wholestep.hf.Trainer, tmp_path / "plain", model(), data)
    plain.train()
    assert logged(plain, "loss")[0] != pytest.approx(logged(smoothed, "loss")[0], rel=1e-4)


def summed_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    total = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="sum")
    return 0.5 * total / num_items_in_batch


def test_a_loss_function_of_the_users(tmp_path: Path) -> None:
    options = {"trainer": {"compute_loss_func": summed_loss}, "gradient_accumulation_steps": 2}
    assert_same_training(tmp_path, gpt2, sentences(), **options)


def test_evaluation_during_training_uses_the_plain_module(tmp_path: Path) -> None:
    ours = assert_same_training(
        tmp_path, gpt2, sentences(), trainer={"eval_dataset": sentences(5)}, eval_strategy="steps", eval_steps=2
    )
    assert len(logged(ours, "eval_loss")) == 3 and ours.step.count == 6


def test_bf16_is_close_to_stock_bf16(tmp_path: Path) -> None:
    ours = assert_same_training(tmp_path, gpt2, sentences(), tolerance=2e-2, bf16=True, learning_rate=1e-3)
    dtypes = {n.meta["val"].dtype for n in ours.step.graph.operations() if isinstance(n.meta.get("val"), torch.Tensor)}
    assert torch.bfloat16 in dtypes and {p.dtype for p in ours.model.parameters()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_resuming_equals_an_uninterrupted_run(tmp_path: Path, dropout: float) -> None:
    """Also with dropout: the place in the random numbers is in the checkpoint."""
    options = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    whole = make(wholestep.hf.Trainer, tmp_path / "whole", gpt2(dropout), sentences(), **options)
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    assert (checkpoint / STATE_FILE).exists()
    assert whole.step.captures == 1, whole.step.notes  # saving writes into the model's config
    assert '"architectures"' in (checkpoint / "config.json").read_text("utf-8")
    torch.manual_seed(77)
    resumed = make(wholestep.hf.Trainer, tmp_path / "resumed", gpt2(dropout), sentences(), **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.step.count == whole.step.count == 12
    torch.testing.assert_close(logged(resumed, "loss"), logged(whole, "loss"))
    for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_dropout_is_drawn_anew_at_every_step(tmp_path: Path) -> None:
    trainer = make(wholestep.hf.Trainer, tmp_path, gpt2(0.3), sentences(2), learning_rate=0.0)
    trainer.train()
    assert len(set(logged(trainer, "loss"))) == 6


class Annealed(wholestep.hf.Trainer):
    """Its loss reads the step counter, which a trace would fix."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss * (1 + self.state.global_step)


def test_a_loss_that_reads_the_trainers_counter_is_not_frozen(tmp_path: Path) -> None:
    trainer = make(Annealed, tmp_path, gpt2(), sentences(2), learning_rate=0.0, max_steps=8)
    trainer.train()
    assert (
        trainer.step is not None and trainer.step.rung == "whole step" and trainer.step.captures == 2
    )  # then an input
    losses = logged(trainer, "loss")
    torch.testing.assert_close(
        [loss / losses[0] for loss in losses], [float(i + 1) for i in range(8)], rtol=1e-4, atol=0
    )


@pytest.mark.parametrize(
    ("name", "told"),
    [("precision", "bf16=True"), ("accumulate", "gradient_accumulation_steps"), ("clip_norm", "max_grad_norm"), ("x", "backend")],
)  # fmt: skip
def test_options_that_are_arguments_of_the_trainer(tmp_path: Path, name: str, told: str) -> None:
    with pytest.raises(wholestep.WholestepError, match=told):
        wholestep.hf.Trainer(model=gpt2(), wholestep={name: 1})


def test_torch_compile_is_refused_and_checkpointing_told(tmp_path: Path) -> None:
    with pytest.raises(wholestep.WholestepError, match="torch_compile"):
        make(wholestep.hf.Trainer, tmp_path, gpt2(), sentences(), torch_compile=True)
    with pytest.warns(wholestep.WholestepWarning, match="gradient_checkpointing"):
        trainer = make(wholestep.hf.Trainer, tmp_path, gpt2(), sentences(), gradient_checkpointing=True, max_steps=1)
    trainer.train()
    assert trainer.step.rung == "whole step"


@pytest.mark.parametrize(
    ("place", "name", "value", "told"),
    [
        ("trainer", "is_deepspeed_enabled", True, "DeepSpeed"),
        ("trainer", "is_fsdp_enabled", True, "FSDP"),
        ("trainer", "is_model_parallel", True, "several devices"),
        ("trainer", "use_apex", True, "apex"),
        ("args", "world_size", 2, "2 processes"),
        ("args", "n_gpu", 2, "DataParallel"),
        ("args", "optim", "adalomo", "adalomo"),
        ("args", "device", torch.device("mps"), "mps"),
        ("accelerator", "mixed_precision", "fp8", "bf16=True or fp16=True"),
    ],
)
def test_what_is_refused_is_named(place: str, name: str, value: Any, told: str) -> None:
    args = types.SimpleNamespace(
        world_size=1, n_gpu=1, optim="adamw_torch", device=torch.device("cpu"), torch_compile=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    trainer = types.SimpleNamespace(args=args, accelerator=types.SimpleNamespace(mixed_precision="no"))
    refuse_unsupported(trainer)
    setattr({"trainer": trainer, "args": args, "accelerator": trainer.accelerator}[place], name, value)
    with pytest.raises(wholestep.WholestepError, match=told):
        refuse_unsupported(trainer)
