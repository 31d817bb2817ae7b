"""Concatenations with nothing: copies in the graph, the same numbers, types, strides and gradients as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep


def nothing(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor([], dtype=dtype or x.dtype)


def written_to(x: Tensor) -> Tensor:
    """The copy is written to, and what was copied is read after that."""
    joined = torch.cat([nothing(x), x], dim=-2)
    joined.mul_(2.0)
    return joined + x


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "before": lambda x: torch.cat([nothing(x), x], dim=-2),
    "behind, and twice": lambda x: torch.concat((x, nothing(x), nothing(x)), dim=1),
    "turned": lambda x: torch.cat([nothing(x), x.transpose(0, 1)], dim=0).transpose(0, 1),
    "of a wider type": lambda x: torch.cat([nothing(x, torch.float64), x]).float(),
    "written to": written_to,
    "by name": lambda x: torch.cat(tensors=[nothing(x), x], dim=0),
    "of one dimension": lambda x: torch.cat([nothing(x), x.flatten()]).view_as(x),
    "of one row": lambda x: torch.cat([nothing(x), x[:1]]) + x,
    "beside no row": lambda x: torch.cat([x[:0], x]),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_trains_as_in_eager(way: str) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: Any, x: Tensor) -> Tensor:
        return WAYS[way](model(x)).square().mean()

    (ours, first), (theirs, second) = made(), made()
    x = torch.randn(4, 3)
    step = wholestep.compile(ours, loss, first, x, backend="interpret", check="off")
    for _ in range(3):
        found = step(x)
        second.zero_grad()
        expected = loss(theirs, x)
        expected.backward()
        second.step()
        assert torch.equal(found, expected)
    assert step.rung == "whole step"
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_cache_of_keys_is_no_reason_to_trace_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `use_cache` each layer of a Hugging Face model begins with tensors of nothing, which no two layers share."""
    transformers = pytest.importorskip("transformers")
    from wholestep.capture import trace

    written = []
    write_out = trace.write_out
    monkeypatch.setattr(trace, "write_out", lambda *args: written.append(write_out(*args)) or written[-1])
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=6, num_attention_heads=2, use_cache=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    step = wholestep.compile(
        model, lambda m, ids: m(input_ids=ids, labels=ids).loss, torch.optim.SGD(model.parameters(), lr=0.1),
        torch.randint(0, 20, (2, 8)), backend="interpret", check="off", precision="bf16",
    )  # fmt: skip
    assert step.rung == "whole step" and len(written) == 1
