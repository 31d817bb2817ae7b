"""Own data to a trained model to other programs: sample, eval, export, fine-tune; opened without Wholestep."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.cli.calls import Call, program
from tests.data.own_files import images, parquet, texts
from tests.forked import TRANSFORMERS, run_in_fork

from wholestep.data.draws import generator_for
from wholestep.train import checkpoint, loop
from wholestep.train.job import Job, make_job
from wholestep.train.sampling import Choice
from wholestep.train.trained import Trained, open_trained

pytest.importorskip("transformers")
GPT = ("gpt-1m", "--set", "width=16", "--set", "layers=2", "--set", "heads=2", "--set", "vocabulary=300", "--seq", "16")
LLAMA = (
    "hf:llama", "--set", "hidden_size=16", "--set", "intermediate_size=32", "--set", "num_hidden_layers=2", "--set",
    "num_attention_heads=2", "--set", "num_key_value_heads=1", "--set", "vocab_size=300", "--set", "max_position_embeddings=32",
    "--set", "vocabulary=280", "--seq", "16",
)  # fmt: skip
BERT = (
    "hf:bert", "--set", "hidden_size=16", "--set", "intermediate_size=32", "--set", "num_hidden_layers=1", "--set",
    "num_attention_heads=2", "--set", "vocab_size=300", "--set", "vocabulary=280", "--seq", "16",
)  # fmt: skip
T5 = (
    "hf:t5", "--set", "d_model=16", "--set", "d_ff=32", "--set", "d_kv=8", "--set", "num_layers=1", "--set", "num_heads=2",
    "--set", "vocab_size=300", "--set", "vocabulary=280", "--seq", "8",
)  # fmt: skip
VIT = (
    "hf:vit", "--set", "hidden_size=16", "--set", "intermediate_size=32", "--set", "num_hidden_layers=1", "--set",
    "num_attention_heads=2", "--set", "image_size=16", "--set", "patch_size=8",
)  # fmt: skip
RESNET = ("resnet-18", "--set", "width=2", "--set", "image_size=32", "--set", "stem=large", "--set", "channels=3")
OPEN = """
import sys, torch, transformers
found = {}
for folder, auto in autos.items():
    model = getattr(transformers, auto).from_pretrained(folder).eval()
    batch = torch.load(f"{folder}.batch")
    with torch.no_grad():
        found[folder] = model(**batch).logits
    text = torch.tensor(transformers.AutoTokenizer.from_pretrained(folder).encode("the graph")) if "Image" not in auto else None
    found[folder + " text"] = text
assert not any(name.split(".")[0] == "wholestep" for name in sys.modules)
torch.save(found, "opened.pt")
"""


def keep(job: Job, path: Path) -> None:
    """A checkpoint at `path`, as training would write it."""
    checkpoint.save(path.parent / "saved", model=job.model, step=2, config=job.settings, files=job.files)
    (path.parent / "saved" / "step-000002").rename(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with own data, and a small model of each kind for it, three of them trained for two steps."""
    root = tmp_path_factory.mktemp("trained")
    notes, rows, pets = texts(root / "notes"), parquet(root / "rows.parquet"), images(root / "pets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHOLESTEP_CACHE_DIR", str(root / "cache"))
        for name, (asked, data) in {
            "gpt": (GPT, notes), "llama": (LLAMA, rows), "bert": (BERT, notes), "t5": (T5, notes), "vit": (VIT, pets),
            "resnet": (RESNET, pets),
        }.items():  # fmt: skip
            sets = [text for text in asked[1:] if "=" in text]
            job = make_job(asked[0], sets=sets, data=str(data), batch=4, seq=None if data is pets else 16, steps=2)
            if name in ("gpt", "llama", "vit"):
                loop.train(job, out=root / name, backend="interpret")
            else:  # as training would save it
                keep(job, root / name)
    return root


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Path) -> Path:
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(runs / "cache"))
    for name in ("notes", "pets", "rows.parquet"):
        (tmp_path / name).symlink_to(runs / name)
    return program(tmp_path, monkeypatch)


def train(call: Call, out: str, *asked: str, steps: int = 2, code: int = 0) -> str:
    done = call(
        "train", *asked, "--batch", "4", "--steps", str(steps), "--backend", "interpret", "--out", out, "--quiet"
    )
    assert done.code == code, done.err
    return done.err


