"""MODEL on the command line: `package.module:callable`, a function that returns (model, loss_fn, optimizer, example_batch)."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import Any

from wholestep.errors import BadOption


def resolve(name: str) -> tuple[Any, Any, Any, Any]:
    """What the named function returns; every way to get it wrong is one clear line."""
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name or module_name == "hf":
        raise BadOption(
            f"MODEL {name!r} is not package.module:callable",
            hint="presets and hf:<model_type> are not part of this version; name a function that returns "
            "(model, loss_fn, optimizer, example_batch)",
        )
    if os.getcwd() not in sys.path:  # as `python -m` would do
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise BadOption(f"MODEL {name!r}: {error}", hint="run where the module can be imported") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        close = difflib.get_close_matches(function_name, [n for n in vars(module) if callable(getattr(module, n))], n=1)
        hint = f"did you mean {module_name}:{close[0]}?" if close else "name a function of that module"
        raise BadOption(f"{module_name} has no function {function_name!r}", hint=hint)
    made = function()
    if not isinstance(made, tuple) or len(made) != 4:
        raise BadOption(
            f"{name} returned a {type(made).__name__}", hint="return (model, loss_fn, optimizer, example_batch)"
        )
    return made
