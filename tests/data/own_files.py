"""Small data of a user's own: texts, rows, images."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

WORDS = (
    "the",
    "step",
    "is",
    "one",
    "graph",
    "and",
    "its",
    "plan",
    "of",
    "memory",
    "says",
    "what",
    "to",
    "keep",
    "again",
)


def words(count: int, seed: int) -> str:
    chance = random.Random(seed)
    return "".join(chance.choice(WORDS) + (".\n" if i % 9 == 8 else " ") for i in range(count))


def texts(folder: Path, length: int = 400) -> Path:
    """Four files in two folders."""
    for number, name in enumerate(("a.txt", "b.txt", "more/c.md", "more/d.md")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(words(length, number))
    return folder


def parquet(path: Path, rows: int = 60) -> Path:
    """A column `text`, and one that is none."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as format

    format.write_table(pyarrow.table({"text": [words(30, i) for i in range(rows)], "id": list(range(rows))}), path)
    return path


def images(folder: Path, classes: tuple[str, ...] = ("cat", "dog", "newt"), each: int = 6) -> Path:
    """Images of odd sizes, each class of a colour of its own."""
    image = pytest.importorskip("PIL.Image")
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            colour = tuple(40 + 15 * i if channel == number else 10 for channel in range(3))
            image.new("RGB", (9 + i, 12), colour).save(folder / name / f"{i}.png")
    return folder
