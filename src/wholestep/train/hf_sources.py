"""Configurations of transformers as its sources write them: what may be set, and of which kind, without importing it.

In: a model type, or a folder with a config.json. Out: an HFModel whose configuration is a stand-in, with fields and defaults where
they are plain values. Importing the package and torch takes seconds, a wrong `--set` should not. Whatever the sources leave open
is left to the class itself, later: None, or a field without a default.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wholestep.disk import read_json
from wholestep.errors import BadOption, WholestepError
from wholestep.train import hf_models, wishes

_AUTO = "models/auto"
_BASE = "PreTrainedConfig"
_KINDS: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
_REFUSES_HEADS = re.compile(r"raise ValueError\(.{0,120}?(?:multiple of|divisible by).{0,60}?heads", re.DOTALL)
"""A model whose width has to divide into its heads."""


@dataclasses.dataclass(frozen=True)
class StandIn:
    """A configuration that only knows what its class's source says."""

    title: str
    """Of the class."""
    values: Mapping[str, Any]
    kinds: Mapping[str, tuple[type, ...]]
    attribute_map: Mapping[str, str]
    """Other names of fields."""

    def __getattr__(self, name: str) -> Any:
        return self.values.get(self.named(name))

    def named(self, name: str) -> str:
        """What this class calls a field."""
        return self.attribute_map.get(name, name)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def changed(self, changes: Mapping[str, Any]) -> StandIn:
        named = {self.named(name): value for name, value in changes.items()}
        return dataclasses.replace(self, values={**self.values, **named})


def find(model: str, *, say: str) -> hf_models.HFModel | None:
    """As `hf_models.find`; None where only the package itself can tell."""
    root = _package()
    if root is None:
        return None
    try:
        classes, heads = _types(root), _heads(root)
        if not classes or not all(heads.values()):
            return None  # the sources are arranged otherwise in this version
        if model.startswith("hf:"):
            folder, stored = None, {"model_type": model.removeprefix("hf:")}
            if stored["model_type"] not in classes:
                raise hf_models.unknown_type(stored["model_type"], list(classes))
        else:
            folder = hf_models.folder_with_config(model)
            stored = read_json(folder / "config.json")
            if isinstance(stored, dict) and stored.get("model_type") not in classes:
                raise hf_models.unknown_type_in(model, stored.get("model_type"))
        config = _config(root, classes, stored)
    except WholestepError:
        raise
    except (OSError, ValueError, SyntaxError, KeyError, TypeError, AttributeError):
        return None
    return None if config is None else hf_models.found(say, stored["model_type"], folder, config, heads)


def configure(found: hf_models.HFModel, changes: Mapping[str, Any]) -> StandIn:
    """The stand-in with `changes`; one that is not of the kind its class asks for is one line."""
    kinds: Mapping[str, tuple[type, ...]] = found.config.kinds
    for name, value in changes.items():
        if name in kinds and not (value is None and type(None) in kinds[name]):
            wanted = [kind for kind in kinds[name] if kind is not type(None)]
            if wanted and not isinstance(value, (*wanted, *((int,) if float in wanted else ()))):
                raise wishes.wrong_kind(name, value, *wanted)
    made: StandIn = found.config.changed(changes)
    if changes:
        _refuse_heads(found.model_type, made)
    return made


def _refuse_heads(model_type: str, made: StandIn) -> None:
    """What most models find out when they are built, and say in these words."""
    width, heads, root = made.hidden_size, made.num_attention_heads, _package()
    called = made.named("num_attention_heads")
    if not (isinstance(width, int) and isinstance(heads, int) and root) or made.head_dim:
        return
    if heads < 1:
        raise BadOption(f"{called}={heads}", hint="use 1 or more")
    if "embedding_size" in made.values or called.startswith("encoder"):  # checked otherwise, or of a part not built
        return
    if width % heads and any(_REFUSES_HEADS.search(_text(path)) for path in _sources(root, model_type, "modeling")):
        what = f"{made.named('hidden_size')}={width} does not divide into {called}={heads}"
        raise BadOption(what, hint="use a multiple")


@functools.cache
def _package() -> Path | None:
    spec = importlib.util.find_spec("transformers")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_text(path))


def _sources(root: Path, model_type: str, kind: str) -> list[Path]:
    """The files of one kind, `configuration` or `modeling`, of a model type."""
    return sorted((root / "models" / model_type.replace("-", "_")).glob(f"{kind}_*.py"))


