"""Lean layers inside DDP, FSDP2, checkpoints, torch.compile and wholestep.compile: the same gradients as plain ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tests.nn.lean_models import HIDDEN, Block, Net, differing, outcome, saved_bytes, twins
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wholestep

needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")


@pytest.fixture(scope="module")
def told_by_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two ranks says about every way of wrapping; one pair of processes, as imports take most of its time."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    command = [sys.executable, str(Path(__file__).with_name("ranks.py")), str(store)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], told[0][1][-1500:] + told[1][1][-1500:]
    return [dict(line.split(" ", 1) for line in out.splitlines() if " " in line) for out, _ in told]


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp", "fsdp-norms"])
def test_two_ranks_train_as_without_lean_layers(how: str, told_by_ranks: list[dict[str, str]]) -> None:
    assert [told.get(how) for told in told_by_ranks] == ["ok", "ok"]


class Checkpointed(nn.Module):
    """A norm before the checkpoint, its linear layer inside: the origin is not there when the checkpoint runs again."""

    def __init__(self, reentrant: bool, p: float = 0.0) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.norm, self.linear, self.block = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), Block(p=p)

    def part(self, y: Tensor) -> Tensor:
        return self.block(self.linear(y))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, self.norm(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_between_norm_and_linear(reentrant: bool) -> None:
    x = torch.randn(2, 5, HIDDEN)
    plain, lean = twins(lambda: Checkpointed(reentrant))
    assert differing(outcome(plain, x), outcome(lean, x)) == []


def test_a_checkpoint_whose_input_comes_back_as_another_tensor() -> None:
    x = torch.randn(2, 5, HIDDEN)
    plain, lean = twins(lambda: Checkpointed(False))
    found = []
    for model in (plain, lean):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):  # as offloading to the host does
            found.append(outcome(model, x))
    assert differing(*found) == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_dropout_again(reentrant: bool) -> None:
    x = torch.randn(2, 5, HIDDEN)
    lean = twins(lambda: Checkpointed(reentrant, p=0.4))[1]
    torch.manual_seed(3)
    checkpointed = outcome(lean, x)
    torch.manual_seed(3)
    lean.forward = lambda z: lean.part(lean.norm(z))
    assert differing(checkpointed, outcome(lean, x)) == []


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_takes_a_converted_model_whole(backend: str) -> None:
    x = torch.randn(2, 5, HIDDEN)
    plain, lean = twins(Net)
    torch.compiler.reset()
    compiled = torch.compile(lean, backend=backend, fullgraph=True)
    found = {name.removeprefix("_orig_mod."): value for name, value in outcome(compiled, x).items()}
    assert differing(outcome(plain, x), found) == []


def test_a_captured_step_of_a_converted_model_is_eager_bit_for_bit() -> None:
    lean = twins(lambda: Net(p=0.1))[1]
    optimizer = torch.optim.AdamW(lean.parameters(), lr=1e-3)
    report = wholestep.verify(
        lean,
        lambda model, x: model(x).square().mean(),
        optimizer,
        torch.randn(2, 5, HIDDEN),
        backend="interpret",
        steps=3,
    )
    assert str(report).startswith("equal to eager bit for bit") and "whole step" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_captured_step_of_a_converted_llama_is_verified(precision: str) -> None:
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    lean = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    )
    assert {change.was for change in wholestep.nn.convert(lean).swapped} >= {"LlamaMLP", "LlamaRMSNorm", "Linear"}
    ids = torch.randint(0, 32, (2, 6))
    batch = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.SGD(lean.parameters(), lr=1e-2)
    report = wholestep.verify(lean, None, optimizer, batch, backend="interpret", steps=2, precision=precision)
    assert "whole step" in str(report) and str(report).startswith("equal to eager"), report


def test_torch_func_takes_a_converted_model() -> None:
    plain, lean = twins(Net)
    x = torch.randn(2, 5, HIDDEN)
    for model in (plain, lean):
        model.grads = torch.func.grad(  # type: ignore[assignment]
            lambda p, m=model: torch.func.functional_call(m, p, (x,)).square().mean()
        )(dict(model.named_parameters()))
    assert differing(plain.grads, lean.grads) == []


def test_a_checkpointed_block_is_not_made_larger() -> None:
    x = torch.randn(2, 5, HIDDEN, requires_grad=True)
    plain, lean = twins(lambda: Checkpointed(False))
    with torch.enable_grad():
        assert saved_bytes(lean.norm, x) == saved_bytes(plain.norm, x)