def logits(trained: Trained, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        made = trained.model(batch["input_ids"]) if "input_ids" in batch else trained.model(batch["pixel_values"])
    return made if isinstance(made, torch.Tensor) else made.logits


def test_own_texts_rows_and_images_open_in_transformers_with_equal_logits(call: Call, runs: Path) -> None:
    """In a process that does not import Wholestep."""
    autos = dict.fromkeys(("gpt", "llama"), "AutoModelForCausalLM") | {"bert": "AutoModelForMaskedLM"}
    autos |= dict.fromkeys(("vit", "resnet"), "AutoModelForImageClassification")
    for name, auto in autos.items():
        done = call("export", str(runs / name), name)
        assert done.code == 0 and f"{auto}.from_pretrained('{name}')" in done.out and done.err == "", done.err
        size = 16 if name == "vit" else 32
        batch = {"input_ids": torch.arange(24).reshape(2, 12) * 7 % 280} if "Image" not in auto else {
            "pixel_values": torch.linspace(-1, 1, 2 * 3 * size**2).reshape(2, 3, size, size)
        }  # fmt: skip
        torch.save(batch, f"{name}.batch")
    assert run_in_fork(f"autos = {autos}\n{OPEN}", imports=TRANSFORMERS) == ""
    opened = torch.load("opened.pt")
    for name in autos:
        trained = open_trained(str(runs / name))
        difference = (logits(trained, torch.load(f"{name}.batch")) - opened[name]).abs().max()
        assert float(difference) <= 1e-5, name
        if trained.tokens is not None:
            assert trained.tokens.encode(b"the graph").equal(opened[f"{name} text"]), name
    config = json.loads(Path("vit/config.json").read_text())
    assert config["id2label"] == {"0": "cat", "1": "dog", "2": "newt"}


def test_a_checkpoint_of_a_model_of_transformers_opens_as_it_is(runs: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, ids = str(runs / "llama/checkpoints/step-000002"), torch.arange(12)[None]
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits(open_trained(path), {"input_ids": ids}))
    tokens = open_trained(path).tokens
    assert (
        tokens is not None
        and AutoTokenizer.from_pretrained(path).encode("keep it") == tokens.encode(b"keep it").tolist()
    )


def test_bytes_have_the_same_ids_as_their_tokenizer_file(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from wholestep.data.tokens import Bytes

    for reserved in (0, 4):
        tokens, text = Bytes(reserved), "naïve\n\tbytes: \x00 ~ 漢字"
        for name, content in tokens.files().items():
            (tmp_path / name).write_bytes(content)
        opened = AutoTokenizer.from_pretrained(tmp_path)
        assert opened.encode(text, add_special_tokens=False) == tokens.encode(text.encode()).tolist()
        assert opened.decode(tokens.encode(text.encode()).tolist()) == text


# ---- sample ----


def test_a_seed_writes_the_same_text_and_temperature_0_takes_the_likeliest(call: Call, runs: Path) -> None:
    asked = ("sample", str(runs / "llama"), "--prompt", "the", "--tokens", "20")
    one, other = call(*asked, "--seed", "3"), call(*asked, "--seed", "4")
    assert one.code == 0 and one.out.startswith("the") and one.out == call(*asked, "--seed", "3").out != other.out
    greedy = call(*asked, "--temperature", "0")
    trained = open_trained(str(runs / "llama"))
    assert trained.tokens is not None
    ids = trained.tokens.encode(b"the").tolist()
    for _ in range(20):  # without a cache
        ids.append(int(logits(trained, {"input_ids": torch.tensor([ids])})[0, -1, : trained.tokens.size].argmax()))
    assert greedy.out == trained.tokens.decode(ids) + "\n"
    assert call("sample", str(runs / "llama"), "--tokens", "60").code == 0, "longer than the model reads"


def test_the_likeliest_alone_are_drawn_from() -> None:
    logits, few = torch.tensor([0.0, 3.0, 2.9, -9.0]), Choice(temperature=1.0, top_p=0.6, likeliest=None)
    drawn = {few.draw(logits, generator_for(seed, 0, "x")) for seed in range(200)}
    assert drawn == {1, 2}
    assert {Choice(temperature=1.0, top_p=0.01).draw(logits, generator_for(s, 0, "x")) for s in range(20)} == {1}


def test_a_text_model_of_each_kind_writes_or_says_why_not(call: Call, runs: Path) -> None:
    assert call("sample", str(runs / "gpt"), "--tokens", "70").out.strip()
    assert call("sample", str(runs / "t5"), "--prompt", "the plan", "--tokens", "5").code == 0
    assert "guesses masked words" in call("sample", str(runs / "bert")).err
    for run in ("gpt", "t5", "bert"):
        found = json.loads(call("eval", str(runs / run), "--json").out)
        assert found["loss"] > 0 and found["perplexity"] > 1 and found["part"] == "held out"
        assert (found["accuracy"] is not None) == (run == "bert")


# ---- eval ----


def test_eval_measures_what_training_held_out(call: Call, runs: Path) -> None:
    run = str(runs / "gpt")
    result = json.loads((runs / "gpt/run.json").read_text())["result"]["held_out_loss"]
    found = json.loads(call("eval", run, "--json").out)
    assert found["complete"] and found["count"] % 16 == 0 and abs(found["loss"] - result) < 0.2
    whole = json.loads(call("eval", run, "--data", "own_training.py", "--json").out)
    assert whole["part"] == "all" and whole["count"] > 300
    same = json.loads(call("eval", run, "--data", str(runs / "notes"), "--json").out)
    assert same["part"] == "held out" and same["loss"] == found["loss"]
    shown = call("eval", run, "--batches", "1").out
    assert "perplexity" in shown and "over the first 64 tokens of the held-out part of" in shown


@pytest.mark.parametrize(
    ("model", "sets", "count"),
    [("resnet-18", ("width=2", "image_size=8"), 297), ("rgcn", ("files=40", "width=4"), None)],
)
def test_models_without_text_have_an_accuracy(call: Call, model: str, sets: tuple[str, ...], count: int | None) -> None:
    keep(make_job(model, sets=sets), Path("run").absolute())
    found = json.loads(call("eval", "run", "--json").out)
    assert 0 <= found["accuracy"] <= 1 and found["perplexity"] is None and count in (None, found["count"])
    done = call("sample", "run")
    assert done.code == 2 and "nothing to sample" in done.err
    done = call("export", "run", "out")
    assert done.code == 0 and "one safetensors" in done.out and Path("out/model.safetensors").is_file()
    assert Path("out/config.json").is_file()


def test_a_model_of_ones_own_is_evaluated_and_exported(call: Call) -> None:
    done = call("train", "own_training:setup", "--steps", "3", "--backend", "interpret", "--out", "run", "--quiet")
    assert done.code == 0
    assert json.loads(call("eval", "run", "--json").out)["loss"] > 0
    assert call("export", "run", "w.safetensors", "--precision", "bf16").code == 0
    from safetensors.torch import load_file

    assert {value.dtype for value in load_file("w.safetensors").values()} == {torch.bfloat16}
    assert "nothing to sample" in call("sample", "run").err
    assert call("verify", "run", "--steps", "1", "--backend", "interpret").code == 0


# ---- a run in place of MODEL, and --init ----


def test_commands_take_a_run_in_place_of_a_model(call: Call, runs: Path) -> None:
    run = str(runs / "gpt")
    for where in (run, f"{run}/checkpoints/step-000002", f"{run}/run.json"):
        assert call("sample", where, "--tokens", "2").code == 0, where
    assert call("plan", run, "--device", "h200").code == 0
    train(call, "again", run)
    settings = json.loads(Path("again/run.json").read_text())["settings"]
    assert settings["config"]["width"] == 16 and settings["seq"] == 16 and settings["data"].endswith("notes")


@pytest.mark.slow
def test_verify_show_and_profile_take_a_run(call: Call, runs: Path) -> None:
    assert call("verify", str(runs / "gpt"), "--steps", "1", "--backend", "interpret").code == 0
    assert "def " in call("show", str(runs / "gpt")).out
    done = call("profile", str(runs / "gpt"), "--steps", "2", "--out", "page.html")
    assert done.code == 0 and Path("page.html").is_file(), done.err


def test_init_goes_on_with_the_weights_on_other_data(call: Call, runs: Path) -> None:
    shutil.copytree(runs / "gpt", "first")
    Path("new.txt").write_text("keep the plan of the graph.\n" * 60)
    before = json.loads(call("eval", "first", "--data", "new.txt", "--json").out)["loss"]
    train(call, "tuned", "--init", "first", "--data", "new.txt", "--set", "lr=0.000001")
    assert abs(json.loads(Path("tuned/metrics.jsonl").read_text().splitlines()[0])["loss"] - before) < 0.5
    tuned, first = open_trained("tuned"), open_trained("first")
    assert tuned.tokens is not None and first.tokens is not None and tuned.tokens.key == first.tokens.key
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(tuned.model.parameters(), first.model.parameters()))
    shutil.rmtree("first")  # what it started from is not needed to go on
    done = call("train", "--resume", "--out", "tuned", "--steps", "3", "--quiet")
    assert done.code == 0, done.err


def test_weights_that_do_not_fit_are_named(call: Call, runs: Path) -> None:
    told = train(call, "new", "--init", str(runs / "gpt"), "--set", "layers=3", code=2)
    assert "blocks.2.norm1.weight" in told and len(told.splitlines()) == 1 and not Path("new").exists()
    assert call("export", str(runs / "llama"), "out").code == 0
    told = train(call, "new", "--init", "out", "--set", "num_hidden_layers=3", "--data", "notes", code=2)
    assert "model.layers.2" in told and len(told.splitlines()) == 1, told
    told = train(call, "new", "--init", "out", "--set", "intermediate_size=48", "--data", "notes", code=2)
    assert "mlp" in told and "48" in told and len(told.splitlines()) == 1, told
    told = train(call, "new", *BERT, "--set", "vocab_size=301", "--data", "notes", "--init", str(runs / "gpt"), code=2)
    assert "does not fit the model" in told and len(told.splitlines()) == 1 and not Path("new").exists()
    train(call, "new", "--init", "out", "--data", "notes")


# ---- bad input ----


def test_bad_input_is_one_line_and_leaves_nothing(call: Call, in_folder: Path, runs: Path) -> None:
    shutil.copytree(runs / "gpt", "run")
    Path("empty").mkdir()
    Path("full").mkdir()
    Path("full/x").touch()
    before = {path for path in in_folder.rglob("*") if "cache" not in path.parts}
    for arguments, told in (
        (("sample", "nowhere"), "there is no such folder"),
        (("sample", "gpt-1m"), "is a preset, which has no weights"),
        (("sample", "empty"), "neither a run nor a folder"),
        (("sample", "notes/a.txt"), "neither a run nor a folder"),
        (("sample", "run", "--temperature", "-1"), "temperature"),
        (("sample", "run", "--top-p", "0"), "--top-p 0"),
        (("sample", "run", "--top-p", "2"), "top-p"),
        (("sample", "run", "--tokens", "0"), "tokens"),
        (("sample", "run", "--tokenizer", "empty"), "no tokenizer.json in empty"),
        (("eval", "nowhere"), "there is no such folder"),
        (("eval", "run", "--data", "nowhere"), "neither a known data set nor a file"),
        (("eval", "run", "--data", "digits"), "is images"),
        (("eval", "run", "--seq", "99"), "reads at most 64"),
        (("eval", "run", "--data", "full/x"), "empty file"),
        (("export", "nowhere", "out"), "there is no such folder"),
        (("export", "run", "full"), "exists already"),
        (("export", "run", "notes/a.txt"), "exists already"),
        (("export", "run", "out", "--precision", "fp8"), "--precision"),
        (("export", "run", "notes/a.txt/out"), "cannot be written"),
        (("export", "run"), "OUT"),
    ):
        done = call(*arguments)
        assert done.code == 2 and told in done.err and len(done.err.splitlines()) == 1, (arguments, done.err)
        assert {path for path in in_folder.rglob("*") if "cache" not in path.parts} == before, arguments
    weights = Path("run/checkpoints/step-000002/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-8] + b"8 others")
    for arguments in (
        ("sample", "run"),
        ("eval", "run"),
        ("export", "run", "out"),
        ("train", "--init", "run", "--out", "new"),
    ):
        done = call(*arguments)
        assert done.code == 2 and "is damaged" in done.err and len(done.err.splitlines()) == 1, done.err
    assert {path for path in in_folder.rglob("*") if "cache" not in path.parts} == before
