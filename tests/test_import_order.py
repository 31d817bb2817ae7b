"""A folder imports only from those before it in the order in which data flows; anything else is named file:line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "wholestep"
# fmt: off
ORDER = (
    "errors", "compat", "disk", "frames", "graph", "tiers", "options", "optim", "ops", "cost", "capture", "relational", "nn",
    "schedule", "passes", "lower", "plan", "runtime", "compiler", "verify", "api", "report", "data", "train", "profile", "commands",
    "bench", "search", "__init__", "cli", "__main__",
)
# fmt: on


def imported_folders(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, folder of wholestep) for every import, also those inside functions, under TYPE_CHECKING, or by name."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *filter(None, [node.module])))
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and _imports_by_name(node):
            names = [node.args[0].value]  # type: ignore[attr-defined,list-item]
        for parts in (name.split(".") for name in names):
            if parts[0] == "wholestep":  # what `from wholestep import` finds in no folder comes from __init__
                yield node.lineno, parts[1] if len(parts) > 1 and parts[1] in ORDER else "__init__"


def _imports_by_name(call: ast.Call) -> bool:
    """`importlib.import_module("wholestep.api")`: an import all the same."""
    named = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    first = call.args[0] if call.args else None
    return named in ("import_module", "__import__") and isinstance(first, ast.Constant) and isinstance(first.value, str)


def violations(source: str, path: Path) -> list[str]:
    """`path` is relative to the package."""
    here = path.parts[0].removesuffix(".py")
    if here not in ORDER:
        return [f"{path}:1: {here!r} has no place in ORDER"]
    found = imported_folders(ast.parse(source), ("wholestep", *path.parts[:-1]))
    late = sorted((line, there) for line, there in found if ORDER.index(there) > ORDER.index(here))
    return [f"{path}:{line}: {here} imports {there}, which comes after it" for line, there in late]


def test_folders_import_only_from_those_before_them() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert paths
    assert not [line for path in paths for line in violations(path.read_text("utf-8"), path.relative_to(PACKAGE))]


def test_a_late_import_is_named() -> None:
    late = "if TYPE_CHECKING:\n    from ..lower.regions import y\nfrom wholestep.graph import x\nimport wholestep"
    assert violations(late, Path("passes/fold.py")) == [
        "passes/fold.py:2: passes imports lower, which comes after it",
        "passes/fold.py:4: passes imports __init__, which comes after it",
    ]
    assert violations("from . import a\nfrom .. import graph\nimport torch", Path("passes/fold.py")) == []
    by_name = 'importlib.import_module("wholestep.api").compile'
    assert violations(by_name, Path("train/hf.py")) == []
    assert violations(by_name, Path("verify/a.py")) == ["verify/a.py:1: verify imports api, which comes after it"]
    assert violations("", Path("helpers/a.py")) == ["helpers/a.py:1: 'helpers' has no place in ORDER"]
