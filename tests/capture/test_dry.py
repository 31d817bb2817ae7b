"""A dry capture: tensors without data, and the graph that a GPU's autocast would give."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from wholestep.capture.batch import flatten
from wholestep.capture.dry import dry_capture
from wholestep.capture.preflight import refuse_unsupported
from wholestep.capture.subject import make_subject
from wholestep.capture.trace import Capture, capture
from wholestep.errors import UnsupportedModel
from wholestep.graph.training_graph import tensors_in

aten = torch.ops.aten


class Small(nn.Module):
    """Everything on which the two autocasts differ: norms, softmax, powers, sums; and an odd size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3)
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(x)) * self.scale
        return torch.softmax(self.last(h), -1).pow(2).sum(-1)


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()


def _captured(device: str, *, precision: str = "bf16", on: str = "meta") -> Capture:
    with torch.device(on):
        model, batch = Small(), torch.empty(11, 7)
    optimizer = torch.optim.AdamW(model.parameters())
    return dry_capture(model, loss_fn, optimizer, batch, precision=precision, device=device, clip_norm=1.0)


def _dtypes(captured: Capture) -> dict[Any, torch.dtype]:
    found = {}
    for node in captured.graph.operations():
        found.setdefault(node.target, tensors_in(node.meta["val"])[0].dtype)
    return found


def _operators(captured: Capture) -> list[str]:
    """Operators with the shapes and types of their results, in order."""
    return [
        f"{node.target} {[(tuple(t.shape), t.dtype) for t in tensors_in(node.meta['val'])]}" for node in captured.graph.operations()
    ]


def test_tensors_without_data_give_the_graph_of_real_ones() -> None:
    """In float32 no rule of autocast is asked, so the dry graph must be that of a live capture, and its device the CPU."""
    torch.manual_seed(0)
    model = Small()
    subject = make_subject(model, loss_fn, torch.optim.AdamW(model.parameters()), clip_norm=1.0)
    tensors, spec = flatten(torch.randn(11, 7))
    live, dry = capture(subject, tensors, spec), _captured("cuda", precision="fp32")
    assert _operators(dry) == _operators(live) and dry.graph.inputs == live.graph.inputs
    assert {t.device.type for n in dry.graph.graph.nodes for t in tensors_in(n.meta.get("val"))} == {"cpu"}


def test_norms_softmax_powers_and_sums_are_float32_for_a_gpu_and_not_for_a_cpu() -> None:
    gpu, cpu = _dtypes(_captured("cuda")), _dtypes(_captured("cpu"))
    for target in (aten.native_layer_norm.default, aten._softmax.default, aten.pow.Tensor_Scalar):
        assert gpu[target] is torch.float32, target
    assert cpu[aten._softmax.default] is torch.bfloat16, "the rules would not be needed"
    assert gpu[aten.addmm.default] is torch.bfloat16


def test_the_rules_are_gone_afterwards() -> None:
    _captured("cuda")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.softmax(torch.ones(2, 3, dtype=torch.bfloat16), -1).dtype is torch.bfloat16
    assert gc.isenabled()


def test_a_model_without_data_is_refused_where_it_would_run() -> None:
    with torch.device("meta"):
        model = Small()
    with pytest.raises(UnsupportedModel, match="meta device"):
        refuse_unsupported(make_subject(model, loss_fn, torch.optim.AdamW(model.parameters())))


def test_what_cannot_be_captured_is_one_error() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(3, 3), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.linear(x) if self.calls % 2 else self.linear(self.linear(x))

    with torch.device("meta"):
        model, batch = Counting(), torch.empty(2, 3)
    with pytest.raises(UnsupportedModel, match="cannot be planned"):
        dry_capture(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), batch)


def test_a_model_that_looks_at_values_is_one_error() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * float(x.max().item())

    with torch.device("meta"):
        model, batch = Looking(), torch.empty(2, 3)
    with pytest.raises(UnsupportedModel, match="planned"):
        dry_capture(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), batch)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_dry_graph_is_the_one_a_gpu_gets(precision: str) -> None:
    model = Small().cuda()
    subject = make_subject(model, loss_fn, torch.optim.AdamW(model.parameters()), clip_norm=1.0, precision=precision)
    tensors, spec = flatten(torch.randn(11, 7, device="cuda"))
    assert _operators(_captured("cuda", precision=precision)) == _operators(capture(subject, tensors, spec))
