"""Patches as products: which convolutions become one, that strides are as announced, and that training is the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.passes.alike import assert_trains_alike
from tests.passes.test_channels_last import run_comparing_strides
from torch import nn

import wholestep
from wholestep.capture.dry import dry_capture
from wholestep.graph.check import check
from wholestep.graph.copies import copy_graph
from wholestep.passes.patch_products import patch_products
from wholestep.passes.pipeline import default_passes

FORCED = functools.partial(patch_products, force=True)


class Tokens(nn.Module):
    """Pictures as tokens, with one more in front and positions, as vision transformers begin."""

    def __init__(
        self, patch: tuple[int, int] = (4, 4), *, bias: bool = True, normed: bool = False, drop: float = 0.0
    ) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 8, patch, patch, bias=bias)
        self.first = nn.Parameter(torch.randn(1, 1, 8))
        self.norm = nn.LayerNorm(8) if normed else nn.Identity()
        self.drop, self.head = nn.Dropout(drop), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.drop(self.norm(self.cut(x).flatten(2).transpose(1, 2)))
        tokens = torch.cat([self.first.expand(len(x), -1, -1), tokens], 1)
        return self.head(torch.tanh(tokens).mean(1))


class Stages(nn.Module):
    """Halved twice: the second cut reads what is trained, in a layout of its own, and a convolution follows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 2, 2), nn.LayerNorm(4)
        self.mix, self.down, self.head = nn.Conv2d(4, 4, 3, 1, 1, groups=4), nn.Conv2d(4, 6, 2, 2), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = torch.relu(x + self.mix(x))
        return self.head(self.down(x).relu().mean((2, 3)))


class Seen(nn.Module):
    """The cut picture is read as it lies in memory, too."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.head = nn.Conv2d(3, 4, 2, 2), nn.Linear(4 * 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.cut(x)
        return self.head(x.view(len(x), -1) + torch.as_strided(x, (len(x), 64), (64, 1)))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "tokens": (Tokens, 1),
    "oblong patches, no bias": (functools.partial(Tokens, (2, 4), bias=False), 1),
    "normed": (functools.partial(Tokens, normed=True), 1),
    "dropped": (functools.partial(Tokens, drop=0.3), 1),
    "stages": (Stages, 2),
    "memory seen": (Seen, 1),
    "channels-last weights": (lambda: Tokens().to(memory_format=torch.channels_last), 1),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "overlapping": lambda: nn.Conv2d(3, 4, 4, 2),
    "padded": lambda: nn.Conv2d(3, 4, 2, 2, 1),
    "dilated": lambda: nn.Conv2d(3, 4, 2, 2, dilation=2),
    "grouped": lambda: nn.Conv2d(3, 3, 2, 2, groups=3),
    "transposed": lambda: nn.ConvTranspose2d(3, 4, 2, 2),
    "a border left over": lambda: nn.Conv2d(3, 4, 3, 3),
    "one pixel": lambda: nn.Conv2d(3, 4, 1),
    "of one dimension": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 4, 2, 2)),
}


def loss(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).square().mean()


def graph_of(make: Callable[[], nn.Module], *, rows: int = 2, device: str = "cpu", precision: str = "fp32") -> Any:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return dry_capture(model, loss, optimizer, torch.randn(rows, 3, 8, 8), device=device, precision=precision).graph


def convolutions(graph: Any) -> int:
    return sum(str(node.target).startswith("aten.convolution.") for node in graph.operations())


@pytest.mark.parametrize("rows", [2, 1])
@pytest.mark.parametrize("name", MODELS)
def test_products_train_as_convolutions_do(name: str, rows: int) -> None:
    make, cut = MODELS[name]
    plain = graph_of(make, rows=rows)
    made = FORCED(copy_graph(plain))
    check(made)
    assert convolutions(made) == convolutions(plain) - cut
    run_comparing_strides(made)
    assert_trains_alike(plain, made, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_cut_into_patches_is_convolved(name: str) -> None:
    plain = graph_of(OTHERS[name])
    before = convolutions(plain)
    assert convolutions(FORCED(plain)) == before > 0


def test_tokens_are_not_transposed() -> None:
    made = FORCED(graph_of(functools.partial(Tokens, normed=True)))
    norm = next(node for node in made.operations() if "native_layer_norm.default" in str(node.target))
    assert norm.args[0].meta["val"].is_contiguous()
    clones = [node for node in made.operations() if str(node.target) == "aten.clone.default"]
    assert all(node.meta["val"].dim() == 6 for node in clones), clones  # the pictures alone


def test_it_is_for_gpus_and_narrow_types() -> None:
    assert convolutions(patch_products(graph_of(Tokens, precision="bf16"))) == 1
    assert convolutions(patch_products(graph_of(Tokens, device="cuda"))) == 1
    assert convolutions(patch_products(graph_of(Tokens, device="cuda", precision="bf16"))) == 0


def trained(passes: Any, backend: str, *, device: str = "cpu", precision: str = "fp32") -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Stages().to(device)
    batch = torch.randn(3, 3, 8, 8).to(device)
    step = wholestep.compile(
        model, loss, torch.optim.SGD(model.parameters(), 0.5), batch, passes=passes,
        backend=backend, check="off", cache=False, precision=precision,
    )  # fmt: skip
    for _ in range(3):
        step(batch)
    return [p.detach() for p in model.parameters()]


@pytest.mark.slow
def test_compiled() -> None:
    forced = default_passes().replaced("patch_products", FORCED)
    torch.testing.assert_close(
        trained(forced, "inductor"), trained(default_passes(), "interpret"), rtol=1e-4, atol=1e-5
    )


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    plain = default_passes().without("patch_products")
    made, before = (trained(p, "inductor", device="cuda", precision="bf16") for p in (default_passes(), plain))
    torch.testing.assert_close(made, before, rtol=3e-2, atol=3e-3)
