"""Lightning Fabric around a Wholestep step: Fabric places model and data and writes checkpoints, the step trains.

Fabric wraps what it sets up. Wholestep is given what is inside (`model.module`, `optimizer.optimizer`): the wrapper's
work, precision and `fabric.backward`, is then the step's own, so mixed precision is asked for with
`wholestep.compile(precision="bf16")` and not with `Fabric(precision=...)`. Evaluation, loaders and `fabric.save` use the
wrapped objects as ever; the step goes into the same checkpoint, since it has a `state_dict`. A second run resumes from
half way and must end at the same weights.

    pip install lightning-fabric      # or lightning
    python examples/fabric.py --steps 60
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import wholestep

ROWS, BATCH = 512, 32


def fabric_class() -> Any:
    """Fabric, from whichever of its two packages is installed; None without one."""
    try:
        from lightning.fabric import Fabric
    except ImportError:
        try:
            from lightning_fabric import Fabric
        except ImportError:
            return None
    return Fabric


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def make_loader(fabric: Any) -> Any:
    """The same batches in the same order in every epoch."""
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
    return fabric.setup_dataloaders(DataLoader(TensorDataset(x, x[:, :1] * x[:, 1:2] + x[:, 2:3]), batch_size=BATCH))


class Run:
    """A model, its optimizer and its step, as one training run holds them."""

    def __init__(self, fabric: Any, backend: str) -> None:
        model = make_model()
        self.fabric, self.loader = fabric, make_loader(fabric)
        self.model, self.optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        example = next(iter(self.loader))
        self.step = wholestep.compile(
            self.model.module, loss_fn, self.optimizer.optimizer, example, seed=0, backend=backend
        )

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "step": self.step}

    def train(self, until: int) -> torch.Tensor:
        """Steps up to a number, from wherever the run stands; the last loss."""
        loss = torch.tensor(float("nan"))
        while self.step.count < until:
            for place, batch in enumerate(self.loader):
                if place == self.step.count % len(self.loader) and self.step.count < until:
                    loss = self.step(batch)
        return loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """On the wrapped module, in eval mode."""
        self.model.eval()
        losses = [loss_fn(self.model, batch) for batch in self.loader]
        self.model.train()
        return float(torch.stack(losses).mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--backend", choices=["inductor", "interpret"], default="interpret")
    given = parser.parse_args()
    Fabric = fabric_class()
    if Fabric is None:
        print("this example needs Lightning Fabric: pip install lightning-fabric")
        return 0
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    run = Run(fabric, given.backend)
    before = run.evaluate()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "halfway.ckpt"
        run.train(given.steps // 2)
        fabric.save(path, run.state)
        run.train(given.steps)
        after = run.evaluate()
        fabric.print(
            f"loss on the whole set {before:.4f} -> {after:.4f} after {run.step.count} steps ({run.step.rung})"
        )
        resumed = Run(fabric, given.backend)
        fabric.load(path, resumed.state)
        fabric.print(f"resumed at step {resumed.step.count}")
        resumed.train(given.steps)
    pairs = zip(run.model.state_dict().values(), resumed.model.state_dict().values())
    gap = max(float((a - b).abs().max()) for a, b in pairs)
    fabric.print(f"the resumed run ends at weights that differ by {gap:.1e}")
    return 0 if after < before and gap < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
