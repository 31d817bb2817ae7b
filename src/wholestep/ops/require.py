"""ws::require(holds, device): a fact about sizes that only data tells, looked at before anything is computed with it.

In: 1 where the fact holds, 0 where not: sizes are numbers on the host, so looking costs nothing. Out: true, a 0-d tensor. Where
it does not hold the step ends here, with `DoesNotHold`: code that was compiled for two masks that pick as many places would
otherwise read past the end of the shorter one. The driver calls it (it is not `compiled`): a compiler takes the fact for granted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wholestep.ops.record import record

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define("require(SymInt holds, Device device) -> Tensor")


class DoesNotHold(RuntimeError):
    """A fact about sizes that was taken for granted is none."""


def reference(holds: int, device: torch.device) -> Tensor:
    if not holds:
        raise DoesNotHold("a size that depends on the data is not what the captured graph assumes")
    return torch.ones((), dtype=torch.bool, device=device)


@torch.library.register_fake("ws::require", lib=LIBRARY)
def _fake(holds: int, device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.bool, device=device)


LIBRARY.impl("require", reference, "CompositeExplicitAutograd")


record(
    "ws::require",
    reference=reference,
    cases=lambda: [(1, torch.device("cpu"))],
    kind="movement",
    flops=lambda call: 0,
    compiled=False,  # a compiler takes the fact for granted
    guards=True,
)
