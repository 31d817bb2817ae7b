"""ws::packed_recurrent against torch's own packed layers: states and all gradients, every kind, both ways, awkward lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from wholestep.ops import packed_recurrent

KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
SIZES = {"some": [3, 3, 2, 1, 0], "all alike": [3, 3, 3], "one step": [3], "one sequence": [1, 1, 1], "one of one": [1]}
INPUTS, WIDTH = 4, 5


def operands(kind: str, sizes: list[int], both: bool, bias: bool, dtype: torch.dtype) -> tuple[Any, ...]:
    source = torch.Generator().manual_seed(len(sizes) + len(kind))

    def drawn(*shape: int) -> torch.Tensor:
        return (0.5 * torch.randn(*shape, generator=source, dtype=torch.float64)).to(dtype).requires_grad_()

    ways, gates = (2 if both else 1), packed_recurrent.GATES[kind] * WIDTH
    weights = []
    for _ in range(ways):
        weights += [drawn(gates, INPUTS), drawn(gates, WIDTH), *([drawn(gates), drawn(gates)] if bias else [])]
    states = [drawn(ways, sizes[0], WIDTH) for _ in range(2 if kind == "lstm" else 1)]
    return (
        drawn(sum(sizes), INPUTS),
        torch.tensor(sizes),
        states[0],
        states[1] if kind == "lstm" else None,
        weights,
        kind,
        both,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("both", [False, True], ids=["forwards", "both ways"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_forward_and_gradients(sizes: list[int], both: bool, kind: str) -> None:
    for bias, dtype, tolerance in (
        (True, torch.float64, 1e-12),
        (False, torch.float64, 1e-12),
        (True, torch.float32, 1e-5),
    ):
        call = operands(kind, sizes, both, bias, dtype)
        theirs = packed_recurrent.reference(*call)
        ours = torch.ops.ws.packed_recurrent(*call)[: len(theirs)]
        leaves = [call[0], call[2], *([call[3]] if kind == "lstm" else []), *call[4]]
        gradients = []
        for results in (ours, theirs):
            total = sum((r * torch.linspace(-1, 1, r.numel(), dtype=dtype).reshape(r.shape)).sum() for r in results)
            gradients.append(torch.autograd.grad(total, leaves))
        for a, b in zip((*ours, *gradients[0]), (*theirs, *gradients[1]), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_gradients_of_states_alone() -> None:
    """Where nobody reads the states of all steps, or nobody reads the last ones."""
    for taken in (0, 1, 2):
        call = operands("lstm", SIZES["some"], True, True, torch.float64)
        leaves = [call[0], *call[4]]
        ours, theirs = (
            torch.autograd.grad(results[taken].square().sum(), leaves)
            for results in (torch.ops.ws.packed_recurrent(*call), packed_recurrent.reference(*call))
        )
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_the_operator_is_well_made(kind: str) -> None:
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    call = operands(kind, [3, 2, 1], True, True, torch.float32)
    torch.library.opcheck(torch.ops.ws.packed_recurrent.default, call, test_utils=checks)
