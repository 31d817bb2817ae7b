"""Calling the command line in this process, and a program of a user's own for it to train."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SETUP = """
import torch
from torch import nn

def setup(width=8, lr=0.05, bad=-1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.2), nn.Linear(width, 1))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 4, generator=generator)
    if bad >= 0:
        x[bad] = float("nan")
    loader = torch.utils.data.DataLoader(x, batch_size=5, shuffle=bad < 0)
    return model, lambda m, b: (m(b) - b.sum(1, keepdim=True)).square().mean(), torch.optim.AdamW(model.parameters(), lr=lr), loader

def no_scalar():
    model, _, optimizer, loader = setup()
    return model, lambda m, b: m(b), optimizer, loader

def frozen():
    model, loss, optimizer, loader = setup()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model, loss, optimizer, loader

def wrong():
    return 3

def raises():
    raise RuntimeError("the disk is\\non fire")

def narrow():
    model, loss, optimizer, loader = setup()
    return model, loss, optimizer, torch.ones(5, 3)

def misfit():
    model, loss, optimizer, loader = setup()
    return model, lambda m, b: m(b["x"]).mean(), optimizer, torch.ones(3, 4)
"""


@dataclasses.dataclass(frozen=True)
class Done:
    """What a call came to."""

    code: int
    out: str
    err: str


Call = Callable[..., Done]


def program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`own_training.py` in `folder`, which becomes the working directory."""
    (folder / "own_training.py").write_text(SETUP)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "own_training", raising=False)
    return folder


def caller(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """`call("train", "--steps", "3")` runs main() as the program does."""
    from wholestep import cli

    def call(*arguments: str) -> Done:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["wholestep", *arguments])
        with pytest.raises(SystemExit) as raised:
            cli.main()
        out, err = capsys.readouterr()
        return Done(int(raised.value.code or 0), out, err)

    return call
