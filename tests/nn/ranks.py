"""Two ranks on gloo: what each of the processes started by test_wrappers.py runs.

    python ranks.py STORE RANK

Every rank trains a plain and a converted copy on its own half of the batch, wrapped in each of the ways in turn, and
compares gradients and parameters. It prints one line per way: its name, then `ok` or the first difference.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholestep

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from tests.nn.lean_models import HIDDEN, Net, saved_bytes

WAYS = ("ddp", "fsdp", "fsdp-norms")


def wrapped(model: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    for block in model.blocks:
        # one group per block, and one per norm: its weight is sharded again by the time the Linear after it needs it
        if how == "fsdp-norms":
            fully_shard(block.norm1)
            fully_shard(block.norm2)
        fully_shard(block)
    fully_shard(model)
    return model


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def compare(how: str, rank: int) -> None:
    torch.manual_seed(0)
    plain = Net()
    lean = copy.deepcopy(plain)
    with torch.no_grad():
        plain.norm.weight[:3] = 0.0
        lean.norm.weight[:3] = 0.0
    assert wholestep.nn.convert(lean).swapped
    models = [wrapped(m, how) for m in (plain, lean)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    torch.manual_seed(1 + rank)
    for _ in range(3):
        x = torch.randn(2, 5, HIDDEN)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert torch.equal(whole(p.grad), whole(q.grad)), f"gradient of {name}"
            assert torch.equal(whole(p), whole(q)), name
    before, after = (saved_bytes(m, x.requires_grad_()) for m in models)
    assert after < 0.75 * before, (before, after)


def main(store: str, rank: int) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for how in WAYS:
        try:
            compare(how, rank)
            print(how, "ok", flush=True)
        except (AssertionError, RuntimeError) as error:
            print(how, str(error).splitlines()[0], flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
