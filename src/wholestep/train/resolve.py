"""MODEL as `package.module:callable`: a function that returns (model, loss_fn, optimizer, example_batch).

In: the name and values for the function's parameters. Out: what it returns; every way to get it wrong is one clear line. The
fourth may also be an iterable of batches, such as a DataLoader.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from wholestep.errors import BadOption, WholestepError, did_you_mean

RETURNS = "return (model, loss_fn, optimizer, example_batch)"


def find_from_here() -> None:
    """Modules are found from the working directory, as `python -m` would."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def find_function(name: str, *, what: str = "MODEL") -> Callable[..., Any]:
    """The function called `package.module:callable`. `what` it is for, for messages."""
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise BadOption(f"{what} {name!r} is not package.module:callable", hint=f"name a function, to {RETURNS}")
    find_from_here()
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise _not_there(name, what, error) from error
    except Exception as error:  # anything may happen while somebody's module is imported
        raise BadOption(
            f"{what} {name!r}: importing {module_name} raised {_said(error)}", where=_place(error)
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise _no_function(module_name, function_name, [n for n in vars(module) if callable(getattr(module, n))])
    return function


def refuse_missing(name: str, *, what: str = "MODEL") -> None:
    """The same without importing the module, where its source shows that there is no such function; else nothing."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        find_function(name, what=what)
    find_from_here()
    if "." in module_name:  # looking would import what is above it
        return
    try:
        spec = importlib.util.find_spec(module_name)
    except (
        ImportError,
        ValueError,
        AttributeError,
    ):  # of a relative name, or of a module that was replaced by something else
        return
    if spec is None:
        raise _not_there(name, what, f"No module named {module_name!r}")
    if not (spec.origin or "").endswith(".py"):
        return
    try:
        tree = ast.parse(Path(spec.origin or "").read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    bound = _bound(tree)
    if bound is not None and function_name not in bound:
        raise _no_function(module_name, function_name, bound)


def _bound(tree: ast.Module) -> list[str] | None:
    """The names that a module binds; None where its source does not tell."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.append(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found += [alias.asname or alias.name for alias in node.names]
    hidden = {"*", "__getattr__"} & set(found) or any(
        isinstance(node, ast.Name) and node.id in ("globals", "exec", "setattr", "vars") for node in ast.walk(tree)
    )
    return None if hidden else found


def _not_there(name: str, what: str, why: object) -> BadOption:
    return BadOption(f"{what} {name!r}: {why}", hint="run where the module can be imported")


def _no_function(module_name: str, function_name: str, known: Iterable[str]) -> BadOption:
    hint = did_you_mean(function_name, known, "name a function of that module", shown=f"{module_name}:{{}}")
    return BadOption(f"{module_name} has no function {function_name!r}", hint=hint)


def parameters(function: Callable[..., Any]) -> tuple[dict[str, Any], bool]:
    """(name -> default of its parameters, does it take any other keyword)."""
    try:
        listed = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return {}, False
    named = {
        p.name: None if p.default is p.empty else p.default
        for p in listed
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    return named, any(p.kind is p.VAR_KEYWORD for p in listed)


def call(name: str, function: Callable[..., Any], values: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    """What the function returns when called with `values`."""
    made = call_one(name, function, values)
    if not isinstance(made, tuple) or len(made) != 4:
        kind = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise BadOption(f"{name} returned {kind}", hint=RETURNS)
    return made


def call_one(name: str, function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Whatever the function returns; what it raises is one line."""
    lacking = [p.name for p in _parameters_without_default(function) if p.name not in values]
    if lacking:
        raise BadOption(
            f"{name} needs {', '.join(lacking)}", hint=f"give --set {lacking[0]}=VALUE, or a default in its source"
        )
    try:
        return function(**values)
    except WholestepError:
        raise
    except Exception as error:  # anything may happen in somebody's function
        raise BadOption(f"{name} raised {_said(error)}", where=_place(error)) from error


def resolve(name: str, values: Mapping[str, Any] | None = None) -> tuple[Any, Any, Any, Any]:
    """Find and call in one."""
    return call(name, find_function(name), values or {})


def _parameters_without_default(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        listed = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p for p in listed if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _place(error: Exception) -> str | None:
    """file:line of the innermost frame outside of installed packages: the user's own line."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename != __file__ and "site-packages" not in frame.filename and "importlib" not in frame.filename:
            return f"{frame.filename}:{frame.lineno}"
    return None
