"""One spine: under every option and every field of a Plan, `verify` checks the very program that `compile` runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep
from wholestep.errors import BadOption
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph
from wholestep.options import Options
from wholestep.schedule import Recipe
from wholestep.schedule.verb import make


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(50, 8), nn.LayerNorm(8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
        self.drop, self.head, self.mixed = nn.Dropout(0.1), nn.Linear(8, 50), nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        x = x + F.scaled_dot_product_attention(*[x.unsqueeze(1)] * 3).squeeze(1)
        x = x + self.mixed(x.unflatten(-1, (2, 4)).transpose(1, 2)).mean((1, 3)).unsqueeze(-1)
        for layer in self.layers:
            x = x + self.drop(layer(self.norm(x)))
        return self.head(x)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def made() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randint(0, 50, (4, 6))


def doubled(graph: TrainingGraph) -> TrainingGraph:
    """A pass of one's own, that changes nothing."""
    return graph


SHARDS = (
    make("shard", "layers.*.0", "weight", 0),
    make("shard", "layers.*.0", "bias", 0),
    make("shard", "layers.*.2", "weight", 1),
)
AGAIN = ("layers.*.1/gelu", "layers.*.0/addmm")
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "memory": [{"memory": "64MiB"}, {"memory": "60KiB"}],
    "host_memory": [{"host_memory": "1MiB"}],
    "plan": [
        {"plan": Plan(recompute=AGAIN)},
        {"plan": Plan(early_update=False)},
        {"plan": Plan(chunked_loss=True)},
        {"plan": Plan(precision={"layers.1": "fp32"}), "precision": "bf16"},
        {"plan": Plan(kernel={"/attention": "math"})},
        {"plan": Plan(layout={"mixed": "channels_last"})},
        {"plan": Plan(recompute=AGAIN, precision={"head": "fp32"}), "precision": "bf16"},
        {"plan": Plan(fuse=("layers.*",))},
        {"plan": Plan(host=("layers.*.1/gelu",), state={"*": "host"})},
        {"plan": Plan(cut_layers=True)},
        {"plan": Plan(file=("layers.*.0/addmm",)), "offload_path": "here"},
    ],
    "recipe": [
        {"recipe": Recipe((make("recompute", "layers.*", every=2), make("precision", "head", "bf16")))},
        {"recipe": Recipe((make("decompose", "head"), make("recompute", "layers.*", ratio=0.0))), "memory": "64MiB"},
    ],
    "mesh": [{"recipe": Recipe(SHARDS), "mesh": wholestep.Mesh(tp=2), "clip_norm": 0.5}],
    "precision": [{"precision": "bf16"}, {"precision": "fp16"}],
    "accumulate": [{"accumulate": 2}],
    "clip_norm": [{"clip_norm": 0.5}],
    "clip_scope": [{"clip_norm": 0.5, "clip_scope": "layer"}],
    "nonfinite": [{"nonfinite": "skip"}],
    "chunked_loss": [{"chunked_loss": True}],
    "dynamic": [{"dynamic": True}, {"dynamic": False}],
    "guards": [{"guards": "off"}],
    "passes": [{"passes": [doubled]}, {"passes": wholestep.default_passes().without("fold_views", "recompute")}],
    "early_update": [{"early_update": False}],
    "those that leave the program as it is": [
        {
            "check": "off",
            "mesh": None,
            "cuda_graph": False,
            "cache": False,
            "dump": "here",
            "seed": 7,
            "verbose": False,
            "backend": "interpret",
        }
    ],
}
CASES = [pytest.param(case, id=f"{name} {i}") for name, cases in OPTIONS.items() for i, case in enumerate(cases)]


def compiled(**options: Any) -> Any:
    model, optimizer, batch = made()
    return wholestep.compile(model, loss, optimizer, batch, **{"backend": "interpret", "cache": False, **options})


@pytest.mark.parametrize("options", CASES)
def test_what_is_verified_is_what_runs(options: dict[str, Any], tmp_path: Path) -> None:
    options = {"backend": "interpret", "cache": False, **options}
    options |= {name: str(tmp_path) for name in ("dump", "offload_path") if name in options}
    step = compiled(**options)
    model, optimizer, batch = made()
    report = wholestep.verify(model, loss, optimizer, batch, steps=1, eval_too=False, **options)
    assert step.program is not None and report.programs == [step.program], (step.explain(), str(report))
    assert report.ok, str(report)


def test_no_option_and_no_field_is_forgotten() -> None:
    tried = {name for cases in OPTIONS.values() for case in cases for name in case}
    assert tried == {field.name for field in dataclasses.fields(Options)}
    decided = {
        "recompute",
        "early_update",
        "precision",
        "chunked_loss",
        "kernel",
        "layout",
        "fuse",
        "host",
        "file",
        "cut_layers",
        "state",
    }
    told = {
        "replace",
        "mesh",
        "shard",
        "stages",
        "reasons",
        "budget_bytes",
        "predicted_bytes",
        "predicted_seconds",
        "made_for",
    }
    assert {field.name for field in dataclasses.fields(Plan)} == decided | told
    used = {
        name for case in OPTIONS["plan"] for name in decided if getattr(case["plan"], name) != getattr(Plan(), name)
    }
    assert used == decided


def test_programs_differ_where_options_change_them() -> None:
    plain = compiled().program
    for plan in (Plan(recompute=AGAIN), Plan(kernel={"/attention": "math"}), Plan(layout={"mixed": "channels_last"})):
        assert compiled(plan=plan).program != plain


def test_an_option_that_there_is_not_is_named() -> None:
    model, optimizer, batch = made()
    with pytest.raises(BadOption, match=r"no option 'precison'.*did you mean precision\?"):
        wholestep.verify(model, loss, optimizer, batch, precison="bf16")
