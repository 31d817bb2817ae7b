"""Files and folders that a command should refuse: of other encodings, other programs, half-written, damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

TEXTS: dict[str, bytes] = {
    "broken.toml": b"model = ",
    "unknown.toml": b"setps = 3",
    "misplaced.toml": b"lr = 0.1",
    "out.toml": b'out = "runs/mine"',
    "kind.toml": b'steps = "many"',
    "half-step.toml": b"steps = 3.5",
    "no-table.toml": b"set = 3",
    "precision.toml": b'precision = "bf61"',
    "both.toml": b'memory = "8GiB"\nplan = "plan.toml"',
    "good.toml": b'model = "gpt-1m"',
    "verb.toml": b'format = 1\nverbs = [{ recomptue = "x" }]\n[end]\n',
    "taken/file.txt": b"x",
    "half/run.json": json.dumps({"format": "wholestep run", "version": 1, "status": "compiling"}).encode(),
    "foreign/run.json": b'{"project": "of another program"}',
    "newer/run.json": b'{"format": "wholestep run", "version": 99}',
    "cut/run.json": b'{"format": "wholestep ru',
    "config_only/config.json": b'{"model_type": "bert"}',
    "strange/config.json": b'{"model_type": "nothing"}',
    "good.txt": b"some words of a text " * 400,
    "short.txt": b"few",
    "empty.txt": b"",
    "utf16.txt": "hello".encode("utf-16") * 200,
    "latin1.txt": "caf\xe9 ".encode("latin-1") * 200,
    "binary.bin": bytes(range(256)) * 9,
    "mixed/a.txt": b"fine " * 400,
    "mixed/b.txt": b"\0\1\2" * 100,
    "missing.jsonl": b'{"text": "a"}\n\n{"txt": "b"}\n',
    "nested.jsonl": b'{"text": {"a": 1}}\n',
    "broken.jsonl": b'{"text": \n',
    "bad.parquet": b"PAR1nothing",
    "bad.safetensors": b"nothing",
    "tok/tokenizer.json": b"{}",
    "pictures/a/x.png": b"\x89PNG\r\n\x1a\nno",
    "pictures/b/y.png": b"no picture",
    "one/a/x.png": b"one class only",
    "\u6587\u5b57/\U0001f600.txt": b"",
}


def make(folder: Path) -> None:
    """All of them in `folder`."""
    from safetensors.numpy import save_file

    for name, content in TEXTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "nothing").mkdir()
    os.symlink("loop", folder / "loop")
    np.save(folder / "float.npy", np.ones(500))
    np.save(folder / "two-d.npy", np.ones((9, 9), np.int64))
    np.save(folder / "negative.npy", np.array([1, -2] * 300))
    save_file({"a": np.ones(500, np.int64), "b": np.ones(500, np.int64)}, folder / "two.safetensors")
