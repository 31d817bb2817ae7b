"""The reader's own Python standard library as a typed graph: what contains, imports, calls and inherits what.

In: a count of files, a folder (the library's own when not given). Out: a PyGraph: edges with relations, and the kind of every node
(module, class, function, method). The task is to name the kind of held-out nodes from the edges alone: nothing else is given.

Every node has one dotted name (`threading.Thread.run`), and so has what a file refers to once its imports are followed; an edge is
made where the two meet. What leads out of the graph (builtins, files beyond the count) makes none.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wholestep.data.draws import generator_for
from wholestep.data.python_kinds import FILES, KINDS, RELATIONS
from wholestep.data.texts import NOT_LIBRARY
from wholestep.errors import BadOption
from wholestep.relational.graph import RelGraph

HELD_OUT_PART = 0.2

Function = ast.FunctionDef | ast.AsyncFunctionDef
Batch = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PyGraph:
    """The graph; edge i goes from src[i] to dst[i]."""

    names: tuple[str, ...]
    kind: Tensor
    src: Tensor
    dst: Tensor
    etype: Tensor
    files: int

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits of its content."""
        edges = torch.stack([self.src, self.dst, self.etype]).numpy().tobytes()
        content = "\n".join(self.names).encode("utf-8", "surrogateescape") + edges + self.kind.numpy().tobytes()
        return hashlib.sha256(content).hexdigest()[:12]


def read_pygraph(files: int = FILES, root: Path | None = None) -> PyGraph:
    """The first `files` files in the order of their names."""
    if files < 1:
        raise BadOption(f"files={files}", hint="use 1 or more")
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    found = _Reading()
    count = 0
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if not NOT_LIBRARY & set(path.relative_to(root).parts) and found.read(path, root):
            count += 1
        if count == files:
            break
    if not count:
        raise BadOption(
            f"data 'pygraph': there are no .py files in {root}", hint="this Python keeps its library elsewhere"
        )
    return found.graph(count)


