"""Deep reinforcement learning: an advantage actor-critic that learns to catch a falling ball from pixels.

In: sizes. Out: a Training. The game is written in PyTorch and played in many copies at once, on the device. An iteration plays
one game in each copy with the plain module, then makes one step on all frames: playing is part of what is measured, and is
eager PyTorch for every system.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.bench.workload import Part, StepCall, Training
from wholestep.bench.workloads.making import drawn
from wholestep.data.draws import generator_for
from wholestep.data.windows import Batch

FRAMES = 4
"""The model sees the last four, as for Atari."""
MOVES = 3
"""Left, stay, right."""
DISCOUNT = 0.99
ENTROPY = 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Catch:
    """A ball falls one row per move and may drift; the paddle in the last row is to be under it when it lands."""

    copies: int
    cells: int
    """Rows and columns; a game takes one move less."""
    pixels: int
    device: torch.device

    @property
    def moves(self) -> int:
        return self.cells - 1

    def picture(self, row: int, ball: Tensor, paddle: Tensor) -> Tensor:
        """[copies, pixels, pixels]: ball and paddle white on black."""
        columns = torch.arange(self.cells, device=self.device)
        board = torch.zeros(self.copies, self.cells, self.cells, device=self.device)
        board[:, row] = (columns == ball[:, None]).float()
        board[:, -1] += (columns == paddle[:, None]).float()
        return F.interpolate(board.clamp(max=1.0)[:, None], size=(self.pixels, self.pixels))[:, 0]

    def after(self, place: Tensor, by: Tensor) -> Tensor:
        return (place + by).clamp(0, self.cells - 1)


class ActorCritic(nn.Module):
    """The network that first played Atari (Mnih et al., 2015), with a policy and a value at its end."""

    def __init__(self, *, pixels: int, width: int) -> None:
        super().__init__()
        channels, kernels = (FRAMES, width, 2 * width, 2 * width), ((8, 4), (4, 2), (3, 1))
        side, layers = pixels, []
        for inside, outside, (kernel, stride) in zip(channels, channels[1:], kernels):
            layers += [nn.Conv2d(inside, outside, kernel, stride), nn.ReLU()]
            side = (side - kernel) // stride + 1
        self.eyes = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * side**2, 16 * width), nn.ReLU())
        self.policy, self.value = nn.Linear(16 * width, MOVES), nn.Linear(16 * width, 1)

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.eyes(frames)
        return self.policy(seen), self.value(seen).squeeze(1)


def actor_critic_loss(model: Any, batch: Batch) -> Tensor:
    """Make moves that did better than expected more likely, expect what came, stay curious."""
    logits, values = model(batch["frames"])
    log_policy = logits.log_softmax(dim=1)
    taken = log_policy.gather(1, batch["moves"][:, None]).squeeze(1)
    entropy = -(log_policy.exp() * log_policy).sum(dim=1)
    value_loss = F.mse_loss(values, batch["returns"])
    return -(taken * batch["advantages"]).mean() + 0.5 * value_loss - ENTROPY * entropy.mean()


@torch.no_grad()
def play(model: nn.Module, game: Catch, generator: torch.Generator) -> Batch:
    """One game in every copy: what was seen, done, gained, and how much more that was than the model had expected."""
    copies, device = game.copies, game.device
    ball, paddle = torch.randint(0, game.cells, (2, copies), generator=generator).to(device)
    drift = torch.randint(-1, 2, (game.moves, copies), generator=generator).to(device)
    chances = torch.rand(game.moves, copies, 1, generator=generator).to(device)
    frames = game.picture(0, ball, paddle)[:, None].expand(-1, FRAMES, -1, -1)
    seen, done, expected = [], [], []
    for turn in range(game.moves):
        logits, value = model(frames)
        # The first move whose cumulative probability exceeds the chance; rounding may leave the last sum below 1.
        move = (logits.softmax(dim=1).cumsum(dim=1) < chances[turn]).sum(dim=1).clamp(max=MOVES - 1)
        seen.append(frames)
        done.append(move)
        expected.append(value)
        paddle, ball = game.after(paddle, move - 1), game.after(ball, drift[turn])
        frames = torch.cat([frames[:, 1:], game.picture(turn + 1, ball, paddle)[:, None]], dim=1)
    gain = torch.where(ball == paddle, 1.0, -1.0)
    discounts = DISCOUNT ** torch.arange(game.moves - 1, -1, -1, device=device)
    returns = (discounts[:, None] * gain).flatten()
    advantages = returns - torch.cat(expected)
    # Centred, as is usual: what counts is which moves did better than others, and the loss then tells how well it expects.
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    return {"frames": torch.cat(seen), "moves": torch.cat(done), "returns": returns, "advantages": advantages}


def build_actor_critic(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
    """The actor-critic, its game and RMSprop's successor."""
    game = Catch(copies=sizes["copies"], cells=sizes["cells"], pixels=sizes["pixels"], device=device)
    model = drawn(seed, device, lambda: ActorCritic(pixels=sizes["pixels"], width=sizes["width"]))

    def played(number: int) -> Batch:
        return play(model, game, generator_for(seed, number, "games"))

    part = Part(
        name="model", model=model, loss_fn=actor_critic_loss, clip_norm=0.5, example_batch=played(0),
        optimizer=torch.optim.Adam(model.parameters(), lr=sizes["lr"], fused=device.type == "cuda" or None),
    )  # fmt: skip

    def iterate(calls: Sequence[StepCall], number: int) -> Tensor:
        return calls[0](played(number))

    return Training(parts=[part], iterate=iterate, units=game.copies * game.moves, precision=sizes["precision"])
