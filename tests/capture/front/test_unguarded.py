"""What Dynamo does not guard: whose code is looked at, and what is noticed."""

from __future__ import annotations

import inspect

import torch
from tests.runtime.twins import Side, interpreted
from torch import nn

from wholestep.capture.modes import is_own_file


def test_whose_code_looks_for_what_is_missing() -> None:
    """Python's own `inspect` catches AttributeError; only the user's code makes thousands of tables worth looking at."""
    assert is_own_file(__file__)
    assert not any(map(is_own_file, (inspect.__file__, torch.__file__, "/x/lib/python3/dist-packages/timm/layers.py")))


def test_a_name_that_a_module_gains_is_noticed() -> None:
    class Careful(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return super().forward(x) * self.boost
            except AttributeError:
                return super().forward(x)

    model = Careful(2, 2)
    step = interpreted(
        Side(model, torch.optim.SGD(model.parameters()), lambda m, b: m(b).sum()), torch.ones(1, 2), check="off"
    )
    unguarded = step.front.entries[0].unguarded
    assert unguarded.counted and unguarded.changed() is None
    model.boost = 2.0
    assert unguarded.changed() == "a name that was missing, or is"
