"""Bytes and seconds of points: as `wholestep plan` says, captured once where one capture serves several."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.search.test_space import write

from wholestep.cost.devices import DEVICES
from wholestep.cost.target import Card
from wholestep.errors import WholestepError
from wholestep.search import predict
from wholestep.search.predict import Prediction, Predictor
from wholestep.search.space import read_space
from wholestep.train.fit import Question, will_it_fit

TINY = 'seq = 16\nset = { layers = 1, width = 16, heads = 2, tokenizer = "bytes" }\n'
H200 = Card(DEVICES["h200"], "calibrated")


def predicted(folder: Path, search: str = "", verbs: str = "") -> list[Prediction]:
    predictor = Predictor(H200)
    return [predictor.of(point) for point in read_space(write(folder, TINY + search, verbs)).points]


def test_as_plan_says(tmp_path: Path) -> None:
    one, two = predicted(tmp_path, "batch = [2, 64]")
    sets = ("layers=1", "width=16", "heads=2", "tokenizer=bytes")
    question = Question(model="gpt-1m", sets=sets, batch=64, seq=16, target=H200, budget_bytes=2**40)
    fit = will_it_fit(question, find_batch=False)
    assert two.peak_bytes == fit.frontier[0].peak_bytes and two.seconds == fit.frontier[0].seconds
    assert (one.units, two.units, two.unit) == (32, 1024, "tokens") and one.peak_bytes < two.peak_bytes
    assert one.fits and one.program != two.program


def test_what_a_plan_decides_needs_no_other_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[Question] = []
    real = predict.captured_step
    monkeypatch.setattr(predict, "captured_step", lambda q, **more: captured.append(q) or real(q, **more))
    lines = '{ recompute = "blocks.*", ratio = [0, 1] }, { precision = "head", to = ["fp32", "bf16"] }'
    found = predicted(tmp_path, "batch = 64", lines)
    assert len(captured) == 2 and len(found) == 4 == len({one.planned for one in found})
    none, _, whole, _ = found
    assert none.peak_bytes > whole.peak_bytes and none.seconds < whole.seconds


def test_budgets_that_nothing_fits_or_that_do_not_bind(tmp_path: Path) -> None:
    tight, wide, wider = predicted(tmp_path, 'batch = 64\nmemory = ["1MiB", "2GiB", "3GiB"]')
    assert not tight.fits and "of 1.0 MiB" in tight.reason and wide.fits and wider.fits
    assert wide.planned == wider.planned, "one program for two budgets"


def test_accumulated_parts_and_their_update_are_counted(tmp_path: Path) -> None:
    whole, parts = (
        Predictor(H200).of(point)
        for point in read_space(write(tmp_path, TINY.replace("layers = 1,", "layers = 1, accumulate = [1, 2],"))).points
    )
    assert parts.units == whole.units and parts.peak_bytes < whole.peak_bytes and parts.seconds > 0.9 * whole.seconds


def test_a_point_that_cannot_be_made_is_one_without_seconds(tmp_path: Path) -> None:
    text = TINY.replace("heads = 2", "heads = [2, 3]")
    good, bad = (Predictor(H200).of(point) for point in read_space(write(tmp_path, text)).points)
    assert good.fits and not bad.seconds and "heads=3" in bad.reason


@pytest.mark.parametrize(
    ("verbs", "said"),
    [
        ('{ recompute = ["blocks.*", "bloks.*"] }', "did you mean blocks"),
        ('{ precision = ["head", "haed"], to = "bf16" }', "did you mean head?"),
        ('{ recompute = "blocks.*", ratio = [0, 2] }', "a number from 0 to 1"),
    ],
)
def test_a_line_that_does_not_fit_the_model_is_an_error(tmp_path: Path, verbs: str, said: str) -> None:
    with pytest.raises(WholestepError) as raised:
        predicted(tmp_path, "batch = 2", verbs)
    assert said in str(raised.value)
