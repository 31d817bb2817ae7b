"""The systems that are measured, each as a way to turn a Part into a call `step(batch) -> loss`.

`eager` is the plain loop: zero_grad, forward under autocast where the workload asks for bf16, backward, clipping, update. The
peers differ from it in one thing each. A user's own contender is `package.module:callable`, a function
`(part, precision) -> step`; nothing here is privileged over it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wholestep import api
from wholestep.bench.contender_names import is_ours, known
from wholestep.bench.own_code import own_contender
from wholestep.bench.workload import Part, StepCall, Workload
from wholestep.errors import WholestepError

Maker = Callable[[Part, str], StepCall]
"""(part, precision) -> step."""

BUDGET = 0.5


class NotInstalled(WholestepError):
    """The contender or the workload needs a package that is not here."""


def applies(name: str, workload: Workload) -> bool:
    """Liger replaces kernels of Hugging Face's Llama; everything else takes any workload."""
    return name != "liger" or str(workload.gpu.get("preset", "")).startswith("llama")


def make_maker(name: str, passes: Sequence[Any] = (), recipe: str | None = None) -> Maker:
    """How contender `name` makes its steps; `passes` are appended to Wholestep's own, and `recipe` is given to its compiler.
    Imports what it needs now."""
    known(name)
    if is_ours(name):
        backend = "interpret" if name.startswith("wholestep-interpret") else "inductor"
        return lambda part, precision: Ours(part, precision, backend, passes, recipe)
    if name in ("compile", "compile-budget"):
        import torch._dynamo
        import torch._inductor.compile_fx  # noqa: F401  (imports are not part of the first step)
    if name == "compile-budget":
        budget = budget_context()
        return lambda part, precision: plain_step(part, precision, compiled=True, around=budget)
    if name == "liger":
        return _liger_step
    if ":" in name:
        return own_contender(name)
    return lambda part, precision: plain_step(part, precision, compiled=name == "compile")


def plain_step(
    part: Part, precision: str, *, compiled: bool = False, around: Callable[[], Any] = contextlib.nullcontext
) -> StepCall:
    """The loop everyone writes. `around` is a context for the forward, in which torch.compile does its work."""
    model, loss_fn, optimizer = part.model, part.loss_fn, part.optimizer
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kind = parameters[0].device.type

    def forward(batch: Any) -> torch.Tensor:
        with torch.autocast(kind, torch.bfloat16, enabled=precision == "bf16"):
            made = model(**batch).loss if loss_fn is None else loss_fn(model, batch)
        return made[0] if isinstance(made, tuple) else made

    loss_of = torch.compile(forward) if compiled else forward

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with around():
            loss = loss_of(batch)
        loss.backward()
        if part.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, part.clip_norm)
        optimizer.step()
        return loss.detach()

    return step


def budget_context() -> Callable[[], Any]:
    """A context with torch's activation memory budget set; an error where this torch has no such setting."""
    config = importlib.import_module("torch._functorch.config")
    if not hasattr(config, "activation_memory_budget"):
        raise WholestepError(f"torch {torch.__version__} has no activation memory budget")
    return lambda: config.patch(activation_memory_budget=BUDGET)


class Ours:
    """A compiled Step as a StepCall, which remembers the Step so that a row can tell what became of it."""

    def __init__(
        self, part: Part, precision: str, backend: str, passes: Sequence[Any], recipe: str | None = None
    ) -> None:
        self.name = part.name
        self.step = api.compile(
            part.model, part.loss_fn, part.optimizer, part.example_batch, precision=precision, clip_norm=part.clip_norm,
            backend=backend, passes=list(passes) or None, recipe=recipe, verbose=False,
        )  # fmt: skip

    def __call__(self, batch: Any) -> torch.Tensor:
        made = self.step(batch)
        return made[0] if isinstance(made, tuple) else made

    def facts(self) -> dict[str, Any]:
        """The rung, the falls, and everything `explain` says."""
        step = self.step
        return {
            "part": self.name, "rung": step.rung, "falls": [str(fall) for fall in step.falls],
            "seconds": dict(step.seconds), "explain": step.explain().splitlines(),
        }  # fmt: skip


def _liger_step(part: Part, precision: str) -> StepCall:
    """Liger's kernels are put into this very model; it needs Triton, hence a GPU."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise NotInstalled("liger-kernel is not installed")
    if not torch.cuda.is_available():
        raise NotInstalled("Liger's kernels need a GPU")
    apply = importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama
    apply(model=part.model)
    return plain_step(part, precision)
