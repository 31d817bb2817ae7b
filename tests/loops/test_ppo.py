"""Proximal policy optimisation as in CleanRL: rollouts with the plain module, then epochs of minibatches with the step.

Actions are drawn from torch's generator in the rollouts, so a step that draws one number more or less, or that trains another
agent, changes every game after it. The loss builds a Categorical (arguments are validated, as by default), clips ratio and
value, and adds the entropy; the loop logs by `.item()` and ends an update early once the policy has moved too far. In the
second variant the loss itself calls `.item()` and appends to a list of the loop, as that script does.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from tests.loops.two_ways import MakeStep, Run, assert_whole, both_ways
from torch import nn
from torch.distributions.categorical import Categorical

GAMES, STEPS, UPDATES, EPOCHS, MINIBATCHES = 4, 8, 4, 3, 2
RATE, DISCOUNT, SMOOTHING, CLIP, ENTROPY, VALUE, TARGET_KL = 1e-2, 0.99, 0.95, 0.2, 0.01, 0.5, 0.012
ROWS = GAMES * STEPS
MINIBATCH = ROWS // MINIBATCHES
Batch = dict[str, torch.Tensor]


class Corridors:
    """A game: walk left or right on a line, with a speed; a step costs, the right end pays and begins anew."""

    def __init__(self) -> None:
        self.source = np.random.default_rng(3)
        self.place, self.speed = self.source.uniform(-1, 0, GAMES), np.zeros(GAMES)

    def look(self) -> torch.Tensor:
        return torch.tensor(np.stack([self.place, self.speed, np.ones(GAMES)], axis=1), dtype=torch.float32)

    def act(self, actions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(what is seen next, rewards, which games ended)"""
        self.speed = 0.8 * self.speed + 0.2 * (actions - 1)
        self.place = np.clip(self.place + self.speed, -2, 1)
        ended = self.place >= 1
        rewards = np.where(ended, 1.0, -0.05)
        self.place = np.where(ended, self.source.uniform(-1, 0, GAMES), self.place)
        self.speed = np.where(ended, 0.0, self.speed)
        return self.look(), torch.tensor(rewards, dtype=torch.float32), torch.tensor(ended, dtype=torch.float32)


def layer_init(layer: nn.Linear, gain: float = 2**0.5) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.constant_(layer.bias, 0.0)
    return layer


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(layer_init(nn.Linear(3, 16)), nn.Tanh(), layer_init(nn.Linear(16, 1), 1.0))
        self.actor = nn.Sequential(layer_init(nn.Linear(3, 16)), nn.Tanh(), layer_init(nn.Linear(16, 3), 0.01))

    def get_value(self, seen: torch.Tensor) -> torch.Tensor:
        return self.critic(seen)

    def get_action_and_value(self, seen: torch.Tensor, action: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        choice = Categorical(logits=self.actor(seen))
        if action is None:
            action = choice.sample()
        return action, choice.log_prob(action), choice.entropy(), self.critic(seen)


def ppo_loss(agent: Agent, batch: Batch, fractions: list[float] | None = None) -> tuple[torch.Tensor, Batch]:
    _, log_probability, entropy, value = agent.get_action_and_value(batch["seen"], batch["actions"].long())
    log_ratio = log_probability - batch["log_probabilities"]
    ratio = log_ratio.exp()
    with torch.no_grad():
        old_kl = (-log_ratio).mean()
        kl = ((ratio - 1) - log_ratio).mean()
        clipped = ((ratio - 1.0).abs() > CLIP).float().mean()
        if fractions is not None:
            fractions += [clipped.item()]
    advantages = batch["advantages"]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - CLIP, 1 + CLIP)).mean()
    value = value.view(-1)
    near = batch["values"] + torch.clamp(value - batch["values"], -CLIP, CLIP)
    squares = torch.max((value - batch["returns"]) ** 2, (near - batch["returns"]) ** 2)
    value_loss, entropy_loss = 0.5 * squares.mean(), entropy.mean()
    loss = policy_loss - ENTROPY * entropy_loss + VALUE * value_loss
    aux = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy_loss, "old_kl": old_kl, "kl": kl}
    return loss, aux if fractions is not None else aux | {"clipped": clipped}


