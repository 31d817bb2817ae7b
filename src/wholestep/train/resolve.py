"""MODEL as `package.module:callable`: a function that returns (model, loss_fn, optimizer, example_batch).

In: the name and values for the function's parameters. Out: what it returns; every way to get it wrong is one clear line. The
fourth may also be an iterable of batches, such as a DataLoader.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from wholestep.errors import BadOption, WholestepError

RETURNS = "return (model, loss_fn, optimizer, example_batch)"


def find_function(name: str, *, what: str = "MODEL") -> Callable[..., Any]:
    """The function called `package.module:callable`. `what` it is for, for messages."""
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise BadOption(f"{what} {name!r} is not package.module:callable", hint=f"name a function, to {RETURNS}")
    if os.getcwd() not in sys.path:  # as `python -m` would do
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise BadOption(f"{what} {name!r}: {error}", hint="run where the module can be imported") from error
    except Exception as error:  # anything may happen while somebody's module is imported
        raise BadOption(
            f"{what} {name!r}: importing {module_name} raised {_said(error)}", where=_place(error)
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        close = difflib.get_close_matches(function_name, [n for n in vars(module) if callable(getattr(module, n))], n=1)
        hint = f"did you mean {module_name}:{close[0]}?" if close else "name a function of that module"
        raise BadOption(f"{module_name} has no function {function_name!r}", hint=hint)
    return function


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
        kind = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
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
