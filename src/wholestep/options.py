"""Options: how a step is to be made, as one validated value. `compile` and `verify` take the same ones, by the same names.

This file says what each option means, which values it takes and which options exclude each other. What depends on the model or its
optimizer is checked where those are known (`compiler.py`).
"""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Iterable, Mapping
from typing import Any

from wholestep.errors import BadOption, NotBuiltYet, did_you_mean
from wholestep.graph.bytes import parse_bytes
from wholestep.graph.mesh import Mesh
from wholestep.graph.plan import Plan
from wholestep.graph.plan_file import PRECISIONS

BACKENDS = ("inductor", "interpret")
CHOICES: dict[str, tuple[str, ...]] = {
    "precision": PRECISIONS,
    "backend": BACKENDS,
    "check": ("first", "off"),
    "guards": ("dynamo", "off"),
    "clip_scope": ("global", "layer"),
}
SWITCHES: dict[str, tuple[bool | None, ...]] = {
    **dict.fromkeys(("dynamic", "early_update", "cuda_graph", "verbose"), (None, True, False)),
    "cache": (True, False),
}


def is_whole(value: Any) -> bool:
    """A whole number; True is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The keywords of `wholestep.compile`.

    Args:
        memory: a budget in bytes of the card ("26GiB", "auto" for what is free): values of the forward pass are recomputed in
            the backward pass where needed, at the least cost in time. If none fits, an error names the smallest budget that does.
        host_memory: how much host memory ("64GiB") may hold values and optimizer state: without a budget, as much as copies can be
            hidden behind computation; with one, as much as is needed. Same bits.
        offload_path: a folder, or several on different disks, for what does not fit in host memory. Disks are large and slow.
        plan: decisions made earlier (`wholestep plan`), instead of a budget. Without either, a GPU recomputes values that it
            computes faster than it stores; `plan=Plan()` keeps everything.
        recipe: how the model runs, verb by verb: a `wholestep.schedule(model)`, or the file of one. A verb wins over the budget.
        mesh: the ranks that run the step, `wholestep.Mesh(tp=4)`; tensors that `shard` lines of the recipe cut are divided among
            them. The ranks run side by side in this process (backend="interpret"), for inspection and verification; state stays
            whole in your model.
        precision: "fp32"; "bf16" (autocast); or "fp16" (autocast with dynamic loss scaling, as torch's GradScaler does it, on
            the device: a step whose gradients overflow changes nothing but the scale).
        accumulate: micro-batches per update.
        clip_norm: clip gradients by their global norm.
        clip_scope: "global", as torch does; "layer" clips every layer's gradients by their own norm, which changes the
            training; gradients are still freed early.
        nonfinite: "allow" updates as torch does whatever the gradients are; "skip" leaves parameters, optimizer state and
            buffers as they were when the gradients are not finite, decided on the device (the step counts all the same).
        chunked_loss: cross-entropy over the output of a linear layer in chunks of rows, so that the logits are never whole:
            None where they would take 256 MiB or more, True wherever it is recognised, False never. It rounds differently.
        backend: "inductor" compiles; "interpret" runs the graph operator by operator, bit for bit as eager does.
        dynamic: None decides by the sizes seen; True makes all batch sizes symbolic at once; False compiles every shape.
        check: "first" compares the first live step with eager PyTorch; "off" does not.
        guards: "dynamo": the step is captured anew when something changes that the loss read; "off" traces the loss once as
            plain Python, with every value that it read fixed, for code that Dynamo cannot take.
        passes: a Pipeline, or passes to run after the default ones.
        early_update: None updates every layer right after its backward where that is exact, so that its gradients are freed
            (not with clip_norm or nonfinite="skip", which need all gradients first); False updates at the end of the step.
        cuda_graph: None records one when it measures faster; True or False decides.
        cache: reuse captured graphs from earlier processes.
        dump: a folder; the graph is written there after every stage, as Python.
        seed: for dropout and random numbers; None takes torch's seed.
        verbose: progress on stderr, and at the end what `step.explain()` begins with; None shows progress on a terminal alone.
    """

    memory: str | int | None = None
    host_memory: str | int | None = None
    offload_path: Any = None
    plan: Plan | None = None
    recipe: Any = None
    mesh: Mesh | None = None
    precision: str = "fp32"
    accumulate: int = 1
    clip_norm: float | None = None
    clip_scope: str = "global"
    nonfinite: str = "allow"
    chunked_loss: bool | None = None
    backend: str = "inductor"
    dynamic: bool | None = None
    check: str = "first"
    guards: str = "dynamo"
    passes: Any = None
    early_update: bool | None = None
    cuda_graph: bool | None = None
    cache: bool = True
    dump: str | None = None
    seed: int | None = None
    verbose: bool | None = None

    def __post_init__(self) -> None:
        if self.memory is not None and self.memory != "auto":
            parse_bytes(self.memory)
        if self.plan is not None and not isinstance(self.plan, Plan):
            raise BadOption(f"plan={self.plan!r}", hint="give a wholestep.Plan")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise BadOption(f"{name}={getattr(self, name)!r}", hint=f"use one of {', '.join(map(repr, known))}")
        if self.host_memory is not None:
            parse_bytes(self.host_memory)
        self._check_kinds()
        self._check_memory()
        self._check_updates()
        self._check_mesh()

    def _check_kinds(self) -> None:
        for name, known in SWITCHES.items():
            if not any(getattr(self, name) is value for value in known):
                raise BadOption(f"{name}={getattr(self, name)!r}", hint=f"use one of {', '.join(map(str, known))}")
        if self.seed is not None and (isinstance(self.seed, bool) or not hasattr(self.seed, "__index__")):
            raise BadOption(f"seed={self.seed!r}", hint="use a whole number, or None for torch's seed")
        if self.dump is not None and not isinstance(self.dump, str | os.PathLike):
            raise BadOption(f"dump={self.dump!r}", hint="name a folder")
        if self.dump is not None and os.path.exists(self.dump) and not os.path.isdir(self.dump):
            raise BadOption(f"dump={self.dump!r} is a file", hint="name a folder")
        if self.passes is not None and (isinstance(self.passes, str) or not _are_functions(self.passes)):
            hint = "give a Pipeline, such as wholestep.default_passes(), or a list of functions graph -> graph"
            raise BadOption(f"passes={self.passes!r}", hint=hint)

    def _check_mesh(self) -> None:
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            raise BadOption(f"mesh={self.mesh!r}", hint="give a wholestep.Mesh, such as Mesh(tp=2)")
        for axis in ("dp", "pp") if self.mesh is not None else ():
            if self.mesh is not None and self.mesh.size(axis) > 1:
                raise NotBuiltYet(f"{self.mesh}: an axis {axis!r} of several ranks is not built yet", hint="use tp")

    def refuse_to_run(self) -> None:
        """What several ranks do not go with, where they are to run and not only to be planned."""
        if not self.several_ranks:
            return
        world = os.environ.get("WORLD_SIZE") or "1"
        others = {
            f"backend={self.backend!r}": self.backend != "interpret", "dynamic=True": self.dynamic is True,
            "guards='off'": self.guards == "off", f"clip_scope={self.clip_scope!r}": self.clip_scope != "global",
            f"memory={self.memory!r}": self.memory is not None, f"WORLD_SIZE={world}, several processes,": world != "1",
        }  # fmt: skip
        for name, given in others.items():
            if given:
                hint = "the ranks run side by side in one process, with backend='interpret' and without that"
                raise NotBuiltYet(f"{name} with mesh={self.mesh}", hint=hint)

    @property
    def several_ranks(self) -> bool:
        return self.mesh is not None and self.mesh.num_ranks > 1

    def _check_memory(self) -> None:
        if self.plan is not None and self.plan.precision and self.precision == "fp16":
            raise BadOption("a plan with precisions of modules and precision='fp16'", hint="use precision='bf16'")
        for name in ("host_memory", "offload_path") if self.plan is not None else ():
            if getattr(self, name) is not None and not (name == "offload_path" and self.plan.file):  # type: ignore[union-attr]
                hint = "a plan says itself what leaves the card: leave one of them out"
                raise BadOption(f"{name}={getattr(self, name)!r} together with plan=...", hint=hint)
        if self.plan is not None and self.plan.file and self.offload_path is None:
            raise BadOption("a plan that moves values to files", hint="name a folder for them: offload_path=...")
        if self.memory is not None and (self.plan is not None or self.dynamic is True):
            other = "plan=..." if self.plan is not None else "dynamic=True"
            raise BadOption(
                f"memory={self.memory!r} together with {other}",
                hint="a budget makes its own plan for every size: give one",
            )

    def _check_updates(self) -> None:
        """What can be updated layer by layer, and what clipping by layer goes with."""
        skips = self.nonfinite == "skip"
        if self.early_update and self.clip_scope == "global" and (self.clip_norm is not None or skips):
            option = f"clip_norm={self.clip_norm!r}" if self.clip_norm is not None else f"nonfinite={self.nonfinite!r}"
            hint = "all gradients are needed before the first update then: leave early_update out"
            raise BadOption(f"early_update=True with {option}", hint=hint)
        if self.clip_scope == "global":
            return
        others = {
            "no clip_norm": self.clip_norm is None, f"nonfinite={self.nonfinite!r}": skips,
            "precision='fp16'": self.precision == "fp16", f"accumulate={self.accumulate}": self.accumulate > 1,
            "early_update=False": self.early_update is False,
        }  # fmt: skip
        for name, given in others.items():
            if given:
                raise BadOption(f"clip_scope={self.clip_scope!r} with {name}", hint="leave one of the two out")

    @property
    def folders(self) -> list[str]:
        """Where files may lie."""
        given = self.offload_path
        return [] if given is None else [str(p) for p in given] if isinstance(given, list | tuple) else [str(given)]

    @property
    def plain(self) -> bool:
        """Whether the passes are the default ones."""
        return self.passes is None and self.recipe is None and self.clip_scope == "global" and self.early_update is None

    @property
    def chunks_loss(self) -> bool | None:
        return self.plan.chunked_loss if self.plan is not None and self.chunked_loss is None else self.chunked_loss


def _are_functions(passes: Any) -> bool:
    return isinstance(passes, Iterable) and all(map(callable, passes))


def options_of(given: Mapping[str, Any]) -> Options:
    """Options from keywords; one that there is not is named."""
    known = [field.name for field in dataclasses.fields(Options)]
    for name in given:
        if name not in known:
            raise BadOption(f"there is no option {name!r}", hint=did_you_mean(name, known, ", ".join(known)))
    return Options(**given)


def with_keywords(text: str | None) -> str:
    """A docstring that ends with arguments, and the keywords after them."""
    keywords = (Options.__doc__ or "").partition("    Args:\n")[2]
    return (text or "").rstrip() + "\n" + keywords
