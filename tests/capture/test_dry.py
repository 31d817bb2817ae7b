"""A dry capture: tensors without data, and the graph that a GPU's autocast would give."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from wholestep.capture.dry import capture_example, dry_capture
from wholestep.capture.preflight import refuse_unsupported
from wholestep.capture.subject import make_subject
from wholestep.capture.trace import Capture
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
        f"{node.target} {[(tuple(t.shape), t.dtype) for t in tensors_in(node.meta['val'])]}"
        for node in captured.graph.operations()
    ]


def test_tensors_without_data_give_the_graph_of_real_ones() -> None:
    """In float32 no rule of autocast is asked, so the dry graph must be that of a live capture, and its device the CPU."""
    torch.manual_seed(0)
    model = Small()
    subject = make_subject(model, loss_fn, torch.optim.AdamW(model.parameters()), clip_norm=1.0)
    live, dry = capture_example(subject, torch.randn(11, 7)), _captured("cuda", precision="fp32")
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


class Chooses(nn.Module):
    """Which way it goes is decided by `choose`, of the input."""

    def __init__(self, choose: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.choose = nn.Linear(3, 3), choose

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if self.choose(x) else self.linear(self.linear(x))


def reads_a_file(x: torch.Tensor) -> str:
    with open(__file__) as file:
        return file.read()


@pytest.mark.parametrize("choose", [lambda x: x.max() > 0, lambda x: x.tolist()[0][0] > 0, reads_a_file])
def test_what_cannot_be_captured_is_one_error(choose: Callable[[torch.Tensor], Any]) -> None:
    with torch.device("meta"):
        model, batch = Chooses(choose), torch.empty(2, 3)
    with pytest.raises(UnsupportedModel, match="planned"):
        dry_capture(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), batch)


def test_python_beside_the_computation_is_planned_and_does_not_happen() -> None:
    """A counter and a number read off a tensor: captured without data, and nothing of it is done."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls, self.seen = nn.Linear(3, 3), 0, []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.seen.append(x.max().item())
            return self.linear(x) * self.seen[-1]

    with torch.device("meta"):
        model, batch = Counting(), torch.empty(2, 3)
    made = dry_capture(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    assert aten.addmm.default in {node.target for node in made.graph.operations()}
    assert (model.calls, model.seen) == (0, [])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_dry_graph_is_the_one_a_gpu_gets(precision: str) -> None:
    model = Small().cuda()
    subject = make_subject(model, loss_fn, torch.optim.AdamW(model.parameters()), clip_norm=1.0, precision=precision)
    live = capture_example(subject, torch.randn(11, 7, device="cuda"))
    assert _operators(_captured("cuda", precision=precision)) == _operators(live)
