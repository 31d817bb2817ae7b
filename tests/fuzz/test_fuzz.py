"""Random training steps through every stage, and the fuzzer itself: it repeats, shortens, and prints what can be run again."""

from __future__ import annotations

import ast

import pytest
import torch
from tests.fuzz.check import QUICK, Wrong, examine
from tests.fuzz.draw import draw, trains
from tests.fuzz.faults import FAULTS, planted
from tests.fuzz.run import Asked, look, stages_for
from tests.fuzz.shrink import is_wrong, shrunk
from tests.fuzz.training import OPTIMIZERS

GROUP = 20
FIRSTS = [pytest.param(first, marks=[pytest.mark.slow] if first >= 120 else []) for first in range(0, 300, GROUP)]


@pytest.mark.parametrize("first", FIRSTS)
def test_random_steps_train_the_same_after_every_stage(first: int) -> None:
    refused = [examine(draw(seed).case(), stages_for(seed, (), "interpret")) for seed in range(first, first + GROUP)]
    assert sum(reason is not None for reason in refused) <= GROUP // 4, refused


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_more_of_them(first: int) -> None:
    for seed in range(first, first + 100):
        examine(draw(seed).case(), QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_compiled_code(seed: int) -> None:
    examine(draw(seed).case(), ("inductor",))


def test_a_seed_is_the_same_program_each_time() -> None:
    assert draw(11) == draw(11) and draw(11) != draw(12)
    assert stages_for(20, (), None) == stages_for(20, (), None) != stages_for(21, (), None)


def test_what_is_looked_for_is_drawn() -> None:
    """Of 300 programs: sizes of 1 and 0, writes, views, narrow dtypes, attention, tied weights, several outputs, all optimizers."""
    programs = [draw(seed) for seed in range(300)]
    texts = [program.source() for program in programs]
    assert {dict(program.options)["optimizer"] for program in programs} == set(OPTIMIZERS)
    for wanted in ("1, ", "_(", ".view(", ".expand(", "bfloat16", "float64", "ttention", "Conv", "Norm", "nn.Buffer", "Head(",
                   "F.binary_cross_entropy", "F.kl_div", "BatchNorm", ".add_(", "Dropout", "einsum", ".chunk(", "cat(", "stack(",
                   ".permute(", ", {'"):  # fmt: skip
        assert any(wanted in text for text in texts), f"no program with {wanted}"


def test_a_wrong_program_is_shortened_and_printed_as_a_test() -> None:
    stage = "fold_constants"
    fault = next(fault for fault in FAULTS if fault.stage == stage)
    with planted(fault):
        program = next(program for seed in range(1, 30) if is_wrong(program := draw(seed), stage))
        short = shrunk(program, stage, seconds=20)
        assert is_wrong(short, stage) and trains(short)
        assert len(short.lines) <= len(program.lines) and len(short.lines) <= 9
        text = short.as_test(stage, "found")
        ast.parse(text)
        namespace: dict = {"__name__": "tests.fuzz.printed"}
        exec(compile(text, "printed", "exec"), namespace)
        with pytest.raises(Wrong, match=stage):
            namespace["test_found"]()
    namespace["test_found"]()  # right without the fault


def test_a_wrong_seed_is_told_with_its_stage() -> None:
    fault = next(fault for fault in FAULTS if fault.stage == "fold_constants")
    with planted(fault):
        found = next(
            f for seed in range(1, 30) if (f := look((seed, Asked(passes=("fold_constants",), shrink=0)))).stage
        )
    assert found.stage == "fold_constants" and f"test_fold_constants_{found.seed}" in found.test and found.what


def test_the_state_of_random_numbers_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    examine(draw(5).case(), ("capture",))
    assert torch.equal(torch.rand(3), expected)
