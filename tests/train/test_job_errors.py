"""make_job and bad input: one clear line each, that says what to do."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from wholestep.errors import BadOption, WholestepError, WholestepWarning
from wholestep.train.job import make_job, make_job_again

GPT = ("width=16", "layers=1", "heads=2", "context=16", "tokenizer=bytes")


def refusal(model: str | None, **options: Any) -> str:
    with pytest.raises(WholestepError) as caught:
        make_job(model, **({"device": "cpu"} | options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("gtp-10m", "did you mean gpt-10m?"),
        ("qqqq", "hf:<model_type>"),
        ("hf:berd", "did you mean hf:bert?"),
        ("hf:gpt2-medium", "did you mean hf:gpt2?"),
        ("hf:vits", "no head"),
        ("./nowhere", "no such folder"),
        ("nowhere:setup", "No module named"),
        (":setup", "not package.module:callable"),
    ],
)
def test_a_model_that_is_not_there(model: str, said: str) -> None:
    assert said in refusal(model)


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    assert "without a config.json" in refusal(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in refusal(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 0}, "--batch 0. use 1 or more"),
        ({"batch": -2}, "--batch -2"),
        ({"seq": 0}, "--seq 0"),
        ({"seq": 999}, "gpt-1m reads at most 16 tokens. use --seq 16 or less or --set context=999"),
        ({"steps": 0}, "--steps 0"),
        ({"precision": "bf61"}, "did you mean bf16"),
        ({"device": "quantum"}, "no device"),
        ({"init": "/nowhere"}, "there is no such folder"),
        ({"seed": -1}, "seed=-1"),
        ({"data": "digits"}, "data 'digits' is images, gpt-1m reads text"),
        ({"data": "shakspeare"}, "did you mean shakespeare"),
        ({"data": "nowhere/notes.txt"}, "the path of a text file"),
    ],
)
def test_options_without_meaning(options: dict[str, Any], said: str) -> None:
    assert said in refusal("gpt-1m", sets=GPT, **options)


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ("lr", "is not key=value"),
        ("=3", "is not key=value"),
        ("lrr=1", "did you mean lr? gpt-1m takes lr, weight_decay"),
        ("lr=fast", "lr=fast: not a number"),
        ("lr=true", "not a number"),
        ("lr=nan", "not a number"),
        ("lr=0", "more than 0"),
        ("layers=two", "not a whole number"),
        ("layers=1.5", "not a whole number"),
        ("layers=0", "use 1 or more"),
        ("width=17", "does not divide into heads=2"),
        ("dropout=1", "less than 1"),
        ("tied=3", "true or false"),
        ("schedule=cosin", "did you mean cosine"),
        ("tokenizer=words", "use bytes or bpe"),
        ("vocabulary=100", "use 256 or more"),
        ("vocab_size=100", "vocab_size=100 is smaller than the 256 ids"),
        ("accumulate=3", "cannot be cut into accumulate=3 equal parts"),
        ("batch=3", "use --batch VALUE"),
    ],
)
def test_bad_wishes(wish: str, said: str) -> None:
    assert said in refusal("gpt-1m", sets=(*GPT, wish))


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ("hiden_size=3", "did you mean hidden_size? hf:bert takes lr"),
        ("hidden_size=x", "hidden_size"),
        ("hidden_size=30", "not a multiple"),
        ("vocab_size=100", "--set vocab_size=260 or more"),
    ],
)
def test_bad_wishes_for_a_hugging_face_model(wish: str, said: str) -> None:
    assert said in refusal("hf:bert", sets=("tokenizer=bytes", wish))


def test_sequences_a_hugging_face_model_cannot_read() -> None:
    assert "--set max_position_embeddings=513" in refusal("hf:bert", seq=513)
    assert "use --seq 2 or more" in refusal("hf:gpt2", seq=1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data": "shakespeare"}, "data 'shakespeare' is text, resnet-18 sees images. use digits"),
        ({"seq": 8}, "--seq 8: resnet-18 sees images"),
        ({"sets": ("classes=3",)}, "--set classes=10"),
        ({"sets": ("depth=19",)}, "use 18 or 50"),
        ({"sets": ("stem=tall",)}, "use small or large"),
    ],
)
def test_bad_input_for_an_image_model(options: dict[str, Any], said: str) -> None:
    assert said in refusal("resnet-18", **options)


def test_a_text_shorter_than_one_sequence(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("to be")
    said = refusal("gpt-1m", sets=GPT, seq=16, data=str(tmp_path / "short.txt"))
    assert "5 tokens, fewer than one window of 17" in said and "--seq 4 or less" in said


def test_without_tokenizers_the_default_falls_back_to_bytes_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from wholestep.data import tokens
    from wholestep.train import settings

    monkeypatch.setattr(settings, "bpe_available", lambda: False)
    monkeypatch.setattr(tokens, "bpe_available", lambda: False)
    with pytest.warns(WholestepWarning, match="tokens are bytes"):
        made = make_job("gpt-1m", sets=GPT[:-1], seq=8, device="cpu")
    assert made.settings["tokenizer"] == "bytes" and made.settings["config"]["vocab_size"] == 256
    assert "pip install tokenizers" in refusal("gpt-1m", sets=(*GPT[:-1], "tokenizer=bpe"))


def test_without_transformers_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'wholestep[hf]'" in refusal("bert-large")


def test_settings_that_are_none() -> None:
    with pytest.raises(BadOption, match="not the settings of a Job"):
        make_job_again({"model": "gpt-1m"})
