"""The last lines: a few values, each reduced by a loss that people train with, added up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tests.fuzz.program import Line

if TYPE_CHECKING:
    from tests.fuzz.draw import Room

VOCABULARY = 7
PLAIN = (
    "{0}.float().square().mean()", "{0}.float().sum() * 0.1", "({0}.float() * 0.5).tanh().mean()", "{0}.float().mean()",
    "F.mse_loss({0}.float(), torch.zeros_like({0}, dtype=torch.float32))", "{0}.float().abs().sum() / 3",
)  # fmt: skip
AGAINST_NUMBERS = (
    "F.mse_loss({0}.float(), {1}, reduction='sum') * 0.1", "F.l1_loss({0}.float(), {1})",
    "F.smooth_l1_loss({0}.float(), {1}, beta=0.5)",
    "F.huber_loss({0}.float(), {1}, delta=0.7)", "F.binary_cross_entropy_with_logits({0}.float(), {1}.sigmoid())",
    "F.binary_cross_entropy_with_logits({0}.float(), ({1} > 0).float(), weight={1}.abs(), pos_weight=torch.tensor(2.0))",
    "F.binary_cross_entropy({0}.float().sigmoid(), ({1} > 0).float())", "F.poisson_nll_loss({0}.float().clamp(max=4), {1}.abs())",
    "F.kl_div({0}.float().log_softmax(-1), {1}.softmax(-1), reduction='batchmean')", "F.soft_margin_loss({0}.float(), {1}.sign())",
    "F.gaussian_nll_loss({0}.float(), {1}, {1}.square() + 0.1)", "F.hinge_embedding_loss({0}.float(), {1}.sign())",
    "F.margin_ranking_loss({0}.float(), {1}, {1}.sign(), margin=0.1)", "(1 - F.cosine_similarity({0}.float(), {1}, -1)).mean()",
    "F.kl_div({0}.float().log_softmax(-1), {1}.log_softmax(-1), log_target=True, reduction='sum') * 0.1",
    "((({0}.float() - {1}).square() * ({1} > 0)).sum() / ({1} > 0).sum().clamp(min=1))",
)  # fmt: skip
"""By a batch of the same shape."""
AGAINST_ROWS = (
    "F.cosine_embedding_loss({0}.float(), {1}, {1}[:, 0].sign(), margin=0.2)",
    "F.triplet_margin_loss({0}.float(), {1}, {1}.flip(0))",
    "F.multilabel_soft_margin_loss({0}.float(), ({1} > 0).float())", "F.pairwise_distance({0}.float(), {1}).mean()",
    "F.cross_entropy({0}.float(), {1}.softmax(-1))", "torch.cdist({0}.float(), {1}).mean()",
)  # fmt: skip
"""The same, of rows."""
AGAINST_CLASSES = (
    "F.cross_entropy({0}.float(), {1}, label_smoothing=0.1)", "F.nll_loss({0}.float().log_softmax(-1), {1})",
    "F.cross_entropy({0}.float(), {1}, weight=torch.linspace(0.5, 1.5, {0}.shape[1]))", "F.multi_margin_loss({0}.float(), {1})",
    "F.cross_entropy({0}.float(), {1}, reduction='none').topk(1)[0].sum()",
    "F.cross_entropy({0}.float(), {1}, reduction='sum') * 0.1",
    "-{0}.float().log_softmax(-1).gather(1, {1}[:, None]).mean()",
)  # fmt: skip
"""Rows by their classes."""


def end(room: Room, chunked: bool) -> bool:
    """The loss: a few values, each reduced in one of several ways, added up."""
    source = room.source
    floats = [name for name, value in room.values.items() if value.is_floating_point() and value.requires_grad]
    if not floats:
        return False
    read = {name for line in room.lines for name in line.reads}
    unread = [name for name in floats if name not in read] or floats  # what nothing leads to the loss is not trained
    chosen = list(dict.fromkeys([floats[-1], *source.sample(unread, min(len(unread), source.randint(0, 3)))]))
    parts = [_part(room, name, room.values[name], chunked) for name in chosen]
    if any(part is None for part in parts):
        return False
    room.lines.append(Line(("loss",), " + ".join(f"{{{i}}}" for i in range(len(parts))), tuple(parts)))  # type: ignore[arg-type]
    return True


def _part(room: Room, name: str, value: torch.Tensor, chunked: bool) -> str | None:
    """The name of what a value becomes."""
    source = room.source
    reads = [name]
    if not value.numel():
        code = "{0}.float().sum()"
    elif value.dim() >= 2 and (chunked or source.random() < 0.25):
        return _classified(room, name, value)
    elif source.random() < 0.6 or not value.dim():
        code = source.choice(PLAIN)
    elif value.dim() == 2 and source.random() < 0.5:
        reads.append(room.add_input(f"torch.randint(0, {value.shape[1]}, ({value.shape[0]},))"))
        code = source.choice(AGAINST_CLASSES)
    else:
        reads.append(room.add_input(f"torch.randn({list(value.shape)})"))
        code = source.choice(AGAINST_NUMBERS + AGAINST_ROWS if value.dim() == 2 else AGAINST_NUMBERS)
    return room.lines[-1].results[0] if room.add(code, *reads) else None


def _classified(room: Room, name: str, value: torch.Tensor) -> str | None:
    """Cross-entropy over a linear layer, some of whose targets count nothing."""
    rows, width = value.numel() // value.shape[-1], value.shape[-1]
    if not rows or not width:
        return None
    ignored = room.source.random() < 0.5
    target = room.add_input(
        f"torch.randint(0, {VOCABULARY}, ({rows},))"
        + (f".index_fill(0, torch.tensor([{rows - 1}]), -100)" if ignored else "")
    )
    if ignored and rows == 1:
        return None
    head = room.add_member(f"Head({width}, {VOCABULARY}, bias={room.source.random() < 0.5})")
    return room.lines[-1].results[0] if room.add(f"{head}({{0}}.float(), {{1}})", name, target) else None
