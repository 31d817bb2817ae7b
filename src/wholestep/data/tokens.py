"""Text to token ids and back: bytes, a byte-pair encoding (BPE) trained on the spot, or a tokenizer.json.

In: a text and the kind of tokens asked for. Out: a Tokens, whose `encode` and `decode` are exact inverses for bytes and BPE.
A trained BPE is kept in the cache folder under the digest of all it depends on, so only the first run pays for training it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from wholestep.disk import cache_folder, read_bytes, write_atomically
from wholestep.errors import BadOption

KINDS = ("bytes", "bpe")
RESERVED = ("<pad>", "<start>", "<end>", "<mask>")
"""The first ids when a model's configuration gives them a meaning: most pad with 0, 1 or 2; the mask is the last."""
_BYTE_VALUES = 256


class Tokens(Protocol):
    """A way to cut text into tokens."""

    kind: str
    size: int
    """Ids run from 0 to size - 1."""
    mask_id: int | None

    def encode(self, text: bytes) -> Tensor:
        """Ids, int64, on the CPU."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text; what is no valid UTF-8 becomes a replacement character."""
        ...


class Bytes:
    """One token per byte: no training, no dependency, any text."""

    kind = "bytes"

    def __init__(self, reserved: int = 0) -> None:
        self.reserved, self.size = reserved, _BYTE_VALUES + reserved
        self.mask_id = reserved - 1 if reserved else None

    def encode(self, text: bytes) -> Tensor:
        if not text:
            return torch.zeros(0, dtype=torch.int64)
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).long() + self.reserved

    def decode(self, ids: list[int]) -> str:
        return bytes(i - self.reserved for i in ids if i >= self.reserved).decode("utf-8", errors="replace")


class Pieces:
    """Tokens of the `tokenizers` package: a BPE trained here, or somebody's tokenizer.json."""

    def __init__(self, kind: str, tokenizer: Any) -> None:
        self.kind, self.tokenizer = kind, tokenizer
        # The largest id, not the count: a tokenizer.json may skip numbers.
        self.size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        masks = (tokenizer.token_to_id(name) for name in ("<mask>", "[MASK]"))
        self.mask_id = next((i for i in masks if i is not None), None)

    def encode(self, text: bytes) -> Tensor:
        words = text.decode("utf-8", errors="replace")
        return torch.tensor(self.tokenizer.encode(words, add_special_tokens=False).ids, dtype=torch.int64)

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))


def bpe_available() -> bool:
    """Is the `tokenizers` package installed?"""
    return importlib.util.find_spec("tokenizers") is not None


def make_tokens(kind: str, text: bytes, vocabulary: int, *, reserved: bool = False) -> Tokens:
    """Tokens of that kind for `text`; a BPE has at most `vocabulary` ids (fewer when the text has no more pairs to join)."""
    names = RESERVED if reserved else ()
    if kind == "bytes":
        return Bytes(len(names))
    if not bpe_available():
        hint = "pip install tokenizers, or --set tokenizer=bytes"
        raise BadOption("tokenizer=bpe needs the package tokenizers, which is not installed", hint=hint)
    smallest = _BYTE_VALUES + len(names)
    if vocabulary < smallest:
        hint = f"a BPE keeps every byte{' and the reserved ids' if names else ''}: use {smallest} or more, or tokenizer=bytes"
        raise BadOption(f"a BPE of {vocabulary} ids is too small", hint=hint)
    return Pieces("bpe", _trained(text, vocabulary, names))


def read_tokens(path: Path) -> Tokens:
    """The tokenizer of a folder with a model in it."""
    if not bpe_available():
        raise BadOption(f"{path} needs the package tokenizers, which is not installed", hint="pip install tokenizers")
    import tokenizers

    try:
        return Pieces("file", tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # the package raises plain Exception
        first = (str(error).splitlines() or ["unreadable"])[0]
        raise BadOption(f"{path} is not a tokenizer: {first}", hint="or --set tokenizer=bpe") from None


def _trained(text: bytes, vocabulary: int, names: tuple[str, ...]) -> Any:
    """A byte-level BPE, from the cache or trained now. Training is deterministic: the same text gives the same ids."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    facts = json.dumps(["bpe 1", tokenizers.__version__, vocabulary, names, hashlib.sha256(text).hexdigest()])
    path = cache_folder("tokens") / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.json"
    kept = read_bytes(path)
    if kept is not None:
        try:
            return tokenizers.Tokenizer.from_str(kept.decode("utf-8"))
        except Exception:  # a damaged cache file is trained again; the package raises plain Exception
            path.unlink(missing_ok=True)
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(names),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator([text.decode("utf-8", errors="replace")], trainer)
    write_atomically(path, made.to_str().encode("utf-8"))
    return made
