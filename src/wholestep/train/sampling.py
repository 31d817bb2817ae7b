"""What a trained model has to show: a text it writes, words it guesses, digits it recognises, nodes it can tell.

In: the plain module, tokens, images or a graph. Out: a text. Training does not notice: modes are put back, and the random numbers
come from a generator of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wholestep.data.draws import generator_for
from wholestep.data.tokens import Tokens
from wholestep.train.held_out import evaluating

CHARACTERS = 300
MOST_TOKENS = 300
TEMPERATURE = 0.8
"""At 1 a small model strays; much lower it repeats itself."""
LIKELIEST = 40
"""Only so many tokens are drawn from: the thousands of unlikely ones together would spell a non-word in every line."""

Logits = Callable[[Tensor], Tensor]
"""ids [1, n] -> logits [1, n, vocabulary]."""


def write_text(
    model: nn.Module,
    logits: Logits,
    tokens: Tokens,
    *,
    start: Tensor,
    context: int,
    seed: int,
    characters: int = CHARACTERS,
) -> str:
    """Sample from the model, token by token, until there are enough characters."""
    generator = generator_for(seed, 0, "sample")
    device = next(model.parameters()).device
    ids = start.reshape(1, -1).to(device)
    with evaluating(model):
        for _ in range(MOST_TOKENS):
            # Ids the tokenizer does not have (a published vocabulary is often larger) say nothing.
            row = logits(ids[:, -context:])[0, -1, : tokens.size].float().cpu()
            best, where = row.topk(min(LIKELIEST, len(row)))
            chosen = where[torch.multinomial(torch.softmax(best / TEMPERATURE, -1), 1, generator=generator)]
            ids = torch.cat([ids, chosen.to(device).reshape(1, 1)], 1)
            if len(ids[0]) % 16 == 0 and len(tokens.decode(ids[0].tolist())) > characters:
                break
    return tokens.decode(ids[0].tolist()).strip("\n")[:characters]


def fill_masks(model: nn.Module, batch: dict[str, Tensor], tokens: Tokens) -> str:
    """A held-out passage in which what the model guessed is in brackets, and how many guesses over the batch were right."""
    with evaluating(model):
        guessed = model(input_ids=batch["input_ids"]).logits[..., : tokens.size].argmax(-1).cpu()
    labels = batch["labels"].cpu()
    asked = labels != -100
    right = int((guessed[asked] == labels[asked]).sum())
    pieces = []
    for read, wanted, guess in zip(batch["input_ids"][0].tolist(), labels[0].tolist(), guessed[0].tolist()):
        pieces.append(tokens.decode([read]) if wanted == -100 else f"[{tokens.decode([guess])}]")
    passage = "".join(pieces)[:CHARACTERS]
    return f"{right} of {int(asked.sum())} masked tokens guessed; its guesses in brackets:\n{passage}"


def name_digits(
    model: nn.Module, logits: Callable[[dict[str, Tensor]], Tensor], batches: Sequence[dict[str, Tensor]]
) -> str:
    """Accuracy on the held-out images, and what the model says about the first few."""
    said: list[int] = []
    true: list[int] = []
    with evaluating(model):
        for batch in batches:
            said += logits(batch).argmax(-1).tolist()
            true += batch["labels"].tolist()
    right = sum(a == b for a, b in zip(said, true))
    few = ", ".join(f"{t} as {s}" if s != t else str(t) for s, t in zip(said[:12], true[:12]))
    return f"{right} of {len(true)} held-out digits recognised ({100 * right / len(true):.1f} %); the first: {few}"


def name_kinds(model: nn.Module, batches: Sequence[dict[str, Any]], commonest: float) -> str:
    """Accuracy on the held-out nodes, beside that of one answer for all of them."""
    right = asked = 0
    with evaluating(model):
        for batch in batches:
            said = model(batch["graph"])[batch["nodes"]].argmax(-1)
            right += int((said == batch["labels"]).sum())
            asked += len(said)
    if not asked:
        return "no node is held out: the graph is too small"
    share, alone = 100 * right / asked, 100 * commonest
    return f"kinds of {right} of {asked} held-out nodes named ({share:.1f} %); always the commonest kind: {alone:.1f} %"
