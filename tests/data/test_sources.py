"""Own texts as documents and ids: what is held out, how files are found, the cache, and files that change."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.data.own_files import parquet, texts, words

from wholestep.data import encoded
from wholestep.data.sources import Source, changed_files, find_source, list_files
from wholestep.data.token_files import read_ids
from wholestep.data.tokens import Bytes, Numbers
from wholestep.errors import BadOption


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def rows(path: Path, count: int) -> Source:
    path.write_text("".join(json.dumps({"text": f"<{i}>"}) + "\n\n" for i in range(count)))
    return find_source(str(path))


def decoded(ids: np.ndarray) -> bytes:
    return bytes(ids.astype(np.uint8).tolist())


def test_files_come_in_the_order_of_their_names_and_hidden_ones_do_not(tmp_path: Path) -> None:
    folder = texts(tmp_path / "notes")
    (folder / ".git").mkdir()
    (folder / ".git" / "x").write_bytes(b"\0")
    (folder / ".hidden").write_bytes(b"\0")
    assert list(list_files(folder, None)) == ["a.txt", "b.txt", "more/c.md", "more/d.md"]
    assert list(list_files(folder, "*.md")) == ["more/c.md", "more/d.md"]
    assert list(list_files(folder, "more/*")) == ["more/c.md", "more/d.md"]
    assert [d.text for d in find_source(str(folder)).documents()] == [
        p.read_bytes() for p in list_files(folder, None).values()
    ]


def test_of_many_documents_every_twentieth_is_held_out(tmp_path: Path) -> None:
    source = rows(tmp_path / "x.jsonl", 45)
    assert [d.text for d in source.documents() if d.held] == [b"<19>", b"<39>"]
    assert b"<19>" not in b"".join(source.to_learn_from()) and b"<44>" in b"".join(source.to_learn_from())
    made = encoded.encode(source, Bytes())
    assert (
        decoded(made.held) == b"<19>\n\n<39>" and decoded(made.train).startswith(b"<0>\n\n<1>\n\n") and made.count == 45
    )
    assert decoded(encoded.encode(source, Bytes(4)).held - 4) == b"<19>" + bytes([254]) + b"<39>", (
        "ended by the id of <end>"
    )


def test_of_few_documents_the_end_is_not_learnt_from(tmp_path: Path) -> None:
    source = rows(tmp_path / "x.jsonl", 19)
    assert not any(d.held for d in source.documents())
    whole = b"".join(d.text for d in source.documents())
    assert b"".join(source.to_learn_from()) == whole[: len(whole) - int(len(whole) * 0.05)]
    assert len(encoded.encode(source, Bytes()).held) == 0


@pytest.mark.parametrize(
    ("names", "held"),
    [
        (("train/a.txt", "val/b.txt"), {"val/b.txt"}),
        (("train-00.jsonl", "validation-00.jsonl", "test-00.jsonl"), {"validation-00.jsonl"}),
        (("train.txt", "test.txt"), {"test.txt"}),
        (("train.txt", "notes.txt"), set()),
        (("training_day.txt", "value.txt"), set()),
    ],
)
def test_names_say_what_is_held_out(tmp_path: Path, names: tuple[str, ...], held: set[str]) -> None:
    for name in names:
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_text(json.dumps({"text": name}) if name.endswith("jsonl") else name)
    found = list(find_source(str(tmp_path / "d")).documents())
    assert {d.text.decode() for d in found if d.held} == held
    seen = {d.text.decode() for d in found}
    assert seen == set(names) - ({"test-00.jsonl"} if len(names) == 3 else set()), (
        "test is left alone beside validation"
    )


def test_parquet_and_lines_give_the_same_documents(tmp_path: Path) -> None:
    made = [d.text for d in find_source(str(parquet(tmp_path / "x.parquet", rows=25))).documents()]
    assert made == [words(30, i).encode() for i in range(25)]


def test_a_folder_of_datasets_has_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = {name: datasets.Dataset.from_dict({"body": [name] * 3}) for name in ("train", "validation", "test")}
    datasets.DatasetDict(made).save_to_disk(str(tmp_path / "d"))
    found = list(find_source(str(tmp_path / "d"), field="body").documents())
    assert [(d.text, d.held) for d in found] == [(b"train", False)] * 3 + [(b"validation", True)] * 3
    with pytest.raises(BadOption, match="it has body"):
        list(find_source(str(tmp_path / "d")).documents())


# ---- encoded once ----


def test_ids_are_encoded_once_and_again_when_the_cache_is_damaged(tmp_path: Path, cache: Path) -> None:
    source = find_source(str(texts(tmp_path / "notes")))
    first = np.array(encoded.encode(source, Bytes()).train)
    (entry,) = cache.iterdir()
    stamp = (entry / "train.bin").stat().st_mtime_ns
    again = encoded.encode(find_source(str(tmp_path / "notes")), Bytes())
    assert (entry / "train.bin").stat().st_mtime_ns == stamp and np.array_equal(first, again.train)
    assert isinstance(again.train, np.memmap)
    del again  # what is mapped may not shrink
    (entry / "train.bin").write_bytes(b"short")
    assert np.array_equal(encoded.encode(source, Bytes()).train, first)
    flipped = bytearray((entry / "train.bin").read_bytes())
    flipped[len(flipped) // 2] ^= 1  # another letter, of the same size
    (entry / "train.bin").write_bytes(flipped)
    assert np.array_equal(encoded.encode(source, Bytes()).train, first)
    encoded.encode(source, Bytes(4))
    assert len(list(cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_no_reason_not_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path / "file"))
    source = find_source(str(texts(tmp_path / "notes")))
    assert len(encoded.encode(source, Bytes()).train) > 1000


def test_a_file_that_changes_while_it_is_read_is_told(tmp_path: Path, cache: Path) -> None:
    source = find_source(str(texts(tmp_path / "notes")))
    (tmp_path / "notes" / "b.txt").write_text("another")
    with pytest.raises(BadOption, match=r"b\.txt has changed while it was read"):
        encoded.encode(source, Bytes())
    assert not list(cache.iterdir()), "nothing is kept under the name of what it was"


def test_pieces_are_cut_after_lines_and_never_inside_of_a_letter() -> None:
    text = "ab\ncdé漢字xyz\n".encode()
    for most in range(4, 12):
        parts = list(encoded.pieces(text, most))
        assert b"".join(parts) == text and all(len(part) <= most for part in parts)
        assert all(part.decode() for part in parts)
    assert list(encoded.pieces(b"", 4)) == [b""]


def test_what_changed_in_words() -> None:
    assert changed_files({"a": "1"}, {"a": "1"}) is None
    assert changed_files({"a": "1", "b": "2"}, {"a": "3", "c": "4"}) == "a has changed (and 2 more)"
    assert changed_files({"b": "2"}, {}) == "b is gone" and changed_files({}, {"c": "1"}) == "c is new"


def test_a_mark_of_byte_order_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert [d.text for d in find_source(str(tmp_path / "x.txt")).documents()] == [b"hello"]


# ---- ids ----


def test_ids_of_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    np.save(tmp_path / "x.npy", np.array([3, 1, 2], np.uint16))
    ids, size = read_ids(tmp_path / "x.npy")
    assert ids.tolist() == [3, 1, 2] and size == 4
    save_file({"a": torch.arange(5), "b": torch.ones(2)}, tmp_path / "x.safetensors")
    assert read_ids(tmp_path / "x.safetensors", "a")[0].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(BadOption, match="choose one with --field: a, b"):
        read_ids(tmp_path / "x.safetensors")
    with pytest.raises(BadOption, match="no row of token ids"):
        read_ids(tmp_path / "x.safetensors", "b")
    assert Numbers(9).decode(Numbers(9).encode(b"4 7").tolist()) == "4 7"
