"""A profile on a GPU: kernels find their calls, and the shares make sense."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from wholestep.profile.profile import profile_job
from wholestep.report.page import render_page
from wholestep.train.job import make_job

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("system", "backend"), [("wholestep", "interpret"), ("wholestep", "inductor"), ("eager", "interpret")]
)
def test_kernels_are_attributed(system: str, backend: str) -> None:
    torch.manual_seed(0)
    job: Any = make_job("gpt-1m", device="cuda")
    found = profile_job(job, system=system, backend=backend, steps=5, verified=False)
    assert found.shares["gpu_busy"] is not None and 0 < found.shares["gpu_busy"] <= 1
    launched = [row for row in found.rows if row.kernels]
    assert launched and found.unattributed < 0.2, [row for row in found.rows if row.flops is None][:5]
    assert any(row.kind in ("matmul", "region") and row.ms > 0 and row.flops for row in launched)
    assert sum(ms for _, ms in found.waterfall) == pytest.approx(found.step_ms["median"])
    assert found.memory is not None and found.memory.reserved_bytes
    assert len(render_page(found.to_json()).encode()) < 2**20


def test_torch_compile_is_listed_by_name() -> None:
    found = profile_job(make_job("gpt-1m", device="cuda"), system="compile", steps=5, memory=False)
    assert found.rows and all(row.flops is None for row in found.rows) and found.unattributed > 0
