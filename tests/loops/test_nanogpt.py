"""A small GPT trained as nanoGPT does it: micro-batches, a learning rate written into the groups, losses in eval mode.

The model returns (logits, loss), ties its head to its embedding and keeps vectors free of weight decay. Each iteration sets
the cosine rate with warm-up by hand; every third one estimates both losses under `no_grad`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tests.loops.two_ways import MakeStep, Run, assert_whole, both_ways
from torch import nn

VOCAB, BLOCK, WIDTH, HEADS, LAYERS, ROWS = 53, 16, 32, 4, 2, 4
ITERATIONS, WARM_UP, EVALUATE_EVERY, EVALUATIONS, MICRO = 9, 2, 3, 2, 2
RATE, LEAST_RATE = 1e-2, 1e-3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.size()
        query, key, value = (
            part.view(rows, tokens, HEADS, width // HEADS).transpose(1, 2)
            for part in self.project(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().view(rows, tokens, width))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.apply(self._draw)
        self.words.weight = self.head.weight

    def _draw(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(
        self, words: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens = words.size(1)
        assert tokens <= BLOCK, f"{tokens} tokens do not fit into {BLOCK}"
        x = self.words(words) + self.places(torch.arange(0, tokens, dtype=torch.long, device=words.device))
        for block in self.blocks:
            x = block(x)
        if targets is None:
            return self.head(self.norm(x[:, [-1], :])), None
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def configure_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    decays = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))


def rate_at(iteration: int) -> float:
    if iteration < WARM_UP:
        return RATE * (iteration + 1) / (WARM_UP + 1)
    done = (iteration - WARM_UP) / (ITERATIONS - WARM_UP)
    return LEAST_RATE + 0.5 * (1.0 + math.cos(math.pi * done)) * (RATE - LEAST_RATE)


def train(make_step: MakeStep) -> Run:
    torch.manual_seed(1337)
    text = {split: torch.randint(0, VOCAB, (400,)) for split in ("train", "val")}
    model = GPT()
    optimizer = configure_optimizer(model)

    def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(text[split]) - BLOCK - 1, (ROWS,))
        x = torch.stack([text[split][i : i + BLOCK] for i in starts])
        y = torch.stack([text[split][i + 1 : i + 1 + BLOCK] for i in starts])
        return x, y

    @torch.no_grad()
    def estimate_loss() -> dict[str, float]:
        found = {}
        model.eval()
        for split in ("train", "val"):
            losses = torch.zeros(EVALUATIONS)
            for k in range(EVALUATIONS):
                losses[k] = model(*get_batch(split))[1].item()
            found[split] = losses.mean().item()
        model.train()
        return found

    batch = get_batch("train")
    step = make_step(
        model, lambda model, batch: model(*batch)[1], optimizer, [batch] * MICRO, clip_norm=1.0, accumulate=MICRO
    )
    log, best = [], 1e9
    for iteration in range(ITERATIONS):
        rate = rate_at(iteration)
        for group in optimizer.param_groups:
            group["lr"] = rate
        line = {"iteration": iteration, "rate": rate}
        if iteration % EVALUATE_EVERY == 0:
            line |= estimate_loss()
            best = min(best, line["val"])
        micro = []
        for _ in range(MICRO):
            micro.append(batch)
            batch = get_batch("train")  # the next one is fetched while this one is worked on
        line["loss"] = step(micro).item()
        log.append(line | {"best": best})
    return Run({"model": model}, {"optimizer": optimizer}, log)


def test_nanogpt_trains_as_in_eager() -> None:
    run, makes = both_ways(train)
    assert_whole(makes)
    assert makes.made[0].captures == 1, makes.made[0].explain()
    assert run.log[-1]["loss"] < run.log[0]["loss"]
