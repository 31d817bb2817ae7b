"""`wholestep train --data`: folders, rows, images and functions of a user's own; stopped, resumed, changed; and bad data."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.cli.calls import Call
from tests.cli.test_train import start, wait_for_checkpoint
from tests.data.own_files import images, parquet, texts

from wholestep.errors import WholestepWarning
from wholestep.train.job import make_job
from wholestep.train.metrics import losses_of, read_rows

SMALL = (
    "--set", "width=16", "--set", "layers=1", "--set", "heads=2", "--batch", "2", "--seq", "16", "--backend", "interpret",
    "--tokenizer", "bytes",
)  # fmt: skip
TINY = ("width=16", "layers=1", "heads=2")
PIXELS = ("--set", "width=2", "--set", "image_size=8", "--batch", "4", "--backend", "interpret")


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def losses(run: str | Path) -> list[tuple[int, float]]:
    return losses_of(read_rows(Path(run) / "metrics.jsonl"))


# ---- what can be trained on ----


def test_a_folder_trains_as_its_files_one_by_one_would(call: Call) -> None:
    texts(Path("notes"))
    done = call("train", "gpt-1m", "--data", "notes", *SMALL, "--steps", "3", "--out", "a")
    assert done.code == 0 and "4 texts" in done.out, done.err
    part = make_job("gpt-1m", data="notes", glob="*.md", tokenizer="bytes", sets=TINY, batch=2, seq=16)
    assert "2 texts" in part.batches.describe()
    assert set(json.loads(Path("a/data.json").read_text())["files"]) == {"a.txt", "b.txt", "more/c.md", "more/d.md"}


def test_rows_train() -> None:
    Path("rows.jsonl").write_text(
        "".join(json.dumps({"id": i, "body": f"row {i} of many\n"}) + "\n" for i in range(99))
    )
    job = make_job("gpt-1m", data="rows.jsonl", field="body", tokenizer="bytes", sets=TINY, batch=2, seq=16)
    assert "99 texts" in job.batches.describe() and job.held_out


def test_ids_train_without_a_tokenizer_and_sample_as_numbers(call: Call) -> None:
    np.save("ids.npy", np.arange(400, dtype=np.uint16) % 77)
    small = SMALL[: SMALL.index("--tokenizer")]
    assert call("train", "gpt-1m", "--data", "ids.npy", *small, "--steps", "2", "--out", "a").code == 0
    written = call("sample", "a", "--prompt", "3 4", "--tokens", "5")
    assert written.code == 0 and len(written.out.split()) == 7 and written.out.startswith("3 4 "), written.err
    assert "ids" in call("sample", "a", "--prompt", "words").err
    assert "has learnt its tokens" in call("sample", "a", "--tokenizer", "bytes").err


def test_ids_have_no_bytes_to_be_measured_by(call: Call) -> None:
    np.save("ids.npy", np.arange(400) % 77)
    assert call("train", "gpt-1m", "--data", "ids.npy", *SMALL, "--steps", "1", "--out", "a").code == 0
    assert json.loads(call("eval", "a", "--json").out)["bits_per_byte"] is None


def test_a_function_gives_batches(call: Call, in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(in_folder))
    Path("own_batches_of_mine.py").write_text(
        "import torch\n"
        "def batches(batch, seq, held_out=False):\n"
        "    ids = torch.arange(40 * (seq + 1)).reshape(40, seq + 1) % 50\n"
        "    made = [{'input_ids': r[:, :-1], 'targets': r[:, 1:]} for r in ids.split(batch)]\n"
        "    return torch.utils.data.DataLoader(made[18:] if held_out else made[:18], batch_size=None, shuffle=not held_out)\n"
    )
    small = (*SMALL[: SMALL.index("--tokenizer")], "--set", "vocab_size=50")
    asked = ("train", "gpt-1m", "--data", "own_batches_of_mine:batches", *small)
    assert call(*asked, "--steps", "6", "--out", "whole").code == 0
    assert call(*asked, "--steps", "3", "--out", "parts").code == 0
    assert call("train", "--resume", "--out", "parts", "--steps", "6").code == 0
    assert losses("parts") == losses("whole")
    assert json.loads(call("eval", "whole", "--json").out)["count"] == 4 * 16
    with Path("own_batches_of_mine.py").open("a") as file:
        file.write("def listed(batch, seq):\n    return list(batches(batch, seq))\n")
    monkeypatch.delitem(sys.modules, "own_batches_of_mine")
    done = call("train", "gpt-1m", "--data", "own_batches_of_mine:listed", *small, "--steps", "2", "--out", "listed")
    assert done.code == 0 and "18 batches" in done.out, done.err


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("'hello'", "gives a str as a batch"),
        ("{'input_ids': torch.zeros(2, 16, dtype=torch.int64)}", "without a tensor 'targets': they hold input_ids"),
        (
            "{'input_ids': torch.zeros(2, 16), 'targets': torch.zeros(2, 16)}",
            "input_ids are 2x16 values of torch.float32",
        ),
        ("{'input_ids': torch.full((2, 16), 50), 'targets': torch.ones(2, 16)}", "gives the id 50, the model knows 50"),
        ("{'input_ids': torch.full((2, 16), -1), 'targets': torch.ones(2, 16)}", "ids are 0 or more"),
    ],
)
def test_batches_that_the_model_cannot_take_are_one_line(
    made: str, said: str, call: Call, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(in_folder))
    monkeypatch.delitem(sys.modules, "odd_batches_of_mine", raising=False)
    text = (
        f"import torch\nclass Odd:\n    def __iter__(self):\n        yield {made}\ndef batches():\n    return Odd()\n"
    )
    Path("odd_batches_of_mine.py").write_text(text)
    small = (*SMALL[: SMALL.index("--tokenizer")], "--set", "vocab_size=50")
    done = call("train", "gpt-1m", "--data", "odd_batches_of_mine:batches", *small, "--out", "a")
    assert done.code == 2 and said in done.err and len(done.err.splitlines()) == 1 and not Path("a").exists(), done.err


def test_images_by_class_train_evaluate_and_have_nothing_to_sample(call: Call) -> None:
    images(Path("pets"))
    done = call("train", "resnet-18", "--data", "pets", *PIXELS, "--steps", "2", "--out", "a")
    assert done.code == 0 and "images of 3 classes" in done.out, done.err
    assert "is in colour, and the model sees grey: --set channels=3 shows it the colours" in done.err
    found = json.loads(call("eval", "a", "--json").out)
    assert found["count"] == 3 and 0 <= found["accuracy"] <= 1 and found["perplexity"] is None
    done = call("sample", "a")
    assert done.code == 2 and "nothing to sample" in done.err and len(done.err.splitlines()) == 1


# ---- resuming ----


def test_a_file_that_changed_is_named_and_nothing_is_trained(call: Call) -> None:
    texts(Path("notes"))
    assert call("train", "gpt-1m", "--data", "notes", *SMALL, "--steps", "2", "--out", "a").code == 0
    again = ("train", "--resume", "--out", "a", "--steps", "4")
    before = Path("notes/more/c.md").read_bytes()
    for change, told in (
        (lambda: Path("notes/more/c.md").write_text("other"), "more/c.md has changed"),
        (lambda: Path("notes/more/c.md").unlink(), "more/c.md is gone"),
        (lambda: Path("notes/e.txt").write_text("new"), "more/c.md is gone (and 1 more)"),
    ):
        change()
        done = call(*again)
        assert done.code == 2 and told in done.err and "--init" in done.err and len(done.err.splitlines()) == 1, (
            done.err
        )
        assert len(losses("a")) == 2
    Path("notes/e.txt").unlink()
    Path("notes/more/c.md").write_bytes(before)
    assert call(*again).code == 0
    done = call("eval", "a")
    assert done.code == 0, done.err
    Path("notes/a.txt").write_text("x" * 999)
    assert "a.txt has changed" in call("eval", "a").err


def kill_at(moments: list[float], folder: Path, run: str, *asked: str) -> int:
    """Start it, kill it after so many seconds (0: at the first checkpoint), go on; how often it was killed."""
    kills = 0
    for moment in [*moments, None]:
        again = ("train", "--resume") if (folder / run).exists() else asked
        process = start(folder, *again, "--out", run, "--quiet")
        try:
            if moment == 0:
                wait_for_checkpoint(process, folder / run)
            out, err = process.communicate(timeout=moment)
            assert process.returncode == 0, out + err
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
    return kills


@pytest.mark.slow
def test_killed_while_it_trains_on_a_folder_it_goes_on_as_if_undisturbed(in_folder: Path) -> None:
    texts(in_folder / "notes")
    asked = ("train", "gpt-1m", "--data", "notes", *SMALL, "--steps", "100", "--save-every", "5")
    kills = kill_at([0], in_folder, "killed", *asked)
    kill_at([], in_folder, "whole", *asked)
    assert kills == 1 and losses("killed") == losses("whole") and len(losses("whole")) == 100


@pytest.mark.slow
def test_killed_at_ten_random_moments_on_a_folder(in_folder: Path) -> None:
    texts(in_folder / "notes")
    asked = ("train", "gpt-1m", "--data", "notes", *SMALL, "--steps", "600", "--save-every", "7")
    began = time.monotonic()
    kill_at([], in_folder, "whole", *asked)
    seconds = time.monotonic() - began  # of a machine that others may use
    wanted, chance, kills, rounds = losses("whole"), random.Random(5), 0, 0
    while kills < 10:
        run = f"killed-{rounds}"
        kills += kill_at([chance.uniform(0.1, 0.9) * seconds for _ in range(10 - kills)], in_folder, run, *asked)
        assert losses(run) == wanted
        rounds += 1


# ---- bad data: one line, nothing written ----


def binary(path: str) -> Callable[[], object]:
    return lambda: Path(path).write_bytes(random.Random(1).randbytes(5000))


def folder_with(name: str, content: bytes) -> Callable[[], object]:
    def make() -> None:
        texts(Path("notes"))
        Path("notes", name).write_bytes(content)

    return make


def unreadable() -> None:
    texts(Path("notes"))
    os.symlink("nowhere", "notes/link.txt")


def rows(*lines: str) -> Callable[[], object]:
    return lambda: Path("rows.jsonl").write_text("\n".join(lines))


def saved(name: str, array: np.ndarray) -> Callable[[], object]:
    return lambda: np.save(name, array)


def broken_image() -> None:
    images(Path("pets"))
    Path("pets/cat/9.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")


GPT = ("gpt-1m", *SMALL)
PLAIN = ("gpt-1m", *SMALL[: SMALL.index("--tokenizer")])
RESNET = ("resnet-18", *PIXELS)
BAD: dict[str, tuple[Callable[[], object], tuple[str, ...], str]] = {
    "random bytes": (binary("x.txt"), (*GPT, "--data", "x.txt"), "x.txt is no text"),
    "random bytes in a folder": (folder_with("z.bin", b"\xff\x00\x80" * 99), (*GPT, "--data", "notes"), "z.bin is no text"),
    "latin-1": (folder_with("z.txt", "caf\xe9".encode("latin-1")), (*GPT, "--data", "notes"), "z.txt is no text in UTF-8"),
    "UTF-16": (lambda: Path("x.txt").write_bytes("hello".encode("utf-16")), (*GPT, "--data", "x.txt"), "UTF-16"),
    "an empty file": (lambda: Path("x.txt").touch(), (*GPT, "--data", "x.txt"), "empty file"),
    "an empty folder": (lambda: Path("notes").mkdir(), (*GPT, "--data", "notes"), "holds no file"),
    "a glob that matches nothing": (folder_with("z.txt", b"z"), (*GPT, "--data", "notes", "--glob", "*.rst"), "*.txt (3)"),
    "a glob that is none": (folder_with("z.txt", b"z"), (*GPT, "--data", "notes", "--glob", "/abs"), "no pattern"),
    "a glob for one file": (lambda: Path("x.txt").write_text("x" * 99), (*GPT, "--data", "x.txt", "--glob", "*"), "one file"),
    "a field of plain text": (folder_with("z.txt", b"z"), (*GPT, "--data", "notes", "--field", "a"), "without fields"),
    "too little text": (lambda: Path("x.txt").write_text("short"), (*GPT, "--data", "x.txt"), "fewer than one window"),
    "too little text in a folder": (
        lambda: (Path("n").mkdir(), Path("n/a.txt").write_text("a")), (*GPT, "--data", "n"), "fewer than one window"),
    "nothing there": (lambda: None, (*GPT, "--data", "nowhere"), "neither a known data set nor a file"),
    "a row that is no JSON": (rows('{"text": "a"}', "{oops"), (*GPT, "--data", "rows.jsonl"), "rows.jsonl line 2 is not JSON"),
    "a row without the field": (rows('{"body": "a"}'), (*GPT, "--data", "rows.jsonl"), "it has body; choose one with --field"),
    "a row that is null": (rows('{"text": null}'), (*GPT, "--data", "rows.jsonl"), "line 1: its 'text' is null, no text"),
    "a row that is a list": (rows("[1]"), (*GPT, "--data", "rows.jsonl"), "is no object"),
    "no rows": (rows(""), (*GPT, "--data", "rows.jsonl"), "holds no rows"),
    "no parquet": (binary("x.parquet"), (*GPT, "--data", "x.parquet"), "cannot be read as parquet"),
    "a column that is not there": (
        lambda: parquet(Path("x.parquet")), (*GPT, "--data", "x.parquet", "--field", "b"), "it has text"),
    "numbers that are no ids": (saved("x.npy", np.zeros(9)), (*PLAIN, "--data", "x.npy"), "no row of token ids"),
    "negative ids": (saved("x.npy", np.full(99, -1)), (*PLAIN, "--data", "x.npy"), "holds the id -1"),
    "ids the model does not know": (
        saved("x.npy", np.arange(99)), (*PLAIN, "--data", "x.npy", "--set", "vocab_size=50"), "--set vocab_size=99"),
    "no .npy": (binary("x.npy"), (*PLAIN, "--data", "x.npy"), "cannot be read as .npy"),
    "no .safetensors": (binary("x.safetensors"), (*PLAIN, "--data", "x.safetensors"), "cannot be read as .safetensors"),
    "a BPE of ids": (saved("x.npy", np.arange(99)), (*PLAIN, "--data", "x.npy", "--tokenizer", "bpe"), "no text to learn from"),
    "a function that is not there": (lambda: None, (*PLAIN, "--data", "nowhere.at_all:batches"), "nowhere"),
    "a tokenizer that is not there": (
        folder_with("z.txt", b"z"), (*PLAIN, "--data", "notes", "--tokenizer", "nowhere"), "there is no nowhere"),
    "a folder without a tokenizer": (
        folder_with("z.txt", b"z"), (*PLAIN, "--data", "notes", "--tokenizer", "notes"), "no tokenizer.json in notes"),
    "a tokenizer that is none": (
        folder_with("tokenizer.json", b"{}"), (*PLAIN, "--data", "notes", "--tokenizer", "notes"), "is not a tokenizer"),
    "text for images": (folder_with("z.txt", b"z"), (*RESNET, "--data", "notes"), "lies in no folder of a class"),
    "one file for images": (lambda: Path("x.txt").write_text("x"), (*RESNET, "--data", "x.txt"), "one folder of images per class"),
    "an image that is broken": (broken_image, (*RESNET, "--data", "pets"), "9.png is no image"),
    "images for a text model": (lambda: images(Path("pets")), (*GPT, "--data", "pets"), "is no text"),
    "one class": (lambda: images(Path("pets"), classes=("cat",)), (*RESNET, "--data", "pets"), "nothing to tell apart"),
    "too few classes": (
        lambda: images(Path("pets")), (*RESNET, "--data", "pets", "--set", "classes=2"), "--set classes=3"),
    "a tokenizer for images": (lambda: None, (*RESNET, "--tokenizer", "bytes"), "sees images"),
    "weights that are nowhere": (lambda: None, (*GPT, "--init", "nowhere"), "there is no such folder"),
    "a folder without weights": (lambda: Path("w").mkdir(), (*GPT, "--init", "w"), "no .safetensors weights"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_one_line_and_leaves_nothing(call: Call, name: str) -> None:
    make, arguments, told = BAD[name]
    make()
    done = call("train", *arguments, "--steps", "2", "--out", "run")
    assert done.code == 2 and told in done.err and len(done.err.splitlines()) == 1, done.err
    assert not Path("run").exists() and not list(Path().rglob("*.bin.tmp")) and "Traceback" not in done.err
    assert not [path for path in Path("cache").rglob(".new-*")]


def test_an_empty_file_among_others_is_passed_over_with_a_note() -> None:
    texts(Path("notes"))
    Path("notes/empty.txt").touch()
    with pytest.warns(WholestepWarning, match=r"empty\.txt is empty, and passed over"):
        make_job("gpt-1m", data="notes", tokenizer="bytes", sets=TINY, batch=2, seq=16)
