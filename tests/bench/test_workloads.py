"""Every workload at its smoke size: batches are pure, the loss falls, the whole step is captured and computes what eager does.

One workload per domain is in the default set; the others, and those that take longest to capture, are marked slow.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep
from wholestep.bench.workload import Part, StepCall, Training, Workload
from wholestep.bench.workloads import WORKLOADS
from wholestep.bench.workloads.mixture import Experts
from wholestep.bench.workloads.reinforcement import Catch, play
from wholestep.bench.workloads.retinanet import assign, make_anchors
from wholestep.bench.workloads.speech import SLOWEST, recordings
from wholestep.bench.workloads.translation import END, FIRST_WORD, PADDING, START, sentence_pairs

CPU, META = torch.device("cpu"), torch.device("meta")
ITERATIONS, COMPARED = 12, 4
QUICK = {
    "vit-base", "retinanet", "transformer", "deep-speech-2", "wgan-gp", "actor-critic", "neumf", "dlrm", "gpt2-medium", "dit-base",
    "r-gcn",
}  # fmt: skip
PARAMETERS = {
    "resnet-50": 25.6e6, "inception-v3": 27.2e6, "vit-base": 86.6e6, "retinanet": 38.0e6, "transformer": 209.1e6,
    "seq2seq": 34.3e6, "deep-speech-2": 25.8e6, "wgan-gp": 11.1e6, "actor-critic": 1.69e6, "neumf": 31.8e6, "dlrm": 335e6,
    "bert-large": 335e6, "gpt2-medium": 355e6, "llama-1b": 1.236e9, "mixture-gpt": 513e6, "dit-base": 130e6, "r-gcn": 12.9e6,
    "unet": 35.8e6, "lstm": 17.4e6,
}  # fmt: skip
"""Of the GPU sizes: what the papers say where they say it, else what the sizes come to."""
TBD_MODELS = {
    "ResNet-50", "Inception-v3", "Seq2Seq", "Transformer", "Faster R-CNN", "Deep Speech 2", "WGAN-GP", "A3C", "NCF", "BERT",
}  # fmt: skip
by_name = pytest.mark.parametrize("name", WORKLOADS)


def built(name: str, device: torch.device = CPU, seed: int = 0, *, ours: bool = False, **changes: Any) -> Training:
    workload = WORKLOADS[name]
    needs = [package for package in workload.needs if importlib.util.find_spec(package) is None]
    if needs:
        pytest.skip(f"needs {', '.join(needs)}")
    return workload.training(workload.smoke | changes, device, seed, ours=ours)


def eager(part: Part) -> StepCall:
    """The step as a user would write it."""
    trained = [p for group in part.optimizer.param_groups for p in group["params"]]
    loss_fn: Callable[[Any, Any], Tensor] = part.loss_fn or (lambda model, batch: model(**batch).loss)

    def step(batch: Any) -> Tensor:
        part.optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(part.model, batch)
        loss.backward(inputs=trained)
        if part.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, part.clip_norm)
        part.optimizer.step()
        return loss.detach()

    return step


def losses(training: Training, calls: Sequence[StepCall], count: int) -> list[float]:
    return [float(training.iterate(calls, number)) for number in range(count)]


def seen_batches(training: Training, number: int) -> list[dict[str, Tensor]]:
    """What an iteration gives to its steps."""
    seen: list[dict[str, Tensor]] = []

    def look(batch: dict[str, Tensor]) -> Tensor:
        seen.append(batch)
        return torch.zeros(())

    training.iterate([look] * len(training.parts), number)
    return seen


def same(left: list[dict[str, Tensor]], right: list[dict[str, Tensor]]) -> bool:
    return all(a.keys() == b.keys() and all(a[k].equal(b[k]) for k in a) for a, b in zip(left, right, strict=True))


def marked(names: Sequence[str]) -> list[Any]:
    marks = {name: [] if name in QUICK else [pytest.mark.slow] for name in names}
    return [pytest.param(name, marks=marks[name]) for name in names]


# ---- the table ----


def test_the_table_is_wide() -> None:
    domains = {row.domain for row in WORKLOADS.values()}
    assert len(WORKLOADS) >= 16 and len(domains) >= 10
    assert {WORKLOADS[name].domain for name in QUICK} == domains
    assert {row.tbd for row in WORKLOADS.values()} - {""} == TBD_MODELS


@by_name
def test_a_row_says_what_it_is(name: str) -> None:
    row: Workload = WORKLOADS[name]
    assert row.name == name and row.unit and len(row.summary) < 130
    assert row.data.startswith(("real: ", "synthetic: "))
    assert (
        row.smoke.keys() == row.gpu.keys()
        and row.smoke["precision"] == "fp32"
        and row.gpu["precision"] in ("fp32", "bf16")
    )


@by_name
def test_gpu_sizes_have_the_parameters_they_should(name: str) -> None:
    row = WORKLOADS[name]
    # Bytes spare the training of a BPE; the model keeps its vocabulary.
    sizes = row.gpu | ({"tokens": "bytes"} if "tokens" in row.gpu else {})
    training = built(name, META, **sizes)
    trained = [p for part in training.parts for group in part.optimizer.param_groups for p in group["params"]]
    assert all(p.device.type == "meta" for p in trained)
    assert sum(p.numel() for p in trained) == pytest.approx(PARAMETERS[name], rel=0.005)
    assert training.units > 0 and training.precision == row.gpu["precision"]


@by_name
def test_batches_depend_on_seed_and_number_alone(name: str) -> None:
    one, again, other = built(name), built(name), built(name, seed=1)
    later = seen_batches(one, 2)
    assert same(seen_batches(again, 2), later)
    assert not same(seen_batches(one, 1), later) and not same(seen_batches(other, 2), later)
    assert (
        later[0].keys() == one.parts[0].example_batch.keys() and later[-1].keys() == one.parts[-1].example_batch.keys()
    )


# ---- training ----


@pytest.mark.parametrize("name", marked(list(WORKLOADS)))
def test_the_loss_falls_and_the_whole_step_computes_the_same(name: str) -> None:
    training = built(name)
    expected = losses(training, [eager(part) for part in training.parts], ITERATIONS)
    assert all(torch.tensor(expected).isfinite())
    assert sum(expected[-COMPARED:]) < sum(expected[:COMPARED])
    again = built(name, ours=True)
    steps = [
        wholestep.compile(
            part.model, part.loss_fn, part.optimizer, part.example_batch, clip_norm=part.clip_norm, backend="interpret",
            cache=False, verbose=False,
        )
        for part in again.parts
    ]  # fmt: skip
    assert [(step.rung, step.falls) for step in steps] == [("whole step", ())] * len(steps)
    # Unrolled recurrent layers and products written out round differently; everything else is equal to the bit.
    assert losses(again, steps, COMPARED) == pytest.approx(expected[:COMPARED], rel=1e-5)


@pytest.mark.gpu
@by_name
def test_it_trains_on_a_gpu(name: str) -> None:
    training = built(name, torch.device("cuda"))
    seen = losses(training, [eager(part) for part in training.parts], 2)
    assert all(torch.tensor(seen).isfinite())
    assert all(p.is_cuda for part in training.parts for group in part.optimizer.param_groups for p in group["params"])


@pytest.mark.parametrize("name", [name for name, row in WORKLOADS.items() if row.rewritten is not None])
def test_what_is_written_anew_for_us_has_the_same_parameters(name: str) -> None:
    plain, ours = ([part.model.state_dict() for part in built(name, ours=ours).parts] for ours in (False, True))
    for one, other in zip(plain, ours, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# ---- what the workloads are made of ----


def test_recordings_hold_what_their_transcripts_say() -> None:
    batch = recordings(rows=4, frames=40, bins=7, seed=0, number=3)
    assert batch["spectrograms"].shape == (4, 1, 7, 40)
    assert (batch["lengths"] >= 40 // SLOWEST).all() and (batch["lengths"] <= batch["transcripts"].shape[1]).all()
    # A character lasts at least half of SLOWEST frames, and two frames make one output: repeats leave room for a blank.
    assert (batch["lengths"] <= batch["frames"]).all() and batch["transcripts"].min() > 0  # the blank


def test_translation_is_the_sentence_backwards() -> None:
    batch = sentence_pairs(rows=5, length=8, words=20, seed=0, number=1)
    for source, read, write in zip(batch["source"], batch["read"], batch["write"]):
        words = source[source != PADDING].flip(0)
        count = len(words)
        assert read[0] == START and write[count] == END and (write[count + 1 :] == PADDING).all()
        assert read[1 : count + 1].equal(write[:count]) and (write[:count] >= FIRST_WORD).all()
        assert len(set(zip(words.tolist(), write[:count].tolist()))) == len(words.unique())  # one word, one translation


def test_every_object_has_an_anchor_and_padding_has_none() -> None:
    anchors = make_anchors(64)
    tiny, large, padding = [10.0, 12.0, 3.0, 3.0], [32.0, 32.0, 32.0, 32.0], [0.0, 0.0, 0.0, 0.0]
    nearest, finds, judged = assign(anchors, torch.tensor([[tiny, large, padding], [large, padding, padding]]))
    assert set(nearest[0][finds[0]].tolist()) == {0, 1} and set(nearest[1][finds[1]].tolist()) == {0}
    assert (judged | ~finds).all() and not judged.all() and finds.sum() < 0.1 * finds.numel()


def test_a_token_without_room_passes_by() -> None:
    experts = Experts(width=4, experts=4)
    with torch.no_grad():
        experts.router.weight.zero_()
        experts.router.weight[0] = 1.0  # all tokens choose the first expert first
    x = torch.ones(16, 4)
    mixed, uneven = experts(x)
    room = 10  # 1.25 x 2 x 16 / 4
    served = mixed.abs().sum(dim=1) > 0
    assert served[:room].all() and not served[room:].any() and uneven > 2


def test_a_ball_that_is_caught_is_a_gain() -> None:
    game = Catch(copies=64, cells=5, pixels=36, device=CPU)
    model = built("actor-critic").parts[0].model
    batch = play(model, game, torch.Generator().manual_seed(0))
    assert batch["frames"].shape == (64 * game.moves, 4, 36, 36) and batch["frames"].unique().tolist() == [0.0, 1.0]
    last = batch["returns"].view(game.moves, 64)[-1]
    assert set(last.tolist()) == {-1.0, 1.0}
    assert batch["returns"].view(game.moves, 64)[0].abs().max() == pytest.approx(0.99 ** (game.moves - 1))


def test_dropout_and_second_head_are_on_in_the_full_size() -> None:
    assert WORKLOADS["inception-v3"].gpu["second_head"] and WORKLOADS["inception-v3"].gpu["dropout"] > 0
    assert built("bert-large", META, config={}).parts[0].model.config.hidden_dropout_prob > 0
