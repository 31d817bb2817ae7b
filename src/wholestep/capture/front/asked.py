"""Questions whether code is compiled: the code that is trained is answered as eager PyTorch answers it.

Dynamo says yes, and code that branches on the answer would train another model than it does in eager. Libraries ask so that they
keep what a compiler cannot follow (checks of data, records of outputs) out of its way and compute the same: they are told the
truth, or most of their models could not be captured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo import external_utils
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from wholestep.capture.front.growing import growing

TOLD_THE_TRUTH = frozenset(
    {"torch", "torchvision", "torchaudio", "torch_geometric", "transformers", "accelerate", "diffusers", "peft", "einops",
     "timm", "wholestep"}
)  # fmt: skip
"""Packages."""
QUESTIONS = (
    torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting, torch._utils.is_compiling,
    external_utils.is_compiling,
)  # fmt: skip


def _package_that_asks(tx: Any) -> str:
    """Of the innermost function that is traced and is not itself a question (`is_torchdynamo_compiling`)."""
    while tx.f_code.co_name.startswith("is_") and getattr(tx, "parent", None) is not None:
        tx = tx.parent
    return str(tx.f_globals.get("__name__", "")).partition(".")[0]


def _as_in_eager(plain: Any) -> Any:
    def handle(function: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        """Dynamo's, of a question."""
        if getattr(growing, "on", False) and _package_that_asks(tx) not in TOLD_THE_TRUTH:
            return VariableTracker.build(tx, False)
        return plain(function, tx, *args, **kwargs)

    return handle


for _question in QUESTIONS:
    _handlers = TorchInGraphFunctionVariable._get_handlers()
    _handlers[_question] = _as_in_eager(_handlers[_question])
