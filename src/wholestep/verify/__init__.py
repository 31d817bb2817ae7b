"""Side by side with eager PyTorch: losses, gradients, buffers, optimizer state; and who is to blame.

The package is callable: importing any of its modules binds the name `wholestep.verify` to the package, which would
otherwise hide the function of that name.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("wholestep.verify.verify").verify(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
