"""Forty questions of the kind "will it fit?", answered on a CPU; later, the same steps measured on a card, as a scatter.

    python benchmarks/plan_questions.py                          # answers -> benchmarks/results/plan_questions.json
    python benchmarks/plan_questions.py --only bert-large        # some of them, added to the file
    python benchmarks/plan_questions.py --measured FILE --svg plan_questions.svg

In: three models, several batches and sequence lengths, several cards. Out: JSON rows with the predicted card bytes of the plan
that was chosen, or of the leanest when none fits. FILE holds measured rows {model, batch, seq, card_bytes, allocated_bytes?,
seconds?, out_of_memory?}, one per step that was run with the plan of the same model, batch and sequence on the same card; misses
(predicted to fit and did not, or the other way round) are drawn as crosses, never left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from wholestep.cost.target import find_target
from wholestep.report.fit import CapturedStep, Question, captured_step, will_it_fit
from wholestep.report.fit_text import fit_json
from wholestep.report.pictures.predicted_scatter import predicted_scatter

RESULTS = Path(__file__).resolve().parent / "results" / "plan_questions.json"
SIZES = {
    "llama-1b": ((2, 2048), (4, 2048), (8, 2048), (16, 2048)),
    "gpt2-medium": ((8, 1024), (16, 1024), (32, 1024)),
    "bert-large": ((16, 512), (32, 512), (64, 512)),
}
"""Model -> (batch, sequence length)."""
CARDS = ("h200", "a100-40gb", "rtx4090", "16GiB")
"""10 sizes on 4 cards: 40 questions. A card of a smaller size is asked of an H200 as a budget when it is measured."""


def questions() -> list[dict[str, Any]]:
    return [
        {"model": model, "batch": batch, "seq": seq, "device": card}
        for model, sizes in SIZES.items() for (batch, seq), card in itertools.product(sizes, CARDS)
    ]  # fmt: skip


def as_question(asked: dict[str, Any]) -> Question:
    target = find_target(asked["device"])
    budget = target.device.memory_bytes
    return Question(model=asked["model"], batch=asked["batch"], seq=asked["seq"], target=target, budget_bytes=budget)


def answer(asked: dict[str, Any], step: CapturedStep) -> dict[str, Any]:
    """One question as a row; the cards share one capture."""
    began = time.perf_counter()
    fit = will_it_fit(as_question(asked), step=step, find_batch=False)
    facts = fit_json(fit)
    point = facts["frontier"][fit.shown]
    return asked | {
        "fits": fit.fits, "budget_bytes": facts["budget_bytes"],
        "card_bytes": point["card_bytes"], "peak_bytes": point["peak_bytes"],
        "breakdown": point["breakdown"], "seconds": point["seconds"], "times": facts["times"], "recompute": point["recompute"],
        "precision": facts["settings"]["precision"],
        "frontier": [[p["card_bytes"], p["seconds"]] for p in facts["frontier"]],
        "seconds_to_capture": round(sum(step.seconds.values()), 1), "seconds_to_plan": round(time.perf_counter() - began, 1),
        "torch": torch.__version__,
    }  # fmt: skip


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["batch"], row["seq"], row.get("device", "h200")


def read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    held = json.loads(path.read_text(encoding="utf-8"))
    return held["rows"] if isinstance(held, dict) else held


def scatter(predicted: list[dict[str, Any]], measured: list[dict[str, Any]]) -> str:
    """Every question that has a measured row; a miss is a question whose yes or no was wrong."""
    by_key = {key(row): row for row in measured}
    points = []
    for row in predicted:
        found = by_key.get(key(row))
        if found is None:
            continue
        ran = not found.get("out_of_memory", False)
        held = ran and found["card_bytes"] <= row["budget_bytes"]
        name = f"{row['model']} {row['batch']} x {row['seq']} on {row['device']}"
        seen = found.get("card_bytes") or row["budget_bytes"]
        points.append((name, row["card_bytes"] / 2**30, seen / 2**30, row["fits"] == held))
    return predicted_scatter(points, title="Memory of a step: predicted on a laptop, measured on the card", unit="GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", help="one model, or one card")
    parser.add_argument("--measured", type=Path, help="measured rows; draws the scatter and answers nothing")
    parser.add_argument("--svg", type=Path, default=RESULTS.with_suffix(".svg"))
    given = parser.parse_args()
    rows = read_rows(given.out)
    if given.measured is not None:
        if not given.measured.is_file():
            sys.exit(f"plan_questions: there is no file {given.measured}")
        given.svg.write_text(scatter(rows, read_rows(given.measured)), encoding="utf-8")
        print(f"{given.svg} written")
        return
    wanted = {key(asked) for asked in questions()}
    known = {key(row): row for row in rows if key(row) in wanted}
    step, of = None, None
    for asked in questions():
        if given.only in (None, asked["model"], asked["device"]):
            if key(asked)[:3] != of:
                step, of = captured_step(as_question(asked)), key(asked)[:3]
            row = known[key(asked)] = answer(asked, step)
            said = "fits" if row["fits"] else "does not fit"
            took = row["seconds_to_capture"] + row["seconds_to_plan"]
            print(f"{' '.join(map(str, key(asked)))}: {said}, {row['card_bytes'] / 2**30:.1f} GiB, {took:.0f} s", flush=True)
            given.out.write_text(json.dumps({"rows": list(known.values())}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
