"""Find the liar: four bugs that were published or reported, rebuilt; `wholestep.verify` names what is at fault.

Each bug is a rewrite of the training step that saves memory or time, in an honest form and in the form that went wrong.
The first three share one model and one pipeline: the three honest rewrites together must hold, and with one of them
swapped for its lying twin the verification must fail and name that one. The fourth runs on two processes (gloo). Each
lie really computes something else; three of the four leave every loss of the step as it was, so that neither a loss
curve nor a check of the forward shows them at that step.

    python examples/find_the_liar.py                       # half a minute on two cores
    python examples/find_the_liar.py --backend inductor    # the same on compiled code: a minute or two

Exit code 1 when a lie escapes, is blamed on something else, or an honest rewrite is accused.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from liars.all_reduce import drop_collectives, on_two_ranks
from liars.dropout import recompute_dropout, recompute_dropout_with_new_bits
from liars.embedding import shard_embedding, shard_embedding_masking_twice
from liars.gelu import gelu_gradient_from_output, gelu_gradient_with_published_sign
from torch import nn

import wholestep

Rewrite = Callable[[wholestep.TrainingGraph], wholestep.TrainingGraph]
HONEST: tuple[Rewrite, ...] = (gelu_gradient_from_output, shard_embedding, recompute_dropout)
VOCABULARY = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One bug, the honest rewrite it is the twin of, and where it was published."""

    bug: str
    source: str
    honest: Rewrite
    lying: Rewrite


CASES = (
    Case(
        "GELU gradient from its output, wrong sign",
        "Tempo, gelu_kernel.cu",
        HONEST[0],
        gelu_gradient_with_published_sign,
    ),
    Case("embedding shards mask shifted ids again", "Slapo, pull request 80", HONEST[1], shard_embedding_masking_twice),
    Case("dropout recomputed with other bits", "PyTorch, issue 190758", HONEST[2], recompute_dropout_with_new_bits),
)
DATA_PARALLEL = "data parallel without its all-reduce"


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one case."""

    bug: str
    source: str
    honest_holds: bool
    expected: str
    named: str | None
    """The rewrite that was blamed; None when nothing was, or when no rewrite was."""
    module: str
    loss_agreed: bool
    seconds: float

    @property
    def ok(self) -> bool:
        return self.honest_holds and self.named == self.expected

    @property
    def words(self) -> str:
        if not self.honest_holds:
            return "honest accused"
        return "caught" if self.named == self.expected else "escaped" if self.named is None else "wrong one named"


class Tagger(nn.Module):
    """Embedding, perceptron with GELU and dropout, norm, head: one module for each kind of lie."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.up, self.act, self.drop = nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.2)
        self.down, self.norm, self.head = nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        return self.head(self.norm(x + self.down(self.drop(self.act(self.up(x))))))


def next_token_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def verified(rewrites: list[Rewrite], backend: str, steps: int) -> Any:
    """Train a few steps beside eager PyTorch, with these rewrites."""
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [torch.randint(0, VOCABULARY, (8, 17)) for _ in range(3)]
    return wholestep.verify(
        model, next_token_loss, optimizer, batches, steps=steps, passes=rewrites, backend=backend, eval_too=False
    )


def try_case(case: Case, backend: str, steps: int) -> Verdict:
    """The honest pipeline, then the one with the liar in it."""
    began = time.perf_counter()
    honest = verified(list(HONEST), backend, steps)
    lying = verified([case.lying if rewrite is case.honest else rewrite for rewrite in HONEST], backend, steps)
    found = lying.first_departure
    say(honest, lying)
    return Verdict(
        case.bug, case.source, honest.ok, case.lying.__name__, found.guilty_pass if found else None,
        found.module if found else "", all(row.ok for row in lying.rows if row.kind == "loss"),
        time.perf_counter() - began,
    )  # fmt: skip


def try_data_parallel(backend: str, steps: int) -> Verdict:
    """Both ranks verify at once; what they say must agree."""
    began = time.perf_counter()
    ranks = on_two_ranks(backend, steps)
    print("  honest:", ranks[0]["honest"]["said"].splitlines()[0])
    for number, rank in enumerate(ranks):
        print(f"  lying, rank {number}:", rank["lying"]["said"].splitlines()[-1])
    departures = [rank["lying"]["report"]["first_departure"] or {} for rank in ranks]
    rows = [row for rank in ranks for row in rank["lying"]["report"]["rows"]]
    named = {found.get("guilty_pass") for found in departures}
    return Verdict(
        DATA_PARALLEL, "TRL, issue 7245", all(rank["honest"]["report"]["ok"] for rank in ranks),
        drop_collectives.__name__, named.pop() if len(named) == 1 else None, departures[0].get("module", ""),
        all(row["ok"] for row in rows if row["kind"] == "loss"), time.perf_counter() - began,
    )  # fmt: skip


def say(honest: Any, lying: Any) -> None:
    print("  honest:", str(honest).splitlines()[0])
    print("  lying: ", str(lying).splitlines()[0])
    if lying.first_departure is not None:
        print("         ", lying.first_departure)


def print_table(verdicts: list[Verdict]) -> None:
    rows = [("bug", "where", "verdict", "rewrite named", "module", "loss agreed", "seconds")]
    rows += [
        (
            v.bug,
            v.source,
            v.words,
            v.named or "-",
            v.module or "-",
            "yes" if v.loss_agreed else "no",
            f"{v.seconds:.1f}",
        )
        for v in verdicts
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="train steps of each verification")
    parser.add_argument("--backend", choices=["inductor", "interpret"], default="interpret")
    given = parser.parse_args(arguments)
    verdicts = []
    for number, case in enumerate(CASES, start=1):
        print(f"{number}. {case.bug} ({case.source})", flush=True)
        verdicts.append(try_case(case, given.backend, given.steps))
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        print(f"{len(CASES) + 1}. {DATA_PARALLEL}, on two processes (TRL, issue 7245)", flush=True)
        verdicts.append(try_data_parallel(given.backend, given.steps))
    else:
        print(f"{DATA_PARALLEL}: left out, this torch has no gloo")
    print()
    print_table(verdicts)
    wrong = [verdict for verdict in verdicts if not verdict.ok]
    print(f"\n{len(verdicts) - len(wrong)} of {len(verdicts)} liars found, every honest rewrite cleared" if not wrong else
          f"\nnot as it should be: {', '.join(v.bug for v in wrong)}")  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