@torch.no_grad()
def play(agent: Agent, games: Corridors, seen: torch.Tensor) -> tuple[Batch, torch.Tensor, float]:
    """STEPS moves in every game, with advantages and returns; what is seen last; the rewards' sum."""
    kept: dict[str, list[torch.Tensor]] = {name: [] for name in ("seen", "actions", "log_probabilities", "values")}
    rewards, ends = torch.zeros(STEPS, GAMES), torch.zeros(STEPS, GAMES)
    for move in range(STEPS):
        action, log_probability, _, value = agent.get_action_and_value(seen)
        for name, tensor in zip(kept, (seen, action, log_probability, value.flatten())):
            kept[name].append(tensor)
        seen, rewards[move], ends[move] = games.act(action.numpy())
    batch = {name: torch.stack(tensors) for name, tensors in kept.items()}
    advantages, last = torch.zeros(STEPS, GAMES), torch.zeros(GAMES)
    following = agent.get_value(seen).flatten()
    for move in reversed(range(STEPS)):
        goes_on = 1.0 - ends[move]
        error = rewards[move] + DISCOUNT * following * goes_on - batch["values"][move]
        last = error + DISCOUNT * SMOOTHING * goes_on * last
        advantages[move], following = last, batch["values"][move]
    batch |= {"advantages": advantages, "returns": advantages + batch["values"]}
    return {name: tensor.reshape(ROWS, *tensor.shape[2:]) for name, tensor in batch.items()}, seen, rewards.sum().item()


def train(make_step: MakeStep, item_in_loss: bool = False) -> Run:
    torch.manual_seed(1)
    shuffles = np.random.default_rng(1)
    agent, games = Agent(), Corridors()
    optimizer = torch.optim.Adam(agent.parameters(), lr=RATE, eps=1e-5)
    fractions: list[float] = []
    loss_fn = functools.partial(ppo_loss, fractions=fractions) if item_in_loss else ppo_loss
    step: Any = None
    log: list[dict[str, Any]] = []
    seen = games.look()
    for update in range(1, UPDATES + 1):
        optimizer.param_groups[0]["lr"] = (1.0 - (update - 1.0) / UPDATES) * RATE
        batch, seen, reward = play(agent, games, seen)
        order = np.arange(ROWS)
        for epoch in range(EPOCHS):
            shuffles.shuffle(order)
            for start in range(0, ROWS, MINIBATCH):
                chosen = order[start : start + MINIBATCH]
                minibatch = {name: tensor[chosen] for name, tensor in batch.items()}
                if step is None:
                    step = make_step(agent, loss_fn, optimizer, minibatch, clip_norm=0.5)
                loss, aux = step(minibatch)
                if not item_in_loss:
                    fractions += [aux["clipped"].item()]
                log.append({"update": update, "epoch": epoch, "loss": loss.item(), "kl": aux["kl"].item(),
                            "entropy": aux["entropy"].item(), "fraction": fractions[-1]})  # fmt: skip
            if aux["kl"].item() > TARGET_KL:
                break
        log.append({"update": update, "epochs": epoch + 1, "reward": reward, "fractions": len(fractions),
                    "clipped": float(np.mean(fractions)), "value_loss": aux["value_loss"].item()})  # fmt: skip
    return Run({"agent": agent}, {"optimizer": optimizer}, log, kept=fractions)


def test_ppo_trains_as_in_eager() -> None:
    run, makes = both_ways(train)
    ends = [line["epochs"] for line in run.log if "epochs" in line]
    assert min(ends) < EPOCHS, "no update ended early: the test does not try what it should"
    assert_whole(makes)


def test_ppo_with_item_in_the_loss_trains_as_in_eager() -> None:
    both_ways(functools.partial(train, item_in_loss=True))
