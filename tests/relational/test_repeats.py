"""A whole relational training, twice, each time in a process of its own: the same bits in every loss and every parameter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.relational.test_blocks import skewed, some_blocks, step_over

ROOT = Path(__file__).resolve().parents[2]
TRAINING = """
import hashlib

from tests.relational.test_blocks import skewed, some_blocks, step_over

graph = skewed()
blocks = some_blocks(graph, batch_size=40)
step, model = step_over(graph, next(iter(blocks)))
losses = [float(step(block)) for block in blocks]
digest = hashlib.sha256()
for name, tensor in sorted(model.state_dict().items()):
    digest.update(name.encode() + tensor.numpy().tobytes())
assert losses[-1] < losses[0] and len(losses) == 10
print([loss.hex() for loss in losses], digest.hexdigest())
"""


def trained() -> subprocess.Popen[str]:
    found = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    return subprocess.Popen([sys.executable, "-c", TRAINING], stdout=subprocess.PIPE, text=True, env=os.environ | found)


@pytest.mark.slow
def test_two_processes_end_on_the_same_bits() -> None:
    running = [trained() for _ in range(2)]
    one, again = (process.communicate(timeout=300)[0] for process in running)
    assert [process.returncode for process in running] == [0, 0] and one == again


def test_two_steps_of_one_process_end_on_the_same_bits() -> None:
    graph = skewed()
    ends = []
    for _ in range(2):
        blocks = some_blocks(graph, batch_size=40)
        step, model = step_over(graph, next(iter(blocks)))
        losses = [step(block).clone() for _, block in zip(range(3), blocks, strict=False)]
        ends.append([*losses, *model.state_dict().values()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
