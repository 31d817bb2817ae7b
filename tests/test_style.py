"""Rules about the tree that no linter knows: docstrings, file length, names, and no path of anybody's machine."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "wholestep"
MAX_LINES = 800
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|farm)/")
NOT_OURS = {".git", ".venv", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "build"}
VAGUE_NAMES = {"utils", "util", "helpers", "misc"}


def repository_files() -> list[Path]:
    """What git tracks or would add; without git (an unpacked archive), every file outside caches and environments."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
        paths = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [path for path in ROOT.rglob("*") if not NOT_OURS & set(path.relative_to(ROOT).parts)]
    return sorted(path for path in paths if path.is_file())


def text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


FILES = repository_files()
PYTHON_FILES = [path for path in FILES if path.suffix == ".py"]


def test_the_repository_is_seen() -> None:
    assert Path(__file__).resolve() in PYTHON_FILES
    assert ROOT / "src" / "wholestep" / "graph" / "training_graph.py" in PYTHON_FILES


def test_every_module_has_a_docstring() -> None:
    def lacks_docstring(path: Path) -> bool:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        return bool(tree.body) and ast.get_docstring(tree) is None

    package = [path for path in PYTHON_FILES if path.name != "__init__.py" or path.is_relative_to(ROOT / "src")]
    assert not [str(path.relative_to(ROOT)) for path in package if lacks_docstring(path)]


def test_no_file_is_too_long() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PYTHON_FILES}
    assert not [f"{path.relative_to(ROOT)}: {n} lines" for path, n in lengths.items() if n > MAX_LINES]


def test_files_are_named_for_what_they_hold() -> None:
    assert not [str(path.relative_to(ROOT)) for path in PYTHON_FILES if path.stem in VAGUE_NAMES]


def test_no_machine_path_is_mentioned() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in FILES
        for number, line in enumerate((text_of(path) or "").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert not found


@pytest.mark.parametrize("folder", ["work", "root", "farm"])
def test_a_machine_path_would_be_seen(folder: str) -> None:
    assert MACHINE_PATH.search(f'open("/{folder}/data.bin")')
    assert not MACHINE_PATH.search(f"https://example.org/{folder}/x") and not MACHINE_PATH.search(f"a/{folder}/b")


def test_operators_are_named_where_they_are_made_or_rewritten() -> None:
    """What is known of an operator is asked of its record; only capture makes them, passes rewrite them, `nn` offers them."""
    named = re.compile(r"ops\.ws\.\w|\bws\.[a-z]\w*\.default|[\"']ws::\w")
    folders = {"ops", "capture", "passes", "nn"}
    found = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in folders
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if named.search(line) and not line.lstrip().startswith(("#", '"""'))
    ]
    assert not found
