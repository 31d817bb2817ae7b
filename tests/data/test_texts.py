"""Texts and tokens: what is read, how it is cut, and that nothing is lost."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from wholestep.data import texts, tokens
from wholestep.data.texts import read_text
from wholestep.data.tokens import RESERVED, make_tokens, read_tokens
from wholestep.errors import BadOption

TEXT = ("Whence cam'st thou, worthy thane? \u00c6sop said: \u201cfrom Fife, great king\u201d.\n\n" * 40).encode()


def test_shakespeare_travels_with_the_package() -> None:
    text = read_text("shakespeare")
    assert len(text.content) > 1_000_000 and b"MACBETH." in text.content
    assert text.digest == read_text("shakespeare").digest


def test_the_standard_library_is_capped_and_without_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "test/t.py", "site-packages/s.py", "pack/c.py", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<{path.stem}>")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert read_text("stdlib").content == b"<a><b><c>"
    monkeypatch.setattr(texts, "STDLIB_BYTES", 4)
    assert read_text("stdlib").content == b"<a><"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("shakespear", "did you mean shakespeare"),
        ("digit", "did you mean digits"),
        ("/nowhere/x.txt", "or the path of a text file"),
    ],
)
def test_data_that_is_not_there_is_one_line(name: str, said: str) -> None:
    with pytest.raises(BadOption, match=said) as caught:
        read_text(name, others=("digits",))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reserved", [False, True])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_decoding_undoes_encoding(kind: str, reserved: bool) -> None:
    made = make_tokens(kind, TEXT, 320, reserved=reserved)
    other = TEXT + "\t0123 \u65e5\u672c & unseen".encode()
    ids = made.encode(other)
    assert made.decode(ids.tolist()).encode() == other
    assert ids.min() >= (len(RESERVED) if reserved else 0) and ids.max() < made.size
    assert made.mask_id == (RESERVED.index("<mask>") if reserved else None)
    if kind == "bpe":
        assert len(ids) < len(other) / 2 and made.size <= 320


def test_a_bpe_is_trained_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path))
    first = make_tokens("bpe", TEXT, 300)
    (kept,) = (tmp_path / "tokens").iterdir()
    before = kept.stat().st_mtime_ns
    assert make_tokens("bpe", TEXT, 300).encode(TEXT).equal(first.encode(TEXT))
    assert kept.stat().st_mtime_ns == before
    assert make_tokens("bpe", TEXT, 301).size >= first.size and len(list(kept.parent.iterdir())) == 2
    head, _, body = kept.read_text(encoding="utf-8").rpartition("\n")
    other = json.loads(body)
    del other["model"]["merges"][0]  # a tokenizer too, that cuts words in another way
    for damaged in ("{", f"{head}\n{json.dumps(other)}", json.dumps(other)):
        kept.write_text(damaged, encoding="utf-8")
        assert make_tokens("bpe", TEXT, 300).encode(TEXT).equal(first.encode(TEXT))


def test_without_the_package_a_bpe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "bpe_available", lambda: False)
    with pytest.raises(BadOption, match="pip install tokenizers"):
        make_tokens("bpe", TEXT, 300)
    assert make_tokens("bytes", TEXT, 0).size == 256


def test_a_bpe_smaller_than_the_bytes_is_refused() -> None:
    with pytest.raises(BadOption, match="use 260 or more"):
        make_tokens("bpe", TEXT, 259, reserved=True)


def test_a_tokenizer_file_is_read(tmp_path: Path) -> None:
    made = make_tokens("bpe", TEXT, 300, reserved=True)
    path = tmp_path / "tokenizer.json"
    path.write_text(made.tokenizer.to_str())  # type: ignore[attr-defined]
    again = read_tokens(path)
    assert again.encode(TEXT).equal(made.encode(TEXT)) and again.mask_id == made.mask_id
    path.write_text("nonsense")
    with pytest.raises(BadOption, match="is not a tokenizer"):
        read_tokens(path)
