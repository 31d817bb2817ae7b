"""Rules about the tree that no linter knows: docstrings, file length, names, and no path of anybody's machine."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
from scripts.sz import functions

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "wholestep"
MAX_LINES, MAX_LINES_IN_PACKAGE, MAX_LINES_OF_FUNCTION = 800, 450, 60
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


def test_no_file_or_function_of_the_package_is_too_long() -> None:
    """Signature and docstring count: what an option means stands beside its declaration, examples beside the command."""
    paths = sorted(PACKAGE.rglob("*.py"))
    long_files = [
        f"{path}: {n} lines" for path in paths if (n := len(path.read_text().splitlines())) > MAX_LINES_IN_PACKAGE
    ]
    long_functions = [
        f"{path}: {name}, {lines} lines"
        for path in paths
        for lines, name in functions(path)
        if lines > MAX_LINES_OF_FUNCTION
    ]
    assert not long_files + long_functions


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
    """What an operator is is asked of its record; capture and relational layers make them, schedules and passes rewrite."""
    named = re.compile(r"ops\.ws\.\w|\bws\.[a-z]\w*\.default|[\"']ws::\w")
    folders = {"ops", "relational", "capture", "passes", "nn", "schedule"}
    found = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in folders
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if named.search(line) and not line.lstrip().startswith(("#", '"""'))
    ]
    assert not found


# ---- notes are data ----

READS_TEXT = {
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "split",
    "partition",
    "find",
    "index",
    "count",
    "replace",
}
REGEXES = {"match", "search", "fullmatch", "split", "findall", "finditer", "sub"}


def notes_read_as_text(source: str) -> list[int]:
    """Lines that look into a note's text: at an entry of something called `notes`, or at what is called `note`."""
    if "note" not in source:
        return []
    tree = ast.parse(source)
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.comprehension)]
    entries = {"note"} | {n.target.id for n in loops if _is_called(n.iter, "notes") and isinstance(n.target, ast.Name)}

    def is_note(node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and _is_called(node.func, "str"):
            return bool(node.args) and is_note(node.args[0])
        if isinstance(node, ast.Subscript):
            return _is_called(node.value, "notes") or is_note(node.value)
        return any(_is_called(node, name) for name in entries)

    def reads(node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            by_method = node.func.attr in READS_TEXT and is_note(node.func.value)
            return by_method or (node.func.attr in REGEXES and any(map(is_note, node.args)))
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            among = any(isinstance(op, ast.In | ast.NotIn) for op in node.ops) and _is_called(sides[-1], "notes")
            text = any(isinstance(side, ast.Constant | ast.JoinedStr) for side in sides)
            return text and (among or any(map(is_note, sides)))
        return isinstance(node, ast.Subscript) and is_note(node.value)

    return sorted({node.lineno for node in ast.walk(tree) if reads(node)})  # type: ignore[attr-defined]


def _is_called(node: ast.AST, name: str) -> bool:
    return getattr(node, "id", None) == name or getattr(node, "attr", None) == name


def test_no_code_decides_by_the_text_of_a_note() -> None:
    """`kind` and `data` are for code; the text is for people and may be worded anew."""
    folders = (ROOT / "src", ROOT / "benchmarks")
    paths = [path for path in PYTHON_FILES if any(path.is_relative_to(folder) for folder in folders)]
    found = {path.relative_to(ROOT): notes_read_as_text(path.read_text(encoding="utf-8")) for path in paths}
    assert not [f"{path}:{line}" for path, lines in found.items() for line in lines]


@pytest.mark.parametrize(
    "line",
    [
        '[n for n in step.notes if n.startswith("memory: ")]',
        'any("symbolic" in text for text in step.notes)',
        'note.removeprefix("check: ")',
        'step.notes[0].split(":")',
        're.match("pass", str(note))',
        '"nothing was captured" in report.notes',
        'note == "pass"',
        "note[:5]",
    ],
)
def test_reading_a_note_as_text_would_be_seen(line: str) -> None:
    assert notes_read_as_text(line) == [1]


@pytest.mark.parametrize(
    "line",
    [
        '[n for n in step.notes if n.kind == "memory"]',
        "note in self.notes",
        'note.data["done"]',
        "step.notes[:2]",
        'f"{note}"',
    ],
)
def test_what_is_no_reading_of_a_note(line: str) -> None:
    assert not notes_read_as_text(line)