class _Reading:
    """Nodes as they are met, and what they refer to by name."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {}
        self.kinds: list[int] = []
        self.contained: list[tuple[int, int]] = []
        self.referred: list[tuple[int, str, tuple[str, ...]]] = []
        """Node, relation, and the dotted names it may mean, the likeliest first."""

    def read(self, path: Path, root: Path) -> bool:
        """Was it a module that can be read?"""
        try:
            with warnings.catch_warnings():  # old escapes in somebody else's text are not this run's matter
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return False
        parts = path.relative_to(root).with_suffix("").parts
        package = parts[:-1]
        name = ".".join(package if parts[-1] == "__init__" else parts) or "__init__"
        bound = dict(_bindings(tree, package))
        module = self._node(name, "module")
        for target in dict.fromkeys(bound.values()):
            self.referred.append((module, "imports", (target, target.rpartition(".")[0])))
        self._inside(tree, module, name, None, name, bound)
        return True

    def _node(self, name: str, kind: str) -> int:
        """The node of that name, made where there is none: a function defined twice is one."""
        if name not in self.number:
            self.number[name] = len(self.kinds)
            self.kinds.append(KINDS.index(kind))
        return self.number[name]

    def _inside(
        self, tree: ast.AST, owner: int, name: str, class_: str | None, module: str, bound: dict[str, str]
    ) -> None:
        """What stands in `tree` belongs to `owner`; `class_` is the class around it, which `self` means."""
        for child in ast.iter_child_nodes(tree):
            if isinstance(child, ast.ClassDef | Function):
                inner = f"{name}.{child.name}"
                is_class = isinstance(child, ast.ClassDef)
                node = self._node(
                    inner, "class" if is_class else "method" if isinstance(tree, ast.ClassDef) else "function"
                )
                if node != owner:
                    self.contained.append((owner, node))
                if isinstance(child, ast.ClassDef):
                    for base in child.bases:
                        self._refer(node, "inherits", base, class_, module, bound)
                self._inside(child, node, inner, inner if is_class else class_, module, bound)
                continue
            if isinstance(child, ast.Call):
                self._refer(owner, "calls", child.func, class_, module, bound)
            self._inside(child, owner, name, class_, module, bound)

    def _refer(
        self, node: int, relation: str, to: ast.AST, class_: str | None, module: str, bound: dict[str, str]
    ) -> None:
        first, rest = _dotted(to)
        if first is None:
            return
        if first in ("self", "cls") and class_ is not None:
            self.referred.append((node, relation, (class_ + rest,)))
        else:
            self.referred.append((node, relation, (f"{module}.{first}{rest}", bound.get(first, "") + rest)))

    def graph(self, files: int) -> PyGraph:
        edges = {(0, one, other) for one, other in self.contained}
        for node, relation, names in self.referred:
            met = next((self.number[name] for name in names if name in self.number), None)
            if met is not None and met != node:
                edges.add((RELATIONS.index(relation), node, met))
        etype, src, dst = torch.tensor(sorted(edges), dtype=torch.int64).reshape(-1, 3).unbind(1)
        return PyGraph(
            names=tuple(self.number), kind=torch.tensor(self.kinds), files=files,
            src=torch.cat([src, dst]), dst=torch.cat([dst, src]), etype=torch.cat([etype, etype + len(RELATIONS)]),
        )  # fmt: skip


def _bindings(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(name in the file, dotted name it was imported as), imports within functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
                yield alias.name, alias.name  # `import a.b` binds a, and it is a.b that is imported
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield alias.asname or alias.name, f"{origin}.{alias.name}"


def _dotted(node: ast.AST) -> tuple[str | None, str]:
    """`a.b.c` as ("a", ".b.c"); None where it begins with something else than a name."""
    rest = ""
    while isinstance(node, ast.Attribute):
        rest = f".{node.attr}{rest}"
        node = node.value
    return (node.id, rest) if isinstance(node, ast.Name) else (None, rest)


class PyGraphBatches:
    """The whole graph at every step, as {"graph", "nodes", "labels"}: the nodes whose kind is told."""

    unit = "samples"

    def __init__(self, read: PyGraph, *, device: torch.device) -> None:
        self.read, self.digest = read, read.digest
        nodes, self.relations = len(read.names), 2 * len(RELATIONS)
        order = torch.randperm(nodes, generator=generator_for(0, 0, "pygraph"))  # the same nodes for every seed
        self.asked, self.told = order.split([int(nodes * HELD_OUT_PART), nodes - int(nodes * HELD_OUT_PART)])
        self.units, self.device = len(self.told), device
        self.graph = self._graph(read.src, read.dst, read.etype)
        self.whole = self._formed(self.graph, self.told)

    def batch(self, number: int) -> Batch:
        """The same for every number."""
        return self.whole

    def held_out(self) -> list[Batch]:
        """The nodes that are asked about; none in a graph of a few nodes."""
        return [self._formed(self.graph, self.asked)] if len(self.asked) else []

    def passages(self, whole: bool) -> list[Batch]:
        """The nodes that are asked about, or all."""
        return [self._formed(self.graph, torch.arange(len(self.read.names)))] if whole else self.held_out()

    def commonest(self) -> float:
        """The share of held-out nodes that are of the kind that is commonest among the others: what needs no learning."""
        kind = torch.bincount(self.read.kind[self.told]).argmax()
        return float((self.read.kind[self.asked] == kind).double().mean())

    def edges(self) -> list[Batch]:
        """Awkward batches: one node told, every edge from node 0, no edge at all."""
        src, dst, etype = self.read.src, self.read.dst, self.read.etype
        hub, none = self._graph(torch.zeros_like(src), dst, etype), self._graph(src[:0], dst[:0], etype[:0])
        return [
            self._formed(self.graph, self.told[:1]), self._formed(hub, self.told), self._formed(none, self.told)
        ]  # fmt: skip

    def describe(self) -> str:
        return (
            f"pygraph: {self.read.files} files of your Python's library as {len(self.read.names):,} nodes and "
            f"{len(self.read.src):,} edges of {self.relations} relations; the kinds of {len(self.asked):,} nodes held out"
        )

    def _graph(self, src: Tensor, dst: Tensor, etype: Tensor) -> RelGraph:
        made = RelGraph(src, dst, etype, num_nodes=len(self.read.names), num_relations=self.relations)
        return made.to(self.device)

    def _formed(self, graph: RelGraph, nodes: Tensor) -> Batch:
        return {"graph": graph, "nodes": nodes.to(self.device), "labels": self.read.kind[nodes].to(self.device)}
