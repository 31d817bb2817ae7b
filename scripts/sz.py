"""Prints the size of the package: files, lines and lines of code per folder, largest folder first.

Lines of code leave out blank lines, comments and docstrings. The longest file of each folder is named, because a file
that keeps growing is the first sign of a missing seam; so are the longest functions, signature and docstring included.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "wholestep"


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """One Python file: all its lines, and those that hold code."""

    path: Path
    lines: int
    code: int


def docstring_lines(tree: ast.AST) -> set[int]:
    """Line numbers taken by strings that stand alone as a statement: docstrings, and notes below a field."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def measure(path: Path) -> Size:
    text = path.read_text(encoding="utf-8")
    documented = docstring_lines(ast.parse(text))
    lines = text.splitlines()
    code = sum(
        1
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.lstrip().startswith("#") and number not in documented
    )
    return Size(path, len(lines), code)


def functions(path: Path) -> list[tuple[int, str]]:
    """(lines, name) of every function in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [((node.end_lineno or node.lineno) - node.lineno + 1, node.name) for node in found]


def folder_of(path: Path, base: Path) -> str:
    parts = path.relative_to(base).parts
    return parts[0] if len(parts) > 1 else "."


def print_table(base: Path) -> None:
    folders: dict[str, list[Size]] = {}
    for path in sorted(base.rglob("*.py")):
        folders.setdefault(folder_of(path, base), []).append(measure(path))
    print(f"{base.relative_to(ROOT)!s:<18} {'files':>5} {'lines':>7} {'code':>7}  longest file")
    for folder, sizes in sorted(folders.items(), key=lambda item: -sum(size.code for size in item[1])):
        print_row(folder, sizes)
    print_row("total", [size for sizes in folders.values() for size in sizes])
    print()


def print_row(label: str, sizes: list[Size]) -> None:
    lines, code = sum(size.lines for size in sizes), sum(size.code for size in sizes)
    longest = max(sizes, key=lambda size: size.lines, default=None)
    where = f"{longest.lines:>4}  {longest.path.name}" if longest else ""
    print(f"  {label:<16} {len(sizes):>5} {lines:>7} {code:>7}  {where}")


def print_longest_functions(base: Path, count: int = 5) -> None:
    found = [
        (lines, f"{path.relative_to(base)}: {name}") for path in base.rglob("*.py") for lines, name in functions(path)
    ]
    print(f"longest functions of {base.relative_to(ROOT)}")
    for lines, where in sorted(found, reverse=True)[:count]:
        print(f"  {lines:>4}  {where}")


def main() -> None:
    for base in (PACKAGE, ROOT / "tests"):
        print_table(base)
    print_longest_functions(PACKAGE)


if __name__ == "__main__":
    main()
