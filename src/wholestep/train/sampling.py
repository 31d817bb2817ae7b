"""What a trained model has to show: a text it writes, words it guesses, digits it recognises, nodes it can tell.

In: the plain module, tokens, images or a graph. Out: a text. Training does not notice: modes are put back, and the random numbers
come from a generator of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wholestep.data.draws import generator_for
from wholestep.data.tokens import Tokens
from wholestep.train.held_out import evaluating

CHARACTERS = 300
MOST_TOKENS = 300
PARAGRAPH = b"\n\n"
"""What a text without a prompt starts with, where the tokenizer has no id for the end of the one before."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How the next token is chosen."""

    temperature: float = 0.8
    """At 1 a small model strays; much lower it repeats itself; at 0 the likeliest is taken."""
    top_p: float = 1.0
    """Only the likeliest, until they are so likely together."""
    likeliest: int | None = 40
    """Only so many are drawn from: the thousands of unlikely ones together would spell a non-word in every line."""

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """One id, from its logits."""
        if self.temperature == 0:
            return int(logits.argmax())
        best, where = logits.topk(min(self.likeliest or len(logits), len(logits)))
        chances = torch.softmax(best / self.temperature, -1)
        before = chances.cumsum(-1) - chances  # the likeliest has none before it, so one always stays
        chances = torch.where(before < self.top_p, chances, 0.0)
        return int(where[torch.multinomial(chances, 1, generator=generator)])


class Writer:
    """A text model that goes on with a text, token by token; keys and values of earlier tokens are kept where it can."""

    def __init__(self, task: str, model: Any, tokens: Tokens, context: int, *, read: Tensor | None = None) -> None:
        """`read`: what an encoder reads, [1, n]."""
        self.task, self.model, self.tokens, self.context, self.read = task, model, tokens, context, read
        self.device = next(model.parameters()).device
        self.keeps = task != "next"
        """Whether it keeps keys and values; found out at the first token."""

    def start(self, prompt: bytes | None = None) -> list[int]:
        """The first ids."""
        if self.task == "seq2seq":
            return [int(self.model.config.decoder_start_token_id or 0)]
        if prompt:
            return self.tokens.encode(prompt).tolist()
        if self.tokens.end_id is not None:
            return [self.tokens.end_id]
        return self.tokens.encode(PARAGRAPH).tolist() if self.tokens.kind != "ids" else [0]

    def write(
        self, ids: list[int], count: int, choice: Choice, seed: int, enough: Callable[[list[int]], bool] | None = None
    ) -> list[int]:
        """`ids` and up to `count` more."""
        generator, ids = generator_for(seed, 0, "sample"), list(ids)
        cache, unseen, kept = None, ids[-self.context :], 0
        with evaluating(self.model):
            more = self._more()
            for _ in range(count):
                if not self.keeps or kept + len(unseen) > self.context:
                    # From the start again; with a cache on half of it, so that this is seldom.
                    cache, kept, unseen = None, 0, ids[-(self.context // 2 + 1 if self.keeps else self.context) :]
                logits, cache = self._logits(unseen, cache, more)
                kept += len(unseen)
                # Ids the tokenizer does not have (a published vocabulary is often larger) say nothing.
                chosen = choice.draw(logits[: self.tokens.size].float().cpu(), generator)
                ids.append(chosen)
                unseen = [chosen]
                if enough is not None and enough(ids):
                    break
        return ids

    def _more(self) -> dict[str, Any]:
        """What the encoder made of its text, once."""
        if self.task != "seq2seq":
            return {}
        assert self.read is not None
        return {"encoder_outputs": self.model.get_encoder()(input_ids=self.read.to(self.device))}

    def _logits(self, ids: list[int], cache: Any, more: dict[str, Any]) -> tuple[Tensor, Any]:
        """Of the token after `ids`, which follow those in `cache`."""
        read = torch.tensor([ids], device=self.device)
        if self.task == "next":
            return self.model(read)[0, -1], None
        name = "decoder_input_ids" if self.task == "seq2seq" else "input_ids"
        if self.keeps:
            made = self.model(**{name: read}, **more, past_key_values=cache, use_cache=True)
            kept = getattr(made, "past_key_values", None)
            self.keeps = kept is not None
            return made.logits[0, -1], kept
        return self.model(**{name: read}, **more).logits[0, -1], None


def write_text(writer: Writer, *, seed: int) -> str:
    """What the model writes by itself, until there are enough characters."""
    tokens = writer.tokens

    def enough(ids: list[int]) -> bool:
        return len(ids) % 16 == 0 and len(tokens.decode(ids)) > CHARACTERS

    ids = writer.write(writer.start() or [0], MOST_TOKENS, Choice(), seed, enough)
    return tokens.decode(ids).strip("\n")[:CHARACTERS]


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
    said, true = _answers(model, logits, batches)
    right = sum(a == b for a, b in zip(said, true))
    few = ", ".join(f"{t} as {s}" if s != t else str(t) for s, t in zip(said[:12], true[:12]))
    return f"{right} of {len(true)} held-out digits recognised ({100 * right / len(true):.1f} %); the first: {few}"


def name_classes(
    model: nn.Module,
    logits: Callable[[dict[str, Tensor]], Tensor],
    batches: Sequence[dict[str, Tensor]],
    classes: Sequence[str] | None,
) -> str:
    """Accuracy on the held-out images, and what the model says about the first few."""
    said, true = _answers(model, logits, batches)
    right = sum(a == b for a, b in zip(said, true))
    name = (lambda i: classes[i] if i < len(classes) else str(i)) if classes else str
    few = ", ".join(f"{name(t)} as {name(s)}" if s != t else name(t) for s, t in zip(said[:8], true[:8]))
    return f"{right} of {len(true)} held-out images recognised ({100 * right / len(true):.1f} %); the first: {few}"


def _answers(
    model: nn.Module, logits: Callable[[dict[str, Tensor]], Tensor], batches: Sequence[dict[str, Tensor]]
) -> tuple[list[int], list[int]]:
    """(what the model says, what is true)."""
    said: list[int] = []
    true: list[int] = []
    with evaluating(model):
        for batch in batches:
            said += logits(batch).argmax(-1).tolist()
            true += batch["labels"].tolist()
    return said, true


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
