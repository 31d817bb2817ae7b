"""make_job: every form of MODEL, settings that make the same Job again, samples that training does not notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import wholestep
from wholestep.train import checkpoint
from wholestep.train.job import Job, make_job, make_job_again
from wholestep.train.schedule import Constant, Cosine, Sqrt

GPT = ("width=16", "layers=1", "heads=2", "context=16", "tokenizer=bytes")
BERT = ("hidden_size=32", "num_hidden_layers=1", "num_attention_heads=2", "intermediate_size=32", "vocab_size=300")


def tiny(model: str | None = "gpt-1m", *more: str, **options: Any) -> Job:
    sets = {"gpt-1m": GPT, None: GPT, "hf:bert": (*BERT, "tokenizer=bytes")}.get(model, ())
    options = {"batch": 2, "seq": 8, "device": "cpu"} | options
    return make_job(model, sets=(*sets, *more), **options)


def compiled(job: Job) -> Any:
    return wholestep.compile(
        job.model, job.loss_fn, job.optimizer, job.batches.batch(0), backend="interpret", check="off", verbose=False,
        **job.compile_options,
    )  # fmt: skip


def same_weights(one: Any, other: Any) -> bool:
    return all(a.equal(b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("model", "sets", "options"),
    [
        ("gpt-1m", ("schedule=cosine", "seed=3", "dropout=0.1"), {"steps": 7}),
        ("hf:bert", (), {}),
        ("resnet-18", ("width=4", "image_size=8"), {"seq": None}),
    ],
)
def test_settings_make_the_same_job_again(model: str, sets: tuple[str, ...], options: dict[str, Any]) -> None:
    job = tiny(model, *sets, **options)
    settings = json.loads(json.dumps(job.settings))
    assert settings == job.settings
    torch.manual_seed(99)
    again = make_job_again(settings, device="cpu")
    assert again.settings == job.settings and again.name == job.name == model
    assert same_weights(job.model, again.model)
    for number in (0, 5):
        first, second = job.batches.batch(number), again.batches.batch(number)
        assert first.keys() == second.keys() and all(first[key].equal(second[key]) for key in first)
    assert job.compile_options == again.compile_options
    assert job.optimizer.state_dict() == again.optimizer.state_dict()
    assert make_job_again(settings, steps=50, device="cpu").settings == {**settings, "steps": 50}


def test_another_seed_is_another_job() -> None:
    one, other = tiny(), tiny(seed=1)
    assert not same_weights(one.model, other.model)
    assert not one.batches.batch(0)["input_ids"].equal(other.batches.batch(0)["input_ids"])


def test_set_beats_the_seed_option_and_changes_the_optimizer() -> None:
    job = tiny("gpt-1m", "seed=4", "lr=0.5", "weight_decay=0.25", "clip_norm=none", "accumulate=2")
    assert job.settings["seed"] == 4 and job.compile_options == {
        "precision": "fp32",
        "clip_norm": None,
        "accumulate": 2,
    }
    assert [group["weight_decay"] for group in job.optimizer.param_groups] == [0.25, 0.0]
    assert all(p.ndim > 1 for p in job.optimizer.param_groups[0]["params"])
    assert job.scheduler.base_lrs == [0.5, 0.5]


def test_without_a_model_it_is_a_small_gpt() -> None:
    job = tiny(None)
    assert job.name == "gpt-1m"
    assert "1,098,781 bytes" in job.batches.describe() and job.batches.units == 16


def test_changed_data_is_told_when_a_job_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("to be or not to be\n" * 50)
    job = tiny(data=str(path))
    assert job.settings["data"] == str(path)
    path.write_text("to be and not to be\n" * 50)
    with pytest.raises(wholestep.WholestepError, match="no longer what it was"):
        make_job_again(job.settings, device="cpu")


# ---- schedules ----


def test_schedules_rise_to_the_peak_and_fall() -> None:
    for schedule in (Sqrt(10), Cosine(10, 100), Constant(10)):
        assert schedule(0) == pytest.approx(0.1) and schedule(9) == 1.0
    assert Sqrt(10)(39) == pytest.approx(0.5)
    assert Cosine(10, 100)(99) == pytest.approx(0.1) == Cosine(10, 100)(1000)
    assert Cosine(10, 100)(54) == pytest.approx(0.55) and Constant(10)(1000) == 1.0
    assert all(schedule(0) == 1.0 for schedule in (Sqrt(0), Constant(0)))


def test_the_default_schedule_does_not_depend_on_the_number_of_steps() -> None:
    short, long = tiny(steps=5), tiny(steps=500)
    rates = []
    for job in (short, long):
        for _ in range(8):
            job.optimizer.step()
            job.scheduler.step()
        rates.append(job.scheduler.get_last_lr())
    assert rates[0] == rates[1]
    assert tiny("gpt-1m", "schedule=cosine", steps=5).settings["schedule_steps"] == 5


@pytest.mark.parametrize("schedule", ["sqrt", "cosine", "constant"])
def test_a_checkpoint_holds_the_schedule(tmp_path: Path, schedule: str) -> None:
    def taken(job: Job, step: Any, numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            losses.append(float(step(job.batches.batch(number))))
            job.scheduler.step()
        return losses

    whole = tiny("gpt-1m", f"schedule={schedule}", "warmup=3", "dropout=0.2", steps=6)
    expected = taken(whole, compiled(whole), range(6))
    first = make_job_again(whole.settings, device="cpu")
    step = compiled(first)
    assert taken(first, step, range(3)) == expected[:3]
    checkpoint.save(
        tmp_path, model=first.model, optimizer=first.optimizer, scheduler=first.scheduler, step=step, data=3
    )
    second = make_job_again(whole.settings, device="cpu")
    step = compiled(second)
    loaded = checkpoint.load(
        tmp_path, model=second.model, optimizer=second.optimizer, scheduler=second.scheduler, step=step
    )
    assert taken(second, step, range(loaded.data, 6)) == expected[3:]


# ---- samples ----


@pytest.mark.parametrize(
    ("model", "sets"), [("gpt-1m", ()), ("hf:bert", ()), ("resnet-18", ("width=4", "image_size=8"))]
)
def test_a_sample_leaves_training_alone(model: str, sets: tuple[str, ...]) -> None:
    job = tiny(model, *sets, **({"seq": None} if model == "resnet-18" else {}))
    frozen = next(job.model.children())
    frozen.eval()  # a user's own choice
    before = torch.get_rng_state()
    assert job.write_sample is not None
    sample = job.write_sample()
    assert sample == job.write_sample() and torch.get_rng_state().equal(before)
    assert job.model.training and not frozen.training
    assert {"gpt-1m": len(sample) > 100, "hf:bert": "masked tokens guessed" in sample}.get(
        model, "held-out digits" in sample
    )


# ---- Hugging Face ----


@pytest.mark.parametrize(
    ("model_type", "task"),
    [("bert", "masked"), ("roberta", "masked"), ("gpt2", "causal"), ("llama", "causal"), ("t5", "seq2seq"), ("bart", "seq2seq"),
     ("vit", "image"), ("resnet", "image")],
)  # fmt: skip
def test_a_model_type_has_its_task(model_type: str, task: str) -> None:
    from wholestep.train import hf_models

    assert hf_models.find(f"hf:{model_type}").task == task


def test_an_encoder_decoder_reads_one_half_and_writes_the_other() -> None:
    sets = ("d_model=16", "num_layers=1", "num_heads=2", "d_ff=16", "d_kv=8", "vocab_size=300", "tokenizer=bytes")
    job = make_job("hf:t5", sets=sets, batch=2, seq=8, device="cpu")
    batch = job.batches.batch(0)
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 8)
    assert float(compiled(job)(batch)) > 0 and job.write_sample is not None and job.write_sample()


def test_dropout_is_every_dropout_of_the_model() -> None:
    config = tiny("hf:bert", "dropout=0.25", "attention_probs_dropout_prob=0.5").model.config
    assert config.hidden_dropout_prob == 0.25 and config.attention_probs_dropout_prob == 0.5


def test_roberta_cannot_use_the_positions_before_its_padding() -> None:
    from wholestep.train import hf_models

    config = hf_models.find("hf:roberta").config
    assert hf_models.context(config) == config.max_position_embeddings - 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as save_pretrained writes it, with a tokenizer of its own."""
    from wholestep.data.tokens import make_tokens

    made = tmp_path_factory.mktemp("saved")
    job = make_job("hf:bert", sets=(*BERT, "tokenizer=bytes"), batch=2, seq=8, seed=7, device="cpu")
    job.model.save_pretrained(made)
    (made / "tokenizer.json").write_text(
        make_tokens("bpe", b"to be or not to be", 280, reserved=True).tokenizer.to_str()
    )  # type: ignore[attr-defined]
    return made


def test_a_folder_gives_its_configuration_and_tokenizer(folder: Path) -> None:
    job = make_job(str(folder), batch=2, seq=8, device="cpu")
    assert job.settings["tokenizer"] == "file" and job.settings["model"] == str(folder)
    assert type(job.model).__name__ == "BertForMaskedLM" and job.model.config.hidden_size == 32
    again = make_job_again(job.settings, device="cpu")
    assert same_weights(job.model, again.model) and again.settings == job.settings


def test_init_reads_the_weights_of_a_folder(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    job = make_job(str(folder), batch=2, seq=8, device="cpu", init=str(folder))
    assert job.model.training and all(job.model.state_dict()[name].equal(value) for name, value in stored.items())
    fresh = make_job(str(folder), batch=2, seq=8, device="cpu")
    assert not same_weights(fresh.model, job.model)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(wholestep.WholestepError, match=r"no \.safetensors weights"):
        make_job(str(tmp_path), batch=2, seq=8, device="cpu", init=str(tmp_path))
