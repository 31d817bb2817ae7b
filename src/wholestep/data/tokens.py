"""Text to token ids and back: bytes, a byte-pair encoding (BPE) trained on the spot, a tokenizer.json, or plain numbers.

In: a text and the kind of tokens asked for. Out: a Tokens, whose `encode` and `decode` are exact inverses for bytes and BPE.
A trained BPE is kept in the cache folder under the digest of all it depends on, so only the first run pays for training it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from wholestep.disk import cache_folder, read_sealed, write_sealed
from wholestep.errors import BadOption, first_line

if TYPE_CHECKING:  # its names are read before torch is loaded
    from torch import Tensor

KINDS = ("bytes", "bpe")
RESERVED = ("<pad>", "<start>", "<end>", "<mask>")
"""The first ids when a model's configuration gives them a meaning: most pad with 0, 1 or 2; the mask is the last."""
TOKENIZER_FILE = "tokenizer.json"
_BYTE_VALUES = 256
_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<end>", "[SEP]")
_ROLES = {
    "pad_token": ("<pad>", "[PAD]"), "bos_token": ("<start>", "<s>", "[CLS]"), "eos_token": _ENDS,
    "mask_token": ("<mask>", "[MASK]"), "unk_token": ("<unk>", "[UNK]"),
}  # fmt: skip
"""What the usual names of special tokens mean, the commonest first."""


class Tokens(Protocol):
    """A way to cut text into tokens."""

    kind: str
    size: int
    """Ids run from 0 to size - 1."""
    mask_id: int | None
    end_id: int | None
    """Ends a document, where there is such an id."""

    @property
    def key(self) -> str:
        """Stands for what `encode` does."""
        ...

    def files(self) -> dict[str, bytes]:
        """What transformers' AutoTokenizer opens, by file name; nothing without the package tokenizers."""
        ...

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
        self.end_id = RESERVED.index("<end>") if reserved else None

    @property
    def key(self) -> str:
        return f"bytes {self.reserved}"

    def files(self) -> dict[str, bytes]:
        """A BPE that joins nothing: the same ids."""
        if not bpe_available():
            return {}
        import tokenizers

        names = RESERVED[: self.reserved]
        vocabulary = {name: number for number, name in enumerate((*names, *_letters()))}
        made = _byte_level(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
        made.add_special_tokens([*names])
        return Pieces("bytes", made).files()

    def encode(self, text: bytes) -> Tensor:
        import torch

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
        self.mask_id, self.end_id = self._first_of("<mask>", "[MASK]"), self._first_of(*_ENDS)

    def _first_of(self, *names: str) -> int | None:
        ids = (self.tokenizer.token_to_id(name) for name in names)
        return next((i for i in ids if i is not None), None)

    @property
    def key(self) -> str:
        return hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest()

    def files(self) -> dict[str, bytes]:
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        for role, names in _ROLES.items():
            found = next((name for name in names if self.tokenizer.token_to_id(name) is not None), None)
            if found is not None:
                config[role] = found
        return {
            TOKENIZER_FILE: self.tokenizer.to_str(pretty=True).encode("utf-8"),
            "tokenizer_config.json": (json.dumps(config, indent=1) + "\n").encode(),
        }

    def encode(self, text: bytes) -> Tensor:
        import torch

        words = text.decode("utf-8", errors="replace")
        return torch.tensor(self.tokenizer.encode(words, add_special_tokens=False).ids, dtype=torch.int64)

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))


class Numbers:
    """Ids of which nobody said what they mean: a text is their numbers."""

    kind = "ids"
    mask_id: int | None = None
    end_id: int | None = None

    def __init__(self, size: int) -> None:
        self.size = size

    @property
    def key(self) -> str:
        return f"ids {self.size}"

    def files(self) -> dict[str, bytes]:
        return {}

    def encode(self, text: bytes) -> Tensor:
        import torch

        try:
            return torch.tensor([int(word) for word in text.split()], dtype=torch.int64)
        except ValueError:
            what = f"{text.decode('utf-8', 'replace')[:40]!r} is no row of token ids, and there is no tokenizer"
            raise BadOption(what, hint="give ids such as '12 7 99', or a tokenizer with --tokenizer") from None

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def bpe_available() -> bool:
    """Is the `tokenizers` package installed?"""
    return importlib.util.find_spec("tokenizers") is not None


@dataclasses.dataclass(frozen=True, slots=True)
class Examples:
    """Texts to train a BPE on, read only when they are needed; `key` stands for them."""

    key: str
    read: Callable[[], Iterable[bytes]]


def make_tokens(kind: str, text: bytes | Examples, vocabulary: int, *, reserved: bool = False) -> Tokens:
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
    examples = Examples(hashlib.sha256(text).hexdigest(), lambda: [text]) if isinstance(text, bytes) else text
    return Pieces("bpe", _trained(examples, vocabulary, names))


def find_tokenizer(path: Path) -> Path:
    """The tokenizer.json that is meant by a folder with one, or by the file itself."""
    found = path / TOKENIZER_FILE if path.is_dir() else path
    if not found.is_file():
        what = f"there is no {TOKENIZER_FILE} in {path}" if path.is_dir() else f"there is no {path}"
        raise BadOption(f"--tokenizer: {what}", hint="name a folder that holds one, bytes, or bpe")
    return found


def read_tokens(path: Path) -> Tokens:
    """The tokenizer of a tokenizer.json."""
    if not bpe_available():
        raise BadOption(f"{path} needs the package tokenizers, which is not installed", hint="pip install tokenizers")
    import tokenizers

    try:
        return Pieces("file", tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # the package raises plain Exception
        raise BadOption(f"{path} is not a tokenizer: {first_line(error)}", hint="or --set tokenizer=bpe") from None


def _trained(examples: Examples, vocabulary: int, names: tuple[str, ...]) -> Any:
    """A byte-level BPE, from the cache or trained now. Training is deterministic: the same text gives the same ids."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    facts = json.dumps(["bpe 1", tokenizers.__version__, vocabulary, names, examples.key])
    path = cache_folder("tokens") / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.json"
    kept = read_sealed(path)
    if kept is not None:
        try:
            return tokenizers.Tokenizer.from_str(kept.decode("utf-8"))
        except Exception:  # a damaged cache file is trained again; the package raises plain Exception
            path.unlink(missing_ok=True)
    made = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(names),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator((text.decode("utf-8", errors="replace") for text in examples.read()), trainer)
    write_sealed(path, made.to_str().encode("utf-8"))
    return made


def _byte_level(model: Any) -> Any:
    """A tokenizer that reads bytes, written as letters."""
    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def _letters() -> list[str]:
    """The letter that stands for each byte in such a tokenizer: itself where it can be seen, else the next one after 255."""
    seen = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(_BYTE_VALUES, 2 * _BYTE_VALUES))
    return [chr(value if value in seen else next(hidden)) for value in range(_BYTE_VALUES)]
