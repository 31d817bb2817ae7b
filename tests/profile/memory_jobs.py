"""Small training jobs whose memory is looked at: (model, loss, optimizer, batch)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

Job = tuple[nn.Module, Callable[[Any, Any], Tensor] | None, Optimizer, dict[str, Tensor]]


def regression(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def mlp(*, width: int = 64, rows: int = 128, norm: bool = True) -> Job:
    middle: list[nn.Module] = [nn.LayerNorm(4 * width)] if norm else []
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), *middle, nn.Linear(4 * width, width))
    batch = {"x": torch.randn(rows, width), "y": torch.randn(rows, width)}
    return model, regression, torch.optim.AdamW(model.parameters()), batch


def gpt(*, rows: int = 8, dropout: float = 0.0) -> Job:
    from wholestep.train.models.gpt import GPT, GPTConfig, next_token_loss

    model = GPT(GPTConfig(vocab_size=512, width=64, layers=2, heads=4, context=64, dropout=dropout))
    ids = torch.randint(0, 512, (rows, 64))
    return model, next_token_loss, torch.optim.AdamW(model.parameters()), {"input_ids": ids, "targets": ids.clone()}


def bert() -> Job:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    model = BertForMaskedLM(BertConfig(vocab_size=512, max_position_embeddings=64, **sizes)).train()
    ids = torch.randint(0, 512, (8, 32))
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    return model, None, torch.optim.AdamW(model.parameters()), batch


def resnet() -> Job:
    from wholestep.train.models.resnet import ResNet, ResNetConfig, class_loss

    model = ResNet(ResNetConfig(depth=18, width=8, image_size=16))
    batch = {"pixel_values": torch.randn(8, 1, 16, 16), "labels": torch.randint(0, 10, (8,))}
    return model, class_loss, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batch


def eager_step(job: Job, model: Any = None) -> Callable[[Any], Tensor]:
    """One plain training step; `model` in place of the job's, for a compiled one."""
    own, loss_fn, optimizer, _ = job
    running = own if model is None else model

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = running(**batch).loss if loss_fn is None else loss_fn(running, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
