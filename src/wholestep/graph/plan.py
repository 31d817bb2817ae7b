"""A Plan: what was decided about one step for one model, shape and device, as plain data.

Planners make it, passes carry it out, files keep it. Values are named by `keys.py` (`model.layers.*.mlp.act_fn/silu`), so
that a decision holds for all equal layers and a person can read, write and compare plans. A plan says for what it was
made (`made_for`); where that no longer holds it is refused with the name of the field that changed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from wholestep.errors import BadOption, did_you_mean

FORMAT = 2
"""Of plans as files. A file of format 1 has no line that says that it is whole."""


def _field(default: Any, says: str = "", *, numbers: bool = False) -> Any:
    """A field of a plan. `says`: the comment beside it in a file; `numbers`: it decides about numbers, not only about memory."""
    about = {"says": says, "numbers": numbers}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=about)
    return dataclasses.field(default=default, metadata=about)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decisions about memory and kernels, and what they were expected to give. One more is one more field: files follow."""

    early_update: bool | None = _field(None, "parameters are updated as soon as their gradients are final")
    """None wherever that is exact, False never."""
    chunked_loss: bool | None = _field(None, "logits are made in chunks, never whole", numbers=True)
    """None leaves it to their size."""
    budget_bytes: int | None = _field(None, "of the card")
    """Reserved by the allocator, plus the CUDA context."""
    predicted_bytes: int | None = _field(None, "allocated, at the peak of the step")
    """The peak that was predicted: allocated."""
    predicted_seconds: float | None = _field(None, "of one step on the device under [made_for]")
    recompute: tuple[str, ...] = ()
    """Values of the forward pass that are not kept for the backward pass but recomputed there; `key@12` in the first 12 layers."""
    host: tuple[str, ...] = ()
    """Values that wait for the backward pass in the host's memory; `key@12` in the first 12 layers, which still compile once."""
    file: tuple[str, ...] = ()
    """The same in files (`compile(offload_path=...)`)."""
    cut_layers: bool | None = _field(None, "copies stand within layers too, not only between them")
    """None where values move, True always, False never."""
    state: Mapping[str, str] = _field({})
    """Parameter or pattern (`layers.*.mlp.*`) -> where its optimizer state lies: `card` or `host`; the last that matches counts."""
    precision: Mapping[str, str] = _field({}, numbers=True)
    """Module path or pattern (`lm_head`, `*.attn`) -> fp32, bf16 or fp16, where it is not what the whole step has."""
    layout: Mapping[str, str] = _field({})
    """Module path or pattern of convolutions -> `channels_last` or `as_written`; all others as it pays. `step.plan` has
    what was done."""
    kernel: Mapping[str, str] = _field({})
    """Value, module path or pattern -> the implementation it takes (`*.attn` -> `flash`); all others are measured. `step.plan` has
    what was chosen. Implementations round differently, and compute the same."""
    fuse: tuple[str, ...] = ()
    """Module paths or patterns, each compiled as a region of its own; `matched: ...` for operators that a recipe's line matched."""
    replace: Mapping[str, str] = _field({})
    """What a recipe put in the place of modules or operators: place -> what computes there. A plan with such entries is used
    together with the recipe, which carries them out."""
    mesh: Mapping[str, int] = _field({})
    """Axis -> how many ranks, where several run the step."""
    shard: Mapping[str, str] = _field({})
    """Parameter, or pattern of equal layers -> how it is cut among ranks: `0 tp` is its first dimension over the axis tp. As for
    `replace`, the recipe carries it out."""
    stages: Mapping[str, str] = _field({})
    """Module path -> the stage of a pipeline that it is in. Not carried out yet."""
    reasons: Mapping[str, str] = _field({})
    """Value -> why: bytes freed, what it is made from, what that costs."""
    made_for: Mapping[str, Any] = _field({})
    """Model, batch, sequence, precision, device, versions: what must still hold for the plan to be used."""

    def __post_init__(self) -> None:
        """A value has one place."""
        seen: dict[str, str] = {}
        for place in ("recompute", "host", "file"):
            for base in dict.fromkeys(key.partition("@")[0] for key in getattr(self, place) if isinstance(key, str)):
                if base in seen:
                    hint = "leave it out of one of them"
                    raise BadOption(f"{base} is listed under {seen[base]} and under {place}", hint=hint)
                seen[base] = place

    @property
    def decides_numbers(self) -> bool:
        """Whether it makes another training of a step."""
        return any(
            getattr(self, f.name) not in (None, {}) for f in dataclasses.fields(self) if f.metadata.get("numbers")
        )

    @property
    def moves(self) -> bool:
        """Whether anything waits outside of the card."""
        return bool(self.host or self.file or "host" in self.state.values())

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT} | dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The plan in a table read from a file; one clear error for anything else."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        given = {name: value for name, value in data.items() if name != "format"}
        if data.get("format") not in (1, FORMAT):
            raise BadOption(f"a plan of format {data.get('format')!r}", hint=f"this version reads format {FORMAT}")
        for name in sorted(given.keys() - known):
            hint = did_you_mean(name, known, f"fields are {', '.join(sorted(known))}")
            hint = "a recipe is given by --recipe" if name == "verbs" else hint
            raise BadOption(f"a plan with an unknown field {name!r}", hint=hint)
        for name, value in given.items():
            if known[name].default == ():
                if not isinstance(value, list | tuple):
                    raise BadOption(f"{name} = {value!r}", hint="it must be a list of names")
                given[name] = tuple(value)
        return cls(**given)

    def changed_field(self, now: Mapping[str, Any]) -> str | None:
        """The first thing that is not as it was when the plan was made: `batch: 8, now 16`; None when all holds."""
        for name, before in self.made_for.items():
            if json.dumps(now.get(name), default=str) != json.dumps(before, default=str):
                return f"{name}: made for {before}, now {now.get(name)}"
        return None
