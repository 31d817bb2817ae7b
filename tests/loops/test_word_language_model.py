"""A recurrent language model as in PyTorch's examples: the hidden state lives from batch to batch, outside of the model.

The text is cut into columns; pieces of BPTT words follow each other, the last one shorter. Before each piece the hidden state
is cut off from its history (`repackage_hidden`). After each epoch the rate is divided by four unless the validation got better.
Three ways to keep the hidden state: in a dict that the loss writes, on an object that it writes, or handed in and out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.loops.two_ways import MakeStep, Run, assert_whole, both_ways
from torch import nn

VOCAB, WIDTH, LAYERS, COLUMNS, BPTT, EPOCHS = 41, 16, 2, 3, 5, 3
Hidden = Any


class RecurrentModel(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.encoder = nn.Embedding(VOCAB, WIDTH)
        self.recurrent = getattr(nn, kind)(WIDTH, WIDTH, LAYERS)
        self.decoder = nn.Linear(WIDTH, VOCAB)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, words: torch.Tensor, hidden: Hidden) -> tuple[torch.Tensor, Hidden]:
        output, hidden = self.recurrent(self.encoder(words), hidden)
        return F.log_softmax(self.decoder(output).view(-1, VOCAB), dim=1), hidden

    def init_hidden(self, columns: int) -> Hidden:
        weight = next(self.parameters())
        zeros = weight.new_zeros(LAYERS, columns, WIDTH)
        return (zeros, zeros.clone()) if self.kind == "LSTM" else zeros


def repackage_hidden(hidden: Hidden) -> Hidden:
    """The same values without their history."""
    if isinstance(hidden, torch.Tensor):
        return hidden.detach()
    return tuple(repackage_hidden(part) for part in hidden)


def batchify(words: torch.Tensor, columns: int) -> torch.Tensor:
    rows = words.size(0) // columns
    return words.narrow(0, 0, rows * columns).view(columns, -1).t().contiguous()


def get_batch(source: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = min(BPTT, len(source) - 1 - start)
    return source[start : start + length], source[start + 1 : start + 1 + length].reshape(-1)


class InDict:
    """The loss reads and writes a dict of the loop."""

    def __init__(self) -> None:
        self.state: dict[str, Hidden] = {}

    def begin(self, hidden: Hidden) -> None:
        self.state["hidden"] = hidden

    def example(self, data: torch.Tensor, targets: torch.Tensor) -> Any:
        return data, targets

    def step(self, step: Callable[[Any], Any], data: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return step((data, targets))

    def loss_fn(self) -> Callable[[Any, Any], torch.Tensor]:
        state = self.state

        def loss_of(model: RecurrentModel, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            data, targets = batch
            hidden = repackage_hidden(state["hidden"])
            output, state["hidden"] = model(data, hidden)
            return F.nll_loss(output, targets)

        return loss_of


class OnObject(InDict):
    """The loss reads and writes an attribute of an object of the loop."""

    def loss_fn(self) -> Callable[[Any, Any], torch.Tensor]:
        owner = self

        def loss_of(model: RecurrentModel, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            data, targets = batch
            output, hidden = model(data, owner.hidden)
            owner.hidden = repackage_hidden(hidden)
            return F.nll_loss(output, targets)

        return loss_of

    def begin(self, hidden: Hidden) -> None:
        self.hidden = hidden


class ByHand(InDict):
    """The loop hands the hidden state in with the batch, and takes it from what the step returns."""

    def example(self, data: torch.Tensor, targets: torch.Tensor) -> Any:
        return {"data": data, "targets": targets, "hidden": self.state["hidden"]}

    def step(self, step: Callable[[Any], Any], data: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss, aux = step(self.example(data, targets))
        hidden = (aux["hidden"], aux["cell"]) if "cell" in aux else aux["hidden"]
        self.state["hidden"] = repackage_hidden(hidden)
        return loss

    def loss_fn(self) -> Callable[[Any, Any], Any]:
        def loss_of(model: RecurrentModel, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            output, hidden = model(batch["data"], batch["hidden"])
            named = {"hidden": hidden} if isinstance(hidden, torch.Tensor) else {"hidden": hidden[0], "cell": hidden[1]}
            return F.nll_loss(output, batch["targets"]), named

        return loss_of


def train(make_step: MakeStep, kind: str, keeps: InDict) -> Run:
    torch.manual_seed(1111)
    training, validation = (batchify(torch.randint(0, VOCAB, (count,)), COLUMNS) for count in (60, 40))
    model = RecurrentModel(kind)
    rate, best = 5.0, None
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def evaluate() -> float:
        model.eval()
        total, hidden = 0.0, model.init_hidden(COLUMNS)
        with torch.no_grad():
            for start in range(0, validation.size(0) - 1, BPTT):
                data, targets = get_batch(validation, start)
                output, hidden = model(data, hidden)
                hidden = repackage_hidden(hidden)
                total += len(data) * F.nll_loss(output, targets).item()
        return total / (len(validation) - 1)

    model.train()
    keeps.begin(model.init_hidden(COLUMNS))
    step = make_step(model, keeps.loss_fn(), optimizer, keeps.example(*get_batch(training, 0)), clip_norm=0.25)
    log: list[dict[str, Any]] = []
    for epoch in range(EPOCHS):
        model.train()
        keeps.begin(model.init_hidden(COLUMNS))
        for start in range(0, training.size(0) - 1, BPTT):
            loss = keeps.step(step, *get_batch(training, start)).item()
            log.append({"epoch": epoch, "start": start, "rate": rate, "loss": loss, "perplexity": math.exp(loss)})
        found = evaluate()
        log.append({"epoch": epoch, "validation": found})
        if best is None or found < best:
            best = found
        else:
            rate /= 4.0
            for group in optimizer.param_groups:
                group["lr"] = rate
    return Run({"model": model}, {"optimizer": optimizer}, log, kept=vars(keeps))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_hidden_state_in_a_dict_of_the_loop(kind: str) -> None:
    run, makes = both_ways(lambda make_step: train(make_step, kind, InDict()))
    assert_whole(makes)
    assert run.log[-1]["validation"] > 0


def test_hidden_state_on_an_object_of_the_loop() -> None:
    _, makes = both_ways(lambda make_step: train(make_step, "LSTM", OnObject()))
    assert_whole(makes)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_hidden_state_handed_in_and_out(kind: str) -> None:
    _, makes = both_ways(lambda make_step: train(make_step, kind, ByHand()))
    assert_whole(makes)
    assert makes.made[0].captures <= 2, makes.made[0].explain()