@functools.cache
def _types(root: Path) -> dict[str, str]:
    """Model type -> the class of its configuration."""
    found: dict[str, str] = {}
    for name in ("auto_mappings.py", "configuration_auto.py"):
        if (root / _AUTO / name).is_file():
            found |= _pairs(_tree(root / _AUTO / name), "CONFIG_MAPPING_NAMES")
    return found


@functools.cache
def _heads(root: Path) -> dict[str, dict[str, str]]:
    """Task -> the model types that have a head for it."""
    tree = _tree(root / _AUTO / "modeling_auto.py")
    return {task: _pairs(tree, table) for task, (_, table) in hf_models.TASKS.items()}


def _pairs(tree: ast.Module, name: str) -> dict[str, str]:
    """What statements that are about the table `name` put into it, as constants."""
    found: dict[str, str] = {}
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        called = (
            statement.value.func if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) else None
        )
        about = [*targets, called.value if isinstance(called, ast.Attribute) else None]
        if not any(isinstance(node, ast.Name) and node.id == name for node in about):
            continue
        for node in ast.walk(statement):
            pairs: Iterator[Any] = iter(())
            if isinstance(node, ast.Tuple) and len(node.elts) == 2:
                pairs = iter([node.elts])
            elif isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
            for key, value in pairs:
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    found[key.value] = ast.literal_eval(value) if isinstance(value, (ast.Constant, ast.Tuple)) else ""
    return found


def _config(root: Path, classes: Mapping[str, str], stored: Mapping[str, Any]) -> StandIn | None:
    model_type, title = stored["model_type"], classes[stored["model_type"]]
    for path in _sources(root, model_type, "configuration"):
        if any(isinstance(node, ast.ClassDef) and node.name == title for node in _tree(path).body):
            return StandIn(title, *_members(root, path, title)).changed(stored)
    return None


_Members = tuple[dict[str, Any], dict[str, tuple[type, ...]], dict[str, str]]


def _members(root: Path, path: Path, title: str) -> _Members:
    """(fields with defaults, the kinds of those that have one, other names of them) of a class and those it is made from."""
    tree = _tree(path)
    made = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == title), None)
    if made is None:
        raise KeyError(title)
    fields: dict[str, Any] = {}
    kinds: dict[str, tuple[type, ...]] = {}
    aliases: dict[str, str] = {}
    for base in made.bases:
        name = getattr(base, "id", "")
        where = root / "configuration_utils.py" if name.startswith(_BASE) else _imported(tree, path, name)
        if where is not None:
            its_fields, its_kinds, its_aliases = _members(root, where, name)
            fields, kinds, aliases = fields | its_fields, kinds | its_kinds, aliases | its_aliases
    for node in made.body:
        target = (
            node.target
            if isinstance(node, ast.AnnAssign)
            else node.targets[0]
            if isinstance(node, ast.Assign)
            else None
        )
        if getattr(target, "id", "") == "attribute_map":
            aliases = _constant(node.value) or {}  # type: ignore[attr-defined]
            fields = dict.fromkeys(aliases.values()) | fields
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            fields[node.target.id] = _constant(node.value)
            kinds.pop(node.target.id, None)
            if (kind := _kinds(node.annotation)) is not None:
                kinds[node.target.id] = kind
        elif isinstance(node, ast.FunctionDef):
            _assigned(node, fields, kinds)
    return fields, kinds, aliases


def _imported(tree: ast.Module, path: Path, name: str) -> Path | None:
    """The file that a base class comes from."""
    if any(isinstance(node, ast.ClassDef) and node.name == name for node in tree.body):
        return path
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            above = path.parents[node.level - 1] if node.level else None
            found = above and above.joinpath(*node.module.split(".")).with_suffix(".py")
            return found if found and found.is_file() else None
    return None


def _assigned(function: ast.FunctionDef, fields: dict[str, Any], kinds: dict[str, tuple[type, ...]]) -> None:
    """What a method is, takes, sets or mentions may be a field, with any value."""
    names = [function.name, *(argument.arg for argument in (*function.args.args, *function.args.kwonlyargs))]
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and getattr(node.value, "id", "") == "self"
        ):
            names.append(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names.append(node.value)
    for name in names:
        fields[name] = None
        kinds.pop(name, None)


def _constant(value: ast.expr | None) -> Any:
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


def _kinds(annotation: ast.expr) -> tuple[type, ...] | None:
    """`float | int | None` as types; None where anything else is in it."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        left, right = _kinds(annotation.left), _kinds(annotation.right)
        return None if left is None or right is None else (*left, *right)
    if isinstance(annotation, ast.Constant) and annotation.value is None:
        return (type(None),)
    kind = _KINDS.get(getattr(annotation, "id", ""))
    return None if kind is None else (kind,)
